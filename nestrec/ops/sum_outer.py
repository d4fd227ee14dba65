"""Gradients of rows from the slopes of logits, without a vector for each position.

    out[u] = sum of slope[t, n] * query[t] over all (t, n) with index[t, n] = u, added in order of (t, n)

The order is fixed, so a run is repeatable to the bit on each device.

Legend: T tokens, N candidates of a token, U rows, D channels.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.parallel import for_parts
from nestrec.ops.kernel_op import kernel_op
from nestrec.ops.registry import runs_triton


def sum_outer_reference(
    slope_TN: torch.Tensor, query_TD: torch.Tensor, index_TN: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """The definition."""
    out_UD = query_TD.new_zeros(num_rows, query_TD.shape[1])
    for token, places in enumerate(index_TN.tolist()):
        for n, row in enumerate(places):
            out_UD[row] += slope_TN[token, n] * query_TD[token]
    return out_UD


def sum_outer(slope_TN: torch.Tensor, query_TD: torch.Tensor, index_TN: torch.Tensor, num_rows: int) -> torch.Tensor:
    """(num_rows, D) sums in the type of the slopes; float32 or float64."""
    if runs_triton(slope_TN):
        return sum_outer_on_device(slope_TN, query_TD, index_TN, num_rows)
    out = np.zeros((num_rows, query_TD.shape[1]), slope_TN.numpy().dtype)
    slope, index = slope_TN.contiguous().numpy(), index_TN.contiguous().numpy()
    query = query_TD.to(slope_TN.dtype).contiguous().numpy()
    # Threads share out rows, not positions, so that each row is still summed in order.
    for_parts(num_rows, index.size, lambda low, high: _sum_outer(out, slope, query, index, low, high))
    return torch.from_numpy(out)


def _fake(slope: torch.Tensor, query: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    return slope.new_empty(num_rows, query.shape[1])


@kernel_op("sum_outer", fake=_fake)
def sum_outer_on_device(slope: torch.Tensor, query: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The same by a kernel: one program a row, positions in order by tiles of a few."""
    from nestrec.ops.sampled_loss_kernels import sum_outer_kernel

    return sum_outer_kernel(slope, query, index, num_rows)


@njit(cache=True, nogil=True)
def _sum_outer(  # noqa: PLR0917
    out: NDArray[Any], slope: NDArray[Any], query: NDArray[Any], index: NDArray[Any], low: int, high: int
) -> None:
    for t in range(index.shape[0]):
        for n in range(index.shape[1]):
            row, weight = index[t, n], slope[t, n]
            if low <= row < high and weight != 0.0:
                for d in range(query.shape[1]):
                    out[row, d] += weight * query[t, d]
