"""Rows by index, with a gradient that is summed in a fixed order.

    forward    out[p] = rows[index[p]]
    backward   d rows[u] = sum of d out[p] over all p with index[p] = u, in the order of nestrec.ops.rows.sum

torch's own index_select adds in an order that depends on threads (CPU) or on atomics (CUDA), so two runs may differ;
here a run is repeatable to the bit.

Shapes: U rows, D elements of a row, P positions (of any shape).
"""

from typing import Any

import torch

from nestrec.ops.kernel_op import kernel_op
from nestrec.ops.registry import runs_triton
from nestrec.ops.rows.move import move_rows
from nestrec.ops.rows.stored import StoredRows, TableRows
from nestrec.ops.rows.sum import sum_by_index

_WORD_BYTES = 4


def gather_rows(rows_UD: TableRows, index_P: torch.Tensor) -> torch.Tensor:
    """rows_UD[index_P] of shape (*index_P.shape, D); the gradient is summed in a fixed order."""
    if isinstance(rows_UD, StoredRows):
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
    size, (stride, unit) = rows_UD.element_size(), rows_UD.stride()
    sizes = size * rows_UD.shape[1], size * stride, size * rows_UD.storage_offset()
    return unit == 1 and rows_UD.shape[1] > 0 and all(b % _WORD_BYTES == 0 for b in sizes)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_UD: torch.Tensor, index_P: torch.Tensor, stored_UD: torch.Tensor | None) -> torch.Tensor:
        """stored: the values, where `rows` is the anchor of `StoredRows`."""
        ctx.save_for_backward(index_P)
        ctx.num_rows, ctx.dtype = rows_UD.shape[0], rows_UD.dtype
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
