"""Sums of rows by segment (bags): a lookup and a sum in one pass, without the looked-up rows in memory.

    forward    out[b] = sum of rows[index[p]] over the positions p of segment b, in order of p
    backward   d rows[u] = sum of d out[segment of p] over all p with index[p] = u, in the order of nestrec.ops.rows.sum

Shapes: U rows, D elements of a row, P positions, B segments with B + 1 offsets.
"""

from functools import partial
from typing import Any

import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.parallel import for_parts
from nestrec.ops.rows.gather import gather_rows
from nestrec.ops.rows.sum import sum_by_runs


def pool_rows(rows_UD: torch.Tensor, index_P: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """(B, D) sums of `rows_UD[index_P]` over segments: the bags of `nn.EmbeddingBag`, as a task of your own has them.

    rows_UD: distinct rows. index_P: the row of each position. offsets: (B + 1,) where each segment begins.
    float32 and float64 on a CPU are fused; otherwise as `pool_rows_reference`.
    """
    if rows_UD.device.type == "cpu" and rows_UD.dtype in (torch.float32, torch.float64):
        return _PoolRows.apply(rows_UD, index_P, offsets)  # type: ignore[no-any-return]
    return pool_rows_reference(rows_UD, index_P, offsets)


def pool_rows_reference(rows_UD: torch.Tensor, index_P: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The same sums over the looked-up rows."""
    looked_up_PD = gather_rows(rows_UD, index_P)
    return torch.segment_reduce(looked_up_PD, "sum", lengths=offsets.diff(), unsafe=True, initial=0.0)


@njit(cache=True, nogil=True)
def _pool(
    rows: NDArray[Any], index: NDArray[Any], offsets: NDArray[Any], out: NDArray[Any], part: tuple[int, int]
) -> None:
    for b in range(part[0], part[1]):
        for p in range(offsets[b], offsets[b + 1]):
            row = index[p]
            for j in range(rows.shape[1]):
                out[b, j] += rows[row, j]


@njit(cache=True, nogil=True)
def _spread(offsets, grad, out, index, low, high):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for b in range(len(offsets) - 1):
        for p in range(offsets[b], offsets[b + 1]):
            row = index[p]
            if low <= row < high:
                for j in range(grad.shape[1]):
                    out[row, j] += grad[b, j]


class _PoolRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_UD: torch.Tensor, index_P: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index_P, offsets)
        ctx.num_rows = len(rows_UD)
        out_BD = rows_UD.new_zeros(len(offsets) - 1, rows_UD.shape[1])
        rows, index, bounds = (t.detach().contiguous().numpy() for t in (rows_UD, index_P, offsets))
        out = out_BD.numpy()
        for_parts(len(out), len(index), lambda low, high: _pool(rows, index, bounds, out, (low, high)))
        return out_BD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        index_P, offsets = ctx.saved_tensors
        grad_BD = grads[0].contiguous()
        index, bounds, grad = (t.contiguous().numpy() for t in (index_P, offsets, grad_BD))
        return sum_by_runs(index, ctx.num_rows, grad_BD, partial(_spread, bounds, grad)), None, None
