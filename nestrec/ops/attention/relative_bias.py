"""Relative position and time bias of HSTU.

    bias[b, i, j] = position[place(j) - place(i) + centre] + time[bucket(query_time[b, i] - time[b, j])]
    bucket(dt)    = min(floor(ln(max(|dt|, 1)) / 0.301), num_buckets)          dt in seconds

Instead of a value for each bucket, the time may have a function with a few scalars (see time_function.py). The place of
a token is its position in the sequence, except that candidates share one (see mask.py).

Legend: T tokens of all sequences, B sequences, N padded length.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from nestrec.base.errors import UserError
from nestrec.ops.attention.mask import PLAIN, AttentionRules, places
from nestrec.ops.attention.time_function import functional_time_bias
from nestrec.ops.padding import padded_places


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
                field=" and ".join(given),
                value=[*given.values()],
                remedy="give time_T and query_time_T",
            )
        if len(given) > 1:
            raise UserError(
                "the time has one bias",
                field=" and ".join(given),
                value=[*given.values()],
                remedy="give a table or a function",
            )

    @property
    def is_empty(self) -> bool:
        return self.position_table is None and not self.has_time

    @property
    def has_time(self) -> bool:
        return self.time_table is not None or self.time_function is not None

    def dense(self, offsets: torch.Tensor, max_length: int, rules: AttentionRules = PLAIN) -> torch.Tensor:
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
