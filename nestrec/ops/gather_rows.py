"""Rows by index, with a gradient that is summed in a fixed order.

    forward    out[p] = rows[index[p]]
    backward   d rows[u] = sum of d out[p] over all p with index[p] = u, added in order of p

torch's own index_select adds in an order that depends on threads (CPU) or on atomics (CUDA), so two runs may differ;
here a run is repeatable to the bit, and sums agree whether a batch is computed in one part or, part by part, in
several.

Shapes: U rows, D elements of a row, P positions (of any shape).
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.parallel import for_parts


def gather_rows(rows_UD: torch.Tensor, index_P: torch.Tensor) -> torch.Tensor:
    """rows_UD[index_P] of shape (*index_P.shape, D); the gradient is summed in order of position."""
    return _GatherRows.apply(rows_UD, index_P)  # type: ignore[no-any-return]


def sum_by_index_reference(grad_PD: torch.Tensor, index_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The definition of the backward pass: one addition after the other."""
    out_UD = grad_PD.new_zeros(num_rows, grad_PD.shape[1])
    for position, row in enumerate(index_P.tolist()):
        out_UD[row] += grad_PD[position]
    return out_UD


def add_by_index(out_UD: torch.Tensor, index_P: torch.Tensor, grad_PD: torch.Tensor) -> None:
    """out[index[p]] += grad[p] for p in order, in place; float32 or float64."""
    if out_UD.device.type == "cpu":
        out, index, grad = out_UD.numpy(), index_P.numpy(), grad_PD.contiguous().numpy()
        # Threads share out rows, not positions, so that each row is still summed in order.
        for_parts(len(out), len(index), lambda low, high: _add(out, index, grad, low, high))
    else:
        out_UD += _segment_sum(grad_PD, index_P, len(out_UD))


def sum_by_index(grad_PD: torch.Tensor, index_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    """(num_rows, D) sums in order of position."""
    if grad_PD.device.type != "cpu":
        return _segment_sum(grad_PD, index_P, num_rows)
    out_UD = grad_PD.new_zeros(num_rows, grad_PD.shape[1])
    add_by_index(out_UD, index_P, grad_PD)
    return out_UD


def _segment_sum(grad_PD: torch.Tensor, index_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    """One sequential sum for each row over its positions, brought together by a stable sort: no atomics."""
    sorted_P, order_P = index_P.sort(stable=True)
    bounds = torch.arange(num_rows + 1, dtype=sorted_P.dtype, device=sorted_P.device)
    offsets = torch.searchsorted(sorted_P, bounds)
    return torch.segment_reduce(grad_PD.index_select(0, order_P), "sum", offsets=offsets, unsafe=True, initial=0.0)


@njit(cache=True, nogil=True)
def _add(out: NDArray[Any], index: NDArray[Any], grad: NDArray[Any], low: int, high: int) -> None:
    width = np.int64(grad.shape[1])
    for p in range(len(index)):
        row = index[p]
        if low <= row < high:
            for j in range(width):
                out[row, j] += grad[p, j]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_UD: torch.Tensor, index_P: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index_P)
        ctx.num_rows, ctx.dtype = rows_UD.shape[0], rows_UD.dtype
        flat = rows_UD.index_select(0, index_P.reshape(-1))
        return flat.view(*index_P.shape, rows_UD.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index_P,) = ctx.saved_tensors
        grad_PD = grads[0].reshape(-1, grads[0].shape[-1])
        wide = torch.promote_types(grad_PD.dtype, torch.float32)
        return sum_by_index(grad_PD.to(wide), index_P.reshape(-1), ctx.num_rows).to(ctx.dtype), None
