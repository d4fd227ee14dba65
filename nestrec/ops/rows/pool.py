"""Sums of rows by segment (bags): a lookup and a sum in one pass, without the looked-up rows in memory.

    forward    out[b] = sum of w[p] rows[index[p]] over the positions p of segment b, in order of p
    backward   d rows[u] = sum of w[p] d out[segment of p] over all p with index[p] = u, in the order of
               nestrec.ops.rows.sum

w is 1 where no weights are given. A mean is the sum divided by the positions of its segment, 0 of an empty one.

Shapes: U rows, D elements of a row, P positions, B segments with B + 1 offsets.
"""

from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.parallel import for_parts
from nestrec.ops.rows.gather import gather_rows
from nestrec.ops.rows.stored import StoredRows, TableRows
from nestrec.ops.rows.sum import sum_by_runs

Pooling = Literal["sum", "mean", "weighted"]
"""How the rows of a bag become one vector; `weighted` is a sum of rows times the weights that come with their keys."""


def pool_bags(
    rows_UD: TableRows, index_P: torch.Tensor, offsets: torch.Tensor, how: Pooling, weight_P: torch.Tensor | None = None
) -> torch.Tensor:
    """(B, D) vectors of bags. weight_P: of each position, for `weighted` alone."""
    whole_UD = rows_UD.whole() if isinstance(rows_UD, StoredRows) else rows_UD
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
        ctx.num_rows, ctx.weight = len(rows_UD), _weights(weight_P, rows_UD.dtype)
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
