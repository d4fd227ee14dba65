"""Attention mask, relative position and time bias, and time function: reference implementations.

Every kernel is tested against these definitions.

Attention mask of HSTU, as a dense mask:

    h               = length - targets            number of history tokens
    position(i)     = min(i, h)                   all targets share the position of the next event
    i sees j     if   i == j
                 or   j < h and j < position(i) and (position(i) - j < max_attention_length or j < context)
                 or   i < context and j < h and looks_ahead

A target (candidate) attends to the history and to itself, never to another target. All tokens attend to the contextual
prefix, regardless of the maximum attention length. The prefix attends to the whole history if `looks_ahead` is set,
which is correct for features that are known before the first event. A prefix of events must not look ahead, because
its states would then contain what they predict: semi-local attention (ULTRA-HSTU, 2602.16986) combines a sliding
window with a prefix that does not look ahead.

Relative position and time bias of HSTU:

    bias[b, i, j] = position_table[position(j) - position(i) + center]
                    + time_table[bucket(query_time[b, i] - time[b, j])]
    bucket(dt)    = min(floor(ln(max(|dt|, 1)) / 0.301), num_buckets)          dt in seconds

Instead of a table of buckets, the time bias can be an exponential-power function of the time between two events
(FuXi-gamma, 2512.12740):

    b(dt) = amplitude * exp(-(dt / scale) ^ power)              dt = max(query time - key time, 1) in seconds
          = amplitude * exp(-exp(power * (ln dt - ln scale)))

The paper writes it as alpha * gamma ^ (dt ^ power) with gamma = exp(-scale ^ -power). A layer learns three scalars,
shared by its heads: (amplitude, ln scale, ln power), so that scale and power stay positive. Differences below one
second, and keys later than their query, count as one second, as they do in the first bucket of a table.

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
from nestrec.ops.padding import padded_indices


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMask:
    """Rules of the attention mask beyond plain causality: targets, contextual prefix and attention window."""

    num_targets_B: torch.Tensor | None = None
    """Number of targets (candidates) at the end of each sequence, (B,) int32 or int64; None if there are none."""
    num_context: int = 0
    """Number of leading tokens of every sequence that form its contextual prefix."""
    max_attention_length: int | None = None
    """Attention window: maximum number of keys per query, including itself but not the prefix; None is unlimited."""
    looks_ahead: bool = True
    """Whether tokens of the contextual prefix attend to later tokens."""

    def __post_init__(self) -> None:
        require(self.num_context >= 0, "must be at least 0", option="num_context", value=self.num_context)
        if self.max_attention_length is not None and self.max_attention_length < 1:
            raise UserError(
                "must be at least 1, because a query attends to itself",
                option="max_attention_length",
                value=self.max_attention_length,
                remedy="set it to 1 or more, or to None for no limit",
            )

    @property
    def is_plain(self) -> bool:
        """True if the mask is plain causality."""
        return self.num_targets_B is None and self.num_context == 0 and self.max_attention_length is None

    @property
    def is_square(self) -> bool:
        """True if some tokens attend to later tokens, so that the mask is not causal."""
        return self.num_context > 0 and self.looks_ahead


PLAIN = AttentionMask()


def semi_local(window: int | None, prefix: int = 0) -> AttentionMask:
    """Return the mask of sliding-window attention with a prefix that all later tokens attend to.

    Args:
        window: Number of most recent tokens that a query attends to, including itself; None is full causal attention.
        prefix: Number of leading tokens that every later token attends to; ignored without a window.
    """
    return AttentionMask(max_attention_length=window, num_context=prefix if window else 0, looks_ahead=False)


def causal_pairs(lengths: NDArray[np.int64], window: int | None = None, prefix: int = 0) -> float:
    """Return the number of (query, visible key) pairs of `semi_local` attention in sequences of these lengths."""
    if window is None:
        return float((lengths * (lengths + 1)).sum()) / 2
    return _sum_of_capped_ranges(lengths, window) + _sum_of_capped_ranges(np.maximum(lengths - window, 0), prefix)


def _sum_of_capped_ranges(counts: NDArray[np.int64], limit: int) -> float:
    """Return the sum of min(1, limit) + min(2, limit) + ... + min(count, limit) over all counts."""
    rising = np.minimum(counts, limit)
    return float((rising * (rising + 1) / 2 + (counts - rising) * limit).sum())


def history_lengths(offsets: torch.Tensor, rules: AttentionMask) -> torch.Tensor:
    """Return the number of tokens before the targets of each sequence, (B,) int64."""
    lengths_B = offsets.diff()
    return lengths_B if rules.num_targets_B is None else (lengths_B - rules.num_targets_B).clamp(min=0)


def token_positions(offsets: torch.Tensor, max_length: int, rules: AttentionMask) -> torch.Tensor:
    """Return the position of each token in its sequence, (B, N) int64; targets share the one after the history."""
    token_N = torch.arange(max_length, device=offsets.device)
    return torch.minimum(token_N[None], history_lengths(offsets, rules)[:, None])


def attention_mask(offsets: torch.Tensor, max_length: int, rules: AttentionMask) -> torch.Tensor:
    """Return the dense attention mask, (B, N, N) bool: whether query i (dim 1) attends to key j (dim 2).

    Rows after the end of a sequence are undefined.
    """
    token_N = torch.arange(max_length, device=offsets.device)
    history_B11 = history_lengths(offsets, rules)[:, None, None]
    position_BN1 = token_positions(offsets, max_length, rules)[:, :, None]
    i, j = token_N[None, :, None], token_N[None, None, :]
    is_near = torch.ones_like(position_BN1 - j, dtype=torch.bool)
    if rules.max_attention_length is not None:
        is_near = (position_BN1 - j < rules.max_attention_length) | (j < rules.num_context)
    by_history = (j < history_B11) & (((j < position_BN1) & is_near) | (rules.looks_ahead & (i < rules.num_context)))
    return by_history | (i == j)


def masked_weights(weights: torch.Tensor, offsets: torch.Tensor, rules: AttentionMask) -> torch.Tensor:
    """Return the weights with masked pairs set to zero.

    Weights are (H, N, N) for one sequence, (B or 1, N, N) or (B, H, N, N).
    """
    if rules.is_plain:
        return weights.tril()
    seen_BNN = attention_mask(offsets, weights.shape[-1], rules)
    return torch.where(seen_BNN if weights.dim() == 3 else seen_BNN[:, None], weights, 0.0)


def mask_of_sequences(rules: AttentionMask, selection: slice | torch.Tensor) -> AttentionMask:
    """Return the mask of a selection of the sequences of a batch."""
    return rules if rules.num_targets_B is None else replace(rules, num_targets_B=rules.num_targets_B[selection])


NUM_SCALARS = 3
"""Number of scalars of a time function: amplitude, ln scale and ln power."""
LARGEST_EXPONENT = 20.0
"""Upper bound of power * (ln dt - ln scale). exp(-exp(20)) is 0 in every dtype, and the bound avoids 0 * infinity."""
_FIRST_SCALE_S, _FIRST_POWER = 86400.0, 0.5
"""Initial scale in seconds and initial power: the function decays between one minute and one month."""


def initial_time_function() -> nn.Parameter:
    """Return the initial time function of a layer, (3,); the amplitude is initialized like the values of a table."""
    amplitude = torch.empty(1).normal_(std=0.02)
    return nn.Parameter(torch.cat([amplitude, torch.tensor([math.log(_FIRST_SCALE_S), math.log(_FIRST_POWER)])]))


def log_seconds(delta_s: torch.Tensor) -> torch.Tensor:
    """Return ln(max(dt, 1)), the input of a time function, for time differences in seconds (float64, any shape)."""
    return delta_s.clamp(min=1.0).log()


def time_function_values(scalars: torch.Tensor, log_s: torch.Tensor) -> torch.Tensor:
    """Return the values of a time function at logarithmic time differences.

    Args:
        scalars: Amplitude, ln scale and ln power, (3,).
        log_s: Result of `log_seconds`, any shape.

    Returns:
        Values of the same shape in float32, or in float64 if the scalars are float64.
    """
    amplitude, log_scale, log_power = scalars.to(torch.promote_types(scalars.dtype, torch.float32)).unbind()
    exponent = log_power.exp() * (log_s.to(amplitude.dtype) - log_scale)
    return amplitude * exponent.clamp(max=LARGEST_EXPONENT).exp().neg().exp()


def functional_time_bias(scalars: torch.Tensor, query_time_BN: torch.Tensor, time_BN: torch.Tensor) -> torch.Tensor:
    """Return the time bias of query i and key j by a time function, (B, N, N); times in seconds."""
    return time_function_values(scalars, log_seconds(query_time_BN[:, :, None] - time_BN[:, None, :]))


def function_gradient(scalars: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the scalars from the sums over pairs of g e, g e u and g e u x.

    Here b = amplitude e, e = exp(-u), u = exp(x), and g is the gradient of the bias of a pair.
    """
    amplitude, _, log_power = scalars.detach().to(sums.dtype).unbind()
    gradient = torch.stack([sums[0], amplitude * log_power.exp() * sums[1], -amplitude * sums[2]])
    return gradient.to(scalars.dtype)


def time_bucket(delta_s: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Return the bucket of time differences in seconds; 0.301 with the natural logarithm is HSTU's published recipe."""
    return (delta_s.abs().clamp(min=1.0).log() / 0.301).floor().to(torch.int64).clamp(max=num_buckets)


@lru_cache(maxsize=32)
def bucket_edges(num_buckets: int, device: torch.device) -> torch.Tensor:
    """Return the lower edge of each bucket of `time_bucket`, followed by infinity, (num_buckets + 2,) float64.

    Kernels compare with these edges, because a float64 logarithm per token pair would cost many times the attention.
    """
    number = torch.arange(num_buckets + 1, dtype=torch.float64)
    edge = (0.301 * number).exp()
    for _ in range(64):  # rounding leaves the edge a few units off the smallest value of the bucket
        edge = torch.where(time_bucket(edge, num_buckets) < number, edge.nextafter(2.0 * edge), edge)
    for _ in range(64):
        below = edge.nextafter(0.5 * edge)
        edge = torch.where(time_bucket(below, num_buckets) >= number, below, edge)
    edge[0] = 0.0
    return torch.cat([edge, edge.new_full((1,), torch.inf)]).to(device)


class _TableValues(torch.autograd.Function):
    """Gather `table[index]` whose backward pass is one histogram instead of one addition per element."""

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
    """Return the sum of the weights of each index, (size,) float64, reproducibly.

    Weights are added as integers, so that the sum does not depend on the order.
    """
    max_bits = 62 - index.numel().bit_length()  # bits per weight with which the sum of all weights cannot overflow
    quantum: torch.Tensor = torch.linalg.vector_norm(weights, ord=torch.inf).double() * 2.0 ** -min(max_bits, 34)
    units = (weights.double() / torch.where(quantum == 0.0, 1.0, quantum)).round().long()
    sums: torch.Tensor = torch.zeros(size, dtype=torch.int64, device=index.device).index_add_(0, index, units)
    return sums.double() * quantum


def table_values(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the values of a small one-dimensional table at `index` (any shape), with a fast backward pass."""
    return _TableValues.apply(table, index)  # type: ignore[no-any-return]


def position_bias(table: torch.Tensor, length: int) -> torch.Tensor:
    """Return the bias of the distance between query i and key j, (N, N); `table` has 2 * max_length - 1 values."""
    positions = torch.arange(length, device=table.device)
    return table_values(table, positions[None, :] - positions[:, None] + (table.numel() - 1) // 2)


def time_bias(table: torch.Tensor, query_time_BN: torch.Tensor, time_BN: torch.Tensor) -> torch.Tensor:
    """Return the bias of the time between query i and key j, (B, N, N).

    Times are in seconds; `table` has num_buckets + 1 values.
    """
    return table_values(table, time_bucket(query_time_BN[:, :, None] - time_BN[:, None, :], table.numel() - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeBias:
    """Learned relative bias of the distance and of the time between tokens, shared by the heads; either may be absent.

    The time bias is a table of buckets or a time function, not both.
    """

    position_table: torch.Tensor | None = None
    """Bias per distance, (2 * max_length - 1,); the middle value is for distance 0."""
    time_table: torch.Tensor | None = None
    """Bias per time bucket, (num_buckets + 1,)."""
    time_function: torch.Tensor | None = None
    """Amplitude, ln scale and ln power of a time function, (3,)."""
    time_T: torch.Tensor | None = None
    """Time of each token as a key, (T,) float64 seconds; required by the time bias."""
    query_time_T: torch.Tensor | None = None
    """Time of each token as a query, (T,) float64 seconds; required by the time bias."""
    buckets: torch.Tensor | None = None
    """Precomputed time buckets of all pairs in tiles (see pair_tiles.py); if None, the kernels compute them."""

    def __post_init__(self) -> None:
        time_biases = {
            name: tuple(x.shape) for name in ("time_table", "time_function") if (x := getattr(self, name)) is not None
        }
        if time_biases and (self.time_T is None or self.query_time_T is None):
            raise UserError(
                "a time bias requires the time of every token",
                option=" and ".join(time_biases),
                value=[*time_biases.values()],
                remedy="pass time_T and query_time_T",
            )
        if len(time_biases) > 1:
            raise UserError(
                "only one time bias is allowed",
                option=" and ".join(time_biases),
                value=[*time_biases.values()],
                remedy="pass either a table or a function",
            )

    @property
    def is_empty(self) -> bool:
        return self.position_table is None and not self.has_time

    @property
    def has_time(self) -> bool:
        return self.time_table is not None or self.time_function is not None

    def dense(self, offsets: torch.Tensor, max_length: int, rules: AttentionMask = PLAIN) -> torch.Tensor:
        """Return the sum of the biases as a dense tensor, (B or 1, N, N). This is the reference implementation."""
        total: torch.Tensor | None = None
        if self.position_table is not None and rules.num_targets_B is None:
            total = position_bias(self.position_table, max_length)[None]
        elif self.position_table is not None:
            position_BN = token_positions(offsets, max_length, rules)
            distance = position_BN[:, None, :] - position_BN[:, :, None]
            total = table_values(self.position_table, distance + (self.position_table.numel() - 1) // 2)
        if self.has_time:
            bias_by_time = self._time_bias(*self._padded_times(offsets, max_length))
            total = bias_by_time if total is None else total + bias_by_time
        assert total is not None
        return total

    def _time_bias(self, query_time_BN: torch.Tensor, time_BN: torch.Tensor) -> torch.Tensor:
        if self.time_function is not None:
            return functional_time_bias(self.time_function, query_time_BN, time_BN)
        assert self.time_table is not None
        return time_bias(self.time_table, query_time_BN, time_BN)

    def _padded_times(self, offsets: torch.Tensor, max_length: int) -> list[torch.Tensor]:
        assert self.time_T is not None
        assert self.query_time_T is not None
        index_T = padded_indices(offsets, self.time_T.numel(), max_length)
        shape = (offsets.numel() - 1, max_length)
        return [
            t.new_zeros(shape[0] * shape[1]).index_copy(0, index_T, t).view(shape)
            for t in (self.query_time_T, self.time_T)
        ]
