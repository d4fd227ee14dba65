"""Gathers and pools embedding rows, with gradients summed in a fixed order.

Rows by index, with a gradient that is summed in a fixed order.

    forward    out[p] = rows[index[p]]
    backward   d rows[u] = sum of d out[p] over all p with index[p] = u, in the order of nestrec.ops.rows.sum

torch's own index_select adds in an order that depends on threads (CPU) or on atomics (CUDA), so two runs may differ;
here a run is repeatable to the bit.

Shapes: U rows, D elements of a row, P positions (of any shape).

Rows of 16 bits as a loss reads them: gathered or scaled as they are stored, with gradients in float32.

autograd gives a tensor a gradient of its own type, so rows of 16 bits would have rounded ones, and a float32 leaf would
be a copy of all rows, twice as large as they are. So the leaf is an anchor: a float32 tensor of the rows' shape that is
one number in memory. Operators that know `HalfPrecisionRows` read the values and give their gradient to the anchor.

Sums of rows by segment (bags): a lookup and a sum in one pass, without the looked-up rows in memory.

    forward    out[b] = sum of w[p] rows[index[p]] over the positions p of segment b, in order of p
    backward   d rows[u] = sum of w[p] d out[segment of p] over all p with index[p] = u, in the order of
               nestrec.ops.rows.sum

w is 1 where no weights are given. A mean is the sum divided by the positions of its segment, 0 of an empty one.

Shapes: U rows, D elements of a row, P positions, B segments with B + 1 offsets.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.thread_team import for_parts
from nestrec.ops.embedding.row_copy import move_rows
from nestrec.ops.embedding.row_sum import sum_by_index, sum_by_runs
from nestrec.ops.kernel_op import kernel_op, runs_triton


@dataclass(frozen=True, slots=True)
class HalfPrecisionRows:
    """(U, D) rows; what is computed from them is float32."""

    values: torch.Tensor
    """as they are stored, of 16 bits"""
    anchor: torch.Tensor
    """float32 of the same shape; nothing but its gradient means anything"""

    @staticmethod
    def of(values: torch.Tensor) -> "HalfPrecisionRows":
        """A leaf on these values."""
        anchor = torch.zeros((), dtype=torch.float32, device=values.device).expand(values.shape)
        return HalfPrecisionRows(values.detach(), anchor.detach().requires_grad_())

    def whole(self) -> torch.Tensor:
        """All rows as float32: for whoever needs more of them than `gather_rows` and `unit_rows` give."""
        return _Widened.apply(self.anchor, self.values)  # type: ignore[no-any-return]


TableRows = torch.Tensor | HalfPrecisionRows
"""Distinct rows of a table."""


def leaf_and_values(rows: TableRows) -> tuple[torch.Tensor, torch.Tensor]:
    """What the gradient is of, and what is read: the same tensor, or anchor and values."""
    return (rows.anchor, rows.values) if isinstance(rows, HalfPrecisionRows) else (rows, rows)


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


_WORD_BYTES = 4


def gather_rows(rows_UD: TableRows, index_P: torch.Tensor) -> torch.Tensor:
    """rows_UD[index_P] of shape (*index_P.shape, D); the gradient is summed in a fixed order."""
    if isinstance(rows_UD, HalfPrecisionRows):
        return _GatherRows.apply(rows_UD.anchor, index_P, rows_UD.values)  # type: ignore[no-any-return]
    return _GatherRows.apply(rows_UD, index_P, None)  # type: ignore[no-any-return]


def deal_rows(rows_UD: torch.Tensor, index_P: torch.Tensor) -> torch.Tensor:
    """`gather_rows` where no row is taken twice: its gradient is a move, without a sum.

    Where the index is negative the first row is given, and no gradient comes back.
    """
    return _DealRows.apply(rows_UD, index_P)  # type: ignore[no-any-return]


def _fake(rows_UD: torch.Tensor, index_P: torch.Tensor) -> torch.Tensor:
    return rows_UD.new_empty(index_P.shape[0], rows_UD.shape[1])


@kernel_op("take_rows", fake=_fake)
def take_rows(rows_UD: torch.Tensor, index_P: torch.Tensor) -> torch.Tensor:
    """(P, D) rows_UD[index_P] for one-dimensional int32 or int64 places, without a gradient; rows may be strided."""
    if not runs_triton(rows_UD) or not _has_words(rows_UD):
        return rows_UD.index_select(0, index_P)
    out_PD = rows_UD.new_empty(len(index_P), rows_UD.shape[1])
    move_rows(rows_UD.view(torch.int32), out_PD.view(torch.int32), index_P.contiguous())
    return out_PD


def _has_words(rows_UD: torch.Tensor) -> bool:
    """Whether rows are whole int32 words; 16-bit rows of odd length are not."""
    size = rows_UD.element_size()
    (stride, unit) = rows_UD.stride()
    sizes = size * rows_UD.shape[1], size * stride, size * rows_UD.storage_offset()
    return unit == 1 and rows_UD.shape[1] > 0 and all(b % _WORD_BYTES == 0 for b in sizes)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_UD: torch.Tensor, index_P: torch.Tensor, stored_UD: torch.Tensor | None) -> torch.Tensor:
        """stored: the values, where `rows` is the anchor of `HalfPrecisionRows`."""
        ctx.save_for_backward(index_P)
        ctx.num_rows = rows_UD.shape[0]
        ctx.dtype = rows_UD.dtype
        read_UD = rows_UD if stored_UD is None else stored_UD
        taken_PD = take_rows(read_UD, index_P.reshape(-1)).to(rows_UD.dtype)
        return taken_PD.view(*index_P.shape, rows_UD.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (index_P,) = ctx.saved_tensors
        grad_PD = grads[0].reshape(-1, grads[0].shape[-1])
        return sum_by_index(grad_PD, index_P.reshape(-1), ctx.num_rows).to(ctx.dtype), None, None


class _DealRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_UD: torch.Tensor, index_P: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index_P)
        ctx.num_rows = rows_UD.shape[0]
        return take_rows(rows_UD, index_P.clamp(min=0).reshape(-1)).view(*index_P.shape, rows_UD.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        index_P = ctx.saved_tensors[0].reshape(-1)
        grad_PD = grads[0].reshape(-1, grads[0].shape[-1])
        out_UD = grad_PD.new_zeros(ctx.num_rows, grad_PD.shape[1])
        if _has_words(grad_PD):
            move_rows(grad_PD.view(torch.int32), out_UD.view(torch.int32), None, index_P)
        else:
            there = index_P >= 0
            out_UD[index_P[there]] = grad_PD[there]
        return out_UD, None


Pooling = Literal["sum", "mean", "weighted"]
"""How the rows of a bag become one vector; `weighted` is a sum of rows times the weights that come with their keys."""


def pool_bags(
    rows_UD: TableRows, index_P: torch.Tensor, offsets: torch.Tensor, how: Pooling, weight_P: torch.Tensor | None = None
) -> torch.Tensor:
    """(B, D) vectors of bags. weight_P: of each position, for `weighted` alone."""
    whole_UD = rows_UD.whole() if isinstance(rows_UD, HalfPrecisionRows) else rows_UD
    pooled_BD = pool_rows(whole_UD, index_P, offsets, weight_P if how == "weighted" else None)
    return pooled_BD / offsets.diff().clamp(min=1)[:, None] if how == "mean" else pooled_BD


def pool_rows(
    rows_UD: torch.Tensor, index_P: torch.Tensor, offsets: torch.Tensor, weight_P: torch.Tensor | None = None
) -> torch.Tensor:
    """(B, D) sums of `rows_UD[index_P]` over segments: the bags of `nn.EmbeddingBag`, as a task of your own has them.

    rows_UD: distinct rows. index_P: the row of each position. offsets: (B + 1,) where each segment begins. weight_P:
    what each is multiplied with; it gets no gradient.
    float32 and float64 on a CPU are fused; otherwise as `pool_rows_reference`.
    """
    if rows_UD.device.type == "cpu" and rows_UD.dtype in (torch.float32, torch.float64):
        return _PoolRows.apply(rows_UD, index_P, offsets, weight_P)  # type: ignore[no-any-return]
    return pool_rows_reference(rows_UD, index_P, offsets, weight_P)


def pool_rows_reference(
    rows_UD: torch.Tensor, index_P: torch.Tensor, offsets: torch.Tensor, weight_P: torch.Tensor | None = None
) -> torch.Tensor:
    """The same sums over the looked-up rows."""
    looked_up_PD = gather_rows(rows_UD, index_P)
    if weight_P is not None:
        looked_up_PD = looked_up_PD * weight_P.to(looked_up_PD.dtype)[:, None]
    return torch.segment_reduce(looked_up_PD, "sum", lengths=offsets.diff(), unsafe=True, initial=0.0)


@njit(cache=True, nogil=True)
def _pool(rows, index, offsets, weight, out, low, high):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for b in range(low, high):
        for p in range(offsets[b], offsets[b + 1]):
            row = index[p]
            for j in range(rows.shape[1]):
                out[b, j] += rows[row, j] * weight[p] if len(weight) else rows[row, j]


@njit(cache=True, nogil=True)
def _spread(offsets, grad, weight, out, index, low, high):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for b in range(len(offsets) - 1):
        for p in range(offsets[b], offsets[b + 1]):
            row = index[p]
            if low <= row < high:
                for j in range(grad.shape[1]):
                    out[row, j] += grad[b, j] * weight[p] if len(weight) else grad[b, j]


class _PoolRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_UD: torch.Tensor,
        index_P: torch.Tensor,
        offsets: torch.Tensor,
        weight_P: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(index_P, offsets)
        ctx.num_rows = len(rows_UD)
        ctx.weight = _weights(weight_P, rows_UD.dtype)
        out_BD = rows_UD.new_zeros(len(offsets) - 1, rows_UD.shape[1])
        rows, index, bounds = (t.detach().contiguous().numpy() for t in (rows_UD, index_P, offsets))
        out = out_BD.numpy()
        for_parts(len(out), len(index), lambda low, high: _pool(rows, index, bounds, ctx.weight, out, low, high))
        return out_BD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        index_P, offsets = ctx.saved_tensors
        grad_BD = grads[0].contiguous()
        index, bounds, grad = (t.contiguous().numpy() for t in (index_P, offsets, grad_BD))
        summed = sum_by_runs(index, ctx.num_rows, grad_BD, partial(_spread, bounds, grad, ctx.weight))
        return summed, None, None, None


def _weights(weight_P: torch.Tensor | None, dtype: torch.dtype) -> NDArray[Any]:
    """In the type of the rows; an empty array where there are none."""
    none = torch.zeros(0, dtype=dtype) if weight_P is None else weight_P.detach().to(dtype)
    return np.ascontiguousarray(none.numpy())
