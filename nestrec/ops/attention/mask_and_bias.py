"""Attention mask, relative bias and time function: the reference definitions.

Who sees whom in HSTU attention, as one dense mask: the definition that every kernel is tested against.

    h               = length - targets           tokens of the history
    place(i)        = min(i, h)                   all targets stand where the next event would
    i sees j     if   i == j
                 or   j < h and j < place(i) and (place(i) - j < max_attention_length or j < context)
                 or   i < context and j < h and looks_ahead

A target sees the history and itself, never another target. The contextual prefix is seen by everybody, however short
the maximum attention length is, and sees the whole history: right for what is known of a user beforehand. The first
events of a history may not look ahead, or states would know what they predict: semi-local attention (ULTRA-HSTU,
2602.16986) is a window and a prefix that does not.

Legend: B sequences, N padded length.

A time bias without buckets: an exponential-power function of the time between two events (FuXi-gamma, 2512.12740).

    b(dt) = amplitude * exp(-(dt / scale) ^ power)              dt = max(query time - key time, 1) in seconds
          = amplitude * exp(-exp(power * (ln dt - ln scale)))

As published it is alpha * gamma ^ (dt ^ power): gamma = exp(-scale ^ -power). A layer learns three numbers, shared by
its heads, as (amplitude, ln scale, ln power): scale and power stay positive whatever is learnt. Differences below a
second, and keys later than their query, count as a second, as they do in the first bucket of a table.

Relative position and time bias of HSTU.

    bias[b, i, j] = position[place(j) - place(i) + centre] + time[bucket(query_time[b, i] - time[b, j])]
    bucket(dt)    = min(floor(ln(max(|dt|, 1)) / 0.301), num_buckets)          dt in seconds

Instead of a value for each bucket, the time may have a function with a few scalars (see time_function.py). The place of
a token is its position in the sequence, except that candidates share one (see mask.py).

Legend: T tokens of all sequences, B sequences, N padded length.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nestrec.base.errors import UserError, require
from nestrec.ops.padding import padded_places


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMask:
    """What is seen besides plain causality."""

    num_targets_B: torch.Tensor | None = None
    """int32 or int64; so many last tokens of each sequence are candidates"""
    num_context: int = 0
    """first tokens of every sequence that are its contextual prefix"""
    max_attention_length: int | None = None
    """keys that a query sees at most, itself included and the prefix apart; None for all"""
    looks_ahead: bool = True
    """whether the contextual prefix sees what comes after it"""

    def __post_init__(self) -> None:
        require(self.num_context >= 0, "a count of tokens is at least 0", option="num_context", value=self.num_context)
        if self.max_attention_length is not None and self.max_attention_length < 1:
            raise UserError(
                "a query sees at least itself",
                option="max_attention_length",
                value=self.max_attention_length,
                remedy="give at least 1, or None for no limit",
            )

    @property
    def is_plain(self) -> bool:
        """Whether this is causality alone."""
        return self.num_targets_B is None and self.num_context == 0 and self.max_attention_length is None

    @property
    def is_square(self) -> bool:
        """Whether some tokens see later ones."""
        return self.num_context > 0 and self.looks_ahead


PLAIN = AttentionMask()


def semi_local(window: int | None, prefix: int = 0) -> AttentionMask:
    """Causal attention to the last `window` tokens, itself included, and to the first `prefix` ones."""
    return AttentionMask(max_attention_length=window, num_context=prefix if window else 0, looks_ahead=False)


def causal_pairs(lengths: NDArray[np.int64], window: int | None = None, prefix: int = 0) -> float:
    """Pairs of `semi_local` attention, each of a token and one that it sees, in sequences of these lengths."""
    if window is None:
        return float((lengths * (lengths + 1)).sum()) / 2
    return _sum_of_least(lengths, window) + _sum_of_least(np.maximum(lengths - window, 0), prefix)


def _sum_of_least(counts: NDArray[np.int64], most: int) -> float:
    """Of min(1, most) + min(2, most) + ... up to each count."""
    rising = np.minimum(counts, most)
    return float((rising * (rising + 1) / 2 + (counts - rising) * most).sum())


def history_lengths(offsets: torch.Tensor, rules: AttentionMask) -> torch.Tensor:
    """(B,) int64 tokens before the targets."""
    lengths_B = offsets.diff()
    return lengths_B if rules.num_targets_B is None else (lengths_B - rules.num_targets_B).clamp(min=0)


def places(offsets: torch.Tensor, max_length: int, rules: AttentionMask) -> torch.Tensor:
    """(B, N) int64 places in the sequence; targets share the first one after the history."""
    token_N = torch.arange(max_length, device=offsets.device)
    return torch.minimum(token_N[None], history_lengths(offsets, rules)[:, None])


def seen_mask(offsets: torch.Tensor, max_length: int, rules: AttentionMask) -> torch.Tensor:
    """(B, N, N) bool: query i (dim 1) sees key j (dim 2). Rows behind the end of a sequence mean nothing."""
    token_N = torch.arange(max_length, device=offsets.device)
    history_B11 = history_lengths(offsets, rules)[:, None, None]
    place_BN1 = places(offsets, max_length, rules)[:, :, None]
    i, j = token_N[None, :, None], token_N[None, None, :]
    is_near = torch.ones_like(place_BN1 - j, dtype=torch.bool)
    if rules.max_attention_length is not None:
        is_near = (place_BN1 - j < rules.max_attention_length) | (j < rules.num_context)
    by_history = (j < history_B11) & (((j < place_BN1) & is_near) | (rules.looks_ahead & (i < rules.num_context)))
    return by_history | (i == j)


def seen_weights(weights: torch.Tensor, offsets: torch.Tensor, rules: AttentionMask) -> torch.Tensor:
    """Weights, zero where a query does not look. (H, N, N) of one sequence, (B or 1, N, N) or (B, H, N, N)."""
    if rules.is_plain:
        return weights.tril()
    seen_BNN = seen_mask(offsets, weights.shape[-1], rules)
    return torch.where(seen_BNN if weights.dim() == 3 else seen_BNN[:, None], weights, 0.0)


def rules_of_sequences(rules: AttentionMask, chosen: slice | torch.Tensor) -> AttentionMask:
    """Of some sequences of a batch."""
    return rules if rules.num_targets_B is None else replace(rules, num_targets_B=rules.num_targets_B[chosen])


NUM_SCALARS = 3
"""amplitude, ln scale, ln power"""
LARGEST_EXPONENT = 20.0
"""of power * (ln dt - ln scale): exp(-exp(20)) is 0 in every format, and a product of 0 and infinity is avoided"""
_FIRST_SCALE_S, _FIRST_POWER = 86400.0, 0.5
"""The function falls from a minute to a month before anything is learnt."""


def initial_time_function() -> nn.Parameter:
    """(3,) of a layer; the amplitude is drawn as the values of a table are."""
    amplitude = torch.empty(1).normal_(std=0.02)
    return nn.Parameter(torch.cat([amplitude, torch.tensor([math.log(_FIRST_SCALE_S), math.log(_FIRST_POWER)])]))


def log_seconds(delta_s: torch.Tensor) -> torch.Tensor:
    """ln dt: all that a layer needs to know of a time difference, float64, of any shape."""
    return delta_s.clamp(min=1.0).log()


def time_function_values(scalars: torch.Tensor, log_s: torch.Tensor) -> torch.Tensor:
    """b of `log_seconds`, of their shape, in float32 or in float64 where the scalars are."""
    amplitude, log_scale, log_power = scalars.to(torch.promote_types(scalars.dtype, torch.float32)).unbind()
    exponent = log_power.exp() * (log_s.to(amplitude.dtype) - log_scale)
    return amplitude * exponent.clamp(max=LARGEST_EXPONENT).exp().neg().exp()


def functional_time_bias(scalars: torch.Tensor, query_time_BN: torch.Tensor, time_BN: torch.Tensor) -> torch.Tensor:
    """(B, N, N) bias of the time between query i and key j; times in seconds."""
    return time_function_values(scalars, log_seconds(query_time_BN[:, :, None] - time_BN[:, None, :]))


def function_gradient(scalars: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Of the scalars, from sums over pairs of g e, g e u and g e u x: b = amplitude e, e = exp(-u), u = exp(x)."""
    amplitude, _, log_power = scalars.detach().to(sums.dtype).unbind()
    found = torch.stack([sums[0], amplitude * log_power.exp() * sums[1], -amplitude * sums[2]])
    return found.to(scalars.dtype)


def time_bucket(delta_s: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Bucket of a time difference in seconds; the published recipe takes natural logarithms over 0.301."""
    return (delta_s.abs().clamp(min=1.0).log() / 0.301).floor().to(torch.int64).clamp(max=num_buckets)


@lru_cache(maxsize=32)
def bucket_edges(num_buckets: int, device: torch.device) -> torch.Tensor:
    """(num_buckets + 2,) float64: the least difference that `time_bucket` puts into each bucket; infinity behind them.

    Kernels compare with these: a logarithm in float64 for every pair of tokens would cost many times the attention.
    """
    number = torch.arange(num_buckets + 1, dtype=torch.float64)
    edge = (0.301 * number).exp()
    for _ in range(64):  # rounding puts it some units beside the first that has reached the bucket
        edge = torch.where(time_bucket(edge, num_buckets) < number, edge.nextafter(2.0 * edge), edge)
    for _ in range(64):
        below = edge.nextafter(0.5 * edge)
        edge = torch.where(time_bucket(below, num_buckets) >= number, below, edge)
    edge[0] = 0.0
    return torch.cat([edge, edge.new_full((1,), torch.inf)]).to(device)


class _TableValues(torch.autograd.Function):
    """`table[index]`, whose backward is one histogram instead of an addition for each element."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.table_size = table.numel()  # type: ignore[attr-defined]
        return table[index]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors  # type: ignore[attr-defined]
        size: int = ctx.table_size  # type: ignore[attr-defined]
        weights = grads[0].reshape(-1)
        sums = repeatable_sums if weights.is_cuda else _histogram
        return sums(index.reshape(-1), weights, size).to(weights.dtype), None


def _histogram(index: torch.Tensor, weights: torch.Tensor, size: int) -> torch.Tensor:
    return torch.bincount(index, weights=weights, minlength=size)


def repeatable_sums(index: torch.Tensor, weights: torch.Tensor, size: int) -> torch.Tensor:
    """(size) float64 sums of the weights of each index, as integers: their sum does not depend on the order."""
    room = 62 - index.numel().bit_length()  # bits of one weight: all of them have one sum at most
    quantum: torch.Tensor = torch.linalg.vector_norm(weights, ord=torch.inf).double() * 2.0 ** -min(room, 34)
    units = (weights.double() / torch.where(quantum == 0.0, 1.0, quantum)).round().long()
    sums: torch.Tensor = torch.zeros(size, dtype=torch.int64, device=index.device).index_add_(0, index, units)
    return sums.double() * quantum


def table_values(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Values of a small one-dimensional table at `index` (any shape)."""
    return _TableValues.apply(table, index)  # type: ignore[no-any-return]


def position_bias(table: torch.Tensor, length: int) -> torch.Tensor:
    """(N, N) bias of the distance between query i and key j; `table` holds 2 * max_length - 1 values."""
    positions = torch.arange(length, device=table.device)
    return table_values(table, positions[None, :] - positions[:, None] + (table.numel() - 1) // 2)


def time_bias(table: torch.Tensor, query_time_BN: torch.Tensor, time_BN: torch.Tensor) -> torch.Tensor:
    """(B, N, N) bias of the time between query i and key j; times in seconds, `table` holds num_buckets + 1 values."""
    return table_values(table, time_bucket(query_time_BN[:, :, None] - time_BN[:, None, :], table.numel() - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeBias:
    """Learned biases of the distance and of the time between tokens; either may be absent. Shared by the heads.

    The time has a table of buckets or a function, not both.
    """

    position_table: torch.Tensor | None = None
    """2 * longest - 1 values, the middle one for distance 0"""
    time_table: torch.Tensor | None = None
    """num_buckets + 1 values"""
    time_function: torch.Tensor | None = None
    """(amplitude, ln scale, ln power) of `time_function.py`"""
    time_T: torch.Tensor | None = None
    """float64 seconds of each token; needed by the time bias"""
    query_time_T: torch.Tensor | None = None
    """float64 seconds at which each token asks; needed by the time bias"""
    buckets: torch.Tensor | None = None
    """time buckets of all pairs (pair_tiles.py), where they have been found before; kernels find them otherwise"""

    def __post_init__(self) -> None:
        given = {
            name: tuple(x.shape) for name in ("time_table", "time_function") if (x := getattr(self, name)) is not None
        }
        if given and (self.time_T is None or self.query_time_T is None):
            raise UserError(
                "the time bias needs the time of every token",
                option=" and ".join(given),
                value=[*given.values()],
                remedy="give time_T and query_time_T",
            )
        if len(given) > 1:
            raise UserError(
                "the time has one bias",
                option=" and ".join(given),
                value=[*given.values()],
                remedy="give a table or a function",
            )

    @property
    def is_empty(self) -> bool:
        return self.position_table is None and not self.has_time

    @property
    def has_time(self) -> bool:
        return self.time_table is not None or self.time_function is not None

    def dense(self, offsets: torch.Tensor, max_length: int, rules: AttentionMask = PLAIN) -> torch.Tensor:
        """(B or 1, N, N) sum of the biases: the definition."""
        total: torch.Tensor | None = None
        if self.position_table is not None and rules.num_targets_B is None:
            total = position_bias(self.position_table, max_length)[None]
        elif self.position_table is not None:
            place_BN = places(offsets, max_length, rules)
            distance = place_BN[:, None, :] - place_BN[:, :, None]
            total = table_values(self.position_table, distance + (self.position_table.numel() - 1) // 2)
        if self.has_time:
            by_time = self._by_time(*self._padded_times(offsets, max_length))
            total = by_time if total is None else total + by_time
        assert total is not None
        return total

    def _by_time(self, query_time_BN: torch.Tensor, time_BN: torch.Tensor) -> torch.Tensor:
        if self.time_function is not None:
            return functional_time_bias(self.time_function, query_time_BN, time_BN)
        assert self.time_table is not None
        return time_bias(self.time_table, query_time_BN, time_BN)

    def _padded_times(self, offsets: torch.Tensor, max_length: int) -> list[torch.Tensor]:
        assert self.time_T is not None
        assert self.query_time_T is not None
        place_T = padded_places(offsets, self.time_T.numel(), max_length)
        shape = (offsets.numel() - 1, max_length)
        return [
            t.new_zeros(shape[0] * shape[1]).index_copy(0, place_T, t).view(shape)
            for t in (self.query_time_T, self.time_T)
        ]
