"""Gradients of rows from the slopes of logits, without a vector for each position.

    out[u] = sum of slope[t, n] * query[t] over all (t, n) with index[t, n] = u

in order of (t, n), by the runs of nestrec.ops.rows.sum: the target that half a batch is compared with has a hundred
thousand positions, and one chain of additions over them took longer than the model. The order is fixed, so a run is
repeatable to the bit on each device.

Legend: T tokens, N candidates of a token, U rows, D channels, P = T * N positions.
"""

from typing import Any

import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.ops.kernel_op import kernel_op
from nestrec.ops.registry import runs_triton
from nestrec.ops.rows.sum import sum_by_index_reference, sum_by_runs


def sum_outer_reference(
    slope_TN: torch.Tensor, query_TD: torch.Tensor, index_TN: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """The definition: a vector for each position after all."""
    outer_PD = (slope_TN[:, :, None] * query_TD[:, None]).flatten(0, 1)
    return sum_by_index_reference(outer_PD, index_TN.flatten(), num_rows)


def sum_outer(slope_TN: torch.Tensor, query_TD: torch.Tensor, index_TN: torch.Tensor, num_rows: int) -> torch.Tensor:
    """(num_rows, D) sums in the type of the slopes; float32 or float64."""
    if runs_triton(slope_TN):
        return sum_outer_on_device(slope_TN, query_TD, index_TN, num_rows)
    wide_TD = query_TD.to(slope_TN.dtype).contiguous()
    slope, query, index = slope_TN.contiguous().numpy(), wide_TD.numpy(), index_TN.contiguous().numpy().reshape(-1)
    return sum_by_runs(index, num_rows, wide_TD, lambda out, rows, low, high: _add(out, rows, slope, query, low, high))


def _fake(slope: torch.Tensor, query: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    return slope.new_empty(num_rows, query.shape[1])


@kernel_op("sum_outer", fake=_fake)
def sum_outer_on_device(slope: torch.Tensor, query: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The same by kernels: one program a run, positions in order by tiles of a few."""
    from nestrec.ops.losses.sampled_kernels import sum_outer_kernel

    return sum_outer_kernel(slope, query, index, num_rows)


@njit(cache=True, nogil=True)
def _add(  # noqa: PLR0917
    out: NDArray[Any], rows: NDArray[Any], slope: NDArray[Any], query: NDArray[Any], low: int, high: int
) -> None:
    width = slope.shape[1]
    for t in range(slope.shape[0]):
        for n in range(width):
            row, weight = rows[t * width + n], slope[t, n]
            if low <= row < high and weight != 0.0:
                for d in range(query.shape[1]):
                    out[row, d] += weight * query[t, d]
