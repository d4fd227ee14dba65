"""Deterministic sums of rows by index (scatter-add, segment sum), with a fixed order of additions.

    out[u] = sum of grad[p] over all p with index[p] = u

in order of p, by runs: the first RUN positions of u are added sequentially, then the next RUN, and so on; then the sums
of the runs are added sequentially. For up to RUN positions this is the plain sum in order. A row that half a batch uses
has thousands of runs, which are summed in parallel. There are no atomic additions: results are bitwise reproducible,
and the host loops and the kernels return bitwise identical results.

On a GPU positions are sorted by row (stable). One kernel sums the rows that have a single run, several rows per
program. Two more kernels sum the rows with several runs without a list of them: in each block of RUN sorted positions,
at most two such runs and at most one such row start.

Shapes: U rows, D elements of a row, P positions.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.thread_team import parallel_for
from nestrec.ops.kernel_op import HAS_TRITON, kernel_op, runs_triton

RUN = 256
"""Number of positions of a row that are added sequentially."""
_TILE_ELEMENTS = 512
_NUM_WARPS = 4
MAX_REGISTERS = 64
"""Register limit per thread; with the lower number that the compiler chooses, rows are loaded sequentially."""


def sum_by_index_reference(grad_PD: torch.Tensor, index_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Reference implementation of `sum_by_index`: adds sequentially."""
    out_UD = grad_PD.new_zeros(num_rows, grad_PD.shape[1])
    for row in range(num_rows):
        for run in torch.nonzero(index_P == row)[:, 0].split(RUN):
            total_D = grad_PD.new_zeros(grad_PD.shape[1])
            for position in run.tolist():
                total_D += grad_PD[position]
            out_UD[row] += total_D
    return out_UD


def sum_by_index(grad_PD: torch.Tensor, index_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the (num_rows, D) sums of gradients by row, in float32 or wider.

    Args:
        grad_PD: Gradient of each position.
        index_P: Row of each position.
        num_rows: Number of rows.
    """
    return _run(grad_PD, index_P, num_rows)


def add_by_index(out_UD: torch.Tensor, index_P: torch.Tensor, grad_PD: torch.Tensor) -> None:
    """Add out[index[p]] += grad[p] in place, sequentially in order of p. CPU only; float32 or float64."""
    out = out_UD.numpy()
    index = index_P.numpy()
    grad = grad_PD.contiguous().numpy()
    # Threads split the rows, not the positions, so that each row is still summed in order.
    parallel_for(len(out), len(index), lambda low, high: _add(out, index, grad, low, high))


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed."""
    return torch.promote_types(dtype, torch.float32)


def with_contiguous_rows(grad_PD: torch.Tensor) -> torch.Tensor:
    """Return the gradient, copied if the elements of a row are not adjacent (the gradient of a sum is expanded)."""
    return grad_PD if grad_PD.stride(1) == 1 else grad_PD.contiguous()


def _fake(grad_PD: torch.Tensor, index_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    return grad_PD.new_empty(num_rows, grad_PD.shape[1], dtype=sum_type(grad_PD.dtype))


@kernel_op("sum_by_index", fake=_fake)
def _run(grad_PD: torch.Tensor, index_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    if runs_triton(grad_PD):
        return _launch(with_contiguous_rows(grad_PD), index_P, num_rows)
    wide_PD = grad_PD.to(sum_type(grad_PD.dtype)).contiguous()
    if grad_PD.device.type != "cpu":
        return _torch_sum(wide_PD, index_P, num_rows)
    index = index_P.numpy()
    grad = wide_PD.numpy()
    return sum_by_runs(index, num_rows, wide_PD, lambda out, rows, low, high: _add(out, rows, grad, low, high))


Adder = Callable[[NDArray[Any], NDArray[np.int32], int, int], None]
"""Function of (out, row of each position, low, high) that adds to rows [low, high) of `out` in order of position."""


def sum_by_runs(index: NDArray[Any], num_rows: int, like: torch.Tensor, add: Adder) -> torch.Tensor:
    """Return (num_rows, D) sums on the host, by runs.

    Every run except the first one of a row is summed into a separate row after the others.

    Args:
        index: Row of each position.
        num_rows: Number of rows.
        like: Tensor with the width, dtype and device of the result.
        add: Function that adds the positions to their rows.
    """
    rows = index
    owners = np.empty(0, np.int32)
    if len(index) > RUN:
        rows, owners = _split_runs(index, num_rows)
    extended = like.new_zeros(num_rows + len(owners), like.shape[1])
    out = extended.numpy()
    # Threads split the rows, not the positions, so that each row is still summed in order.
    parallel_for(len(out), len(rows), lambda low, high: add(out, rows, low, high))
    if len(owners):
        _add(out[:num_rows], owners, out[num_rows:], 0, num_rows)
    return extended[:num_rows]


def _torch_sum(grad_PD: torch.Tensor, index_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Sum without Triton: in order, but not by runs."""
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


@njit(cache=True, nogil=True)
def _split_runs(index, num_rows):  # type: ignore[no-untyped-def]
    """Return the row into which each position is summed, and for each extra row (after `num_rows`) its target row."""
    seen = np.zeros(num_rows, np.int32)
    row_of = np.arange(num_rows).astype(np.int32)
    rows, owners = np.empty(len(index), np.int32), np.empty(len(index) // RUN, np.int32)
    num_owners = 0
    for p in range(len(index)):
        row = index[p]
        if seen[row] == RUN:
            owners[num_owners] = row
            row_of[row] = num_rows + num_owners
            num_owners += 1
            seen[row] = 0
        seen[row] += 1
        rows[p] = row_of[row]
    return rows, owners[:num_owners]


def _launch(grad_PD: torch.Tensor, index_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    num_positions, dim = grad_PD.shape
    out_UD = grad_PD.new_empty(num_rows, dim, dtype=sum_type(grad_PD.dtype))
    if num_rows == 0 or dim == 0:
        return out_UD
    rows_P, order_P = index_P.sort(stable=True)
    starts = torch.searchsorted(rows_P, torch.arange(num_rows + 1, dtype=rows_P.dtype, device=rows_P.device))
    block = triton.next_power_of_2(dim)
    tile_rows = max(1, _TILE_ELEMENTS // block)
    with torch.cuda.device_of(grad_PD):
        _rows_kernel[(triton.cdiv(num_rows, tile_rows),)](
            grad_PD,
            order_P,
            starts,
            out_UD,
            num_rows,
            D=dim,
            STRIDE=grad_PD.stride(0),
            BLOCK=block,
            ROWS=tile_rows,
            RUN_SIZE=RUN,
            num_warps=_NUM_WARPS,
            maxnreg=MAX_REGISTERS,
        )
        if num_positions > RUN:
            add_long_runs(sum_long_runs(grad_PD, rows_P, order_P, starts), rows_P, starts, out_UD)
    return out_UD


def sum_long_runs(
    grad_PD: torch.Tensor, rows_P: torch.Tensor, order_P: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Return the sums of the runs of all rows with several runs; `run_of_block` defines their order."""
    num_positions, dim = grad_PD.shape
    blocks = triton.cdiv(num_positions, RUN)
    partial = grad_PD.new_empty(2 * blocks, dim, dtype=sum_type(grad_PD.dtype))
    _runs_kernel[(blocks, 2)](
        grad_PD,
        rows_P,
        order_P,
        starts,
        partial,
        num_positions,
        D=dim,
        STRIDE=grad_PD.stride(0),
        BLOCK=triton.next_power_of_2(dim),
        RUN_SIZE=RUN,
        num_warps=1,
    )
    return partial


def add_long_runs(partial: torch.Tensor, rows_P: torch.Tensor, starts: torch.Tensor, out_UD: torch.Tensor) -> None:
    """Add the sums of runs from `sum_long_runs` and store them to the rows with several runs."""
    num_positions = len(rows_P)
    dim = out_UD.shape[1]
    _finish_kernel[(triton.cdiv(num_positions, RUN),)](
        partial,
        rows_P,
        starts,
        out_UD,
        num_positions,
        D=dim,
        BLOCK=triton.next_power_of_2(dim),
        RUN_SIZE=RUN,
        num_warps=1,
    )


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _position(order, first, length, t):  # type: ignore[no-untyped-def]
        return tl.load(order + first + t, mask=t < length, other=0).to(tl.int64)

    @triton.jit
    def _gradient(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        grad, position, is_used, D: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr
    ):
        column = tl.arange(0, BLOCK)[None, :]
        at = grad + (position * STRIDE)[:, None] + column
        return tl.load(at, mask=is_used[:, None] & (column < D), other=0.0).to(TYPE)

    @triton.jit
    def sum_tile(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        grad,
        order,
        first,
        length,
        D: tl.constexpr,
        STRIDE: tl.constexpr,
        BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
        TYPE: tl.constexpr,
    ):
        """Return the (ROWS, BLOCK) sums of the rows at order[first : first + length], added sequentially.

        Processes four rows per iteration and loads the next positions before it adds; otherwise the compiler would wait
        for each load.
        """
        total = tl.zeros([ROWS, BLOCK], TYPE)
        p0, p1 = _position(order, first, length, 0), _position(order, first, length, 1)
        p2, p3 = _position(order, first, length, 2), _position(order, first, length, 3)
        for t in range(0, tl.max(length, axis=0), 4):
            x0 = _gradient(grad, p0, t < length, D, STRIDE, BLOCK, TYPE)
            x1 = _gradient(grad, p1, t + 1 < length, D, STRIDE, BLOCK, TYPE)
            x2 = _gradient(grad, p2, t + 2 < length, D, STRIDE, BLOCK, TYPE)
            x3 = _gradient(grad, p3, t + 3 < length, D, STRIDE, BLOCK, TYPE)
            p0, p1 = _position(order, first, length, t + 4), _position(order, first, length, t + 5)
            p2, p3 = _position(order, first, length, t + 6), _position(order, first, length, t + 7)
            total = (((total + x0) + x1) + x2) + x3
        return total

    @triton.jit
    def run_of_block(rows, starts, block, is_second, num_positions, RUN_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0917
        """Return a run of a row with several runs: (first sorted position, length, index of its sum).

        The length is 0 if there is no such run.

        Program 0 of a block sums the run of the row at the start of the block, program 1 that of the row at its end.
        """
        low = block * RUN_SIZE
        high = tl.minimum(low + RUN_SIZE, num_positions)
        row = tl.load(rows + tl.minimum(low + is_second * RUN_SIZE, num_positions - 1))
        start, end = tl.load(starts + row), tl.load(starts + row + 1)
        number = tl.maximum(low - start + RUN_SIZE - 1, 0) // RUN_SIZE
        first = start + number * RUN_SIZE
        is_mine = (end - start > RUN_SIZE) & (first < tl.minimum(end, high)) & ((is_second == 0) | (start > low))
        return first, tl.where(is_mine, tl.minimum(end - first, RUN_SIZE), 0), 2 * (start // RUN_SIZE) + number

    @triton.jit
    def long_row_of_block(rows, starts, block, num_positions, RUN_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the row with several runs that starts in the block: (row, start, end); `end` is 0 without one."""
        low = block * RUN_SIZE
        row = tl.load(rows + tl.minimum(low + RUN_SIZE, num_positions) - 1)
        start, end = tl.load(starts + row), tl.load(starts + row + 1)
        begins_here = (start >= low) & (end - start > RUN_SIZE)
        return row, start, tl.where(begins_here, end, 0)

    @triton.jit
    def sum_partial(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        partial, start, end, D: tl.constexpr, BLOCK: tl.constexpr, RUN_SIZE: tl.constexpr, UNROLL: tl.constexpr
    ):
        """Return the (1, BLOCK) sum of the runs of the row at sorted positions [start, end)."""
        column = tl.arange(0, BLOCK)[None, :]
        total = tl.zeros([1, BLOCK], partial.dtype.element_ty)
        num_runs = (end - start + RUN_SIZE - 1) // RUN_SIZE
        base = partial + (2 * (start // RUN_SIZE)).to(tl.int64) * D
        for r in range(0, num_runs, UNROLL):
            for u in tl.static_range(UNROLL):
                total += tl.load(base + (r + u) * D + column, mask=(column < D) & (r + u < num_runs), other=0.0)
        return total

    @triton.jit
    def _rows_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        grad,
        order,
        starts,
        out,
        num_rows,
        D: tl.constexpr,
        STRIDE: tl.constexpr,
        BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
        RUN_SIZE: tl.constexpr,
    ):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside = row < num_rows
        first = tl.load(starts + row, mask=inside, other=0)
        length = tl.load(starts + row + 1, mask=inside, other=0) - first
        inside = inside & (length <= RUN_SIZE)
        length = tl.where(inside, length, 0)
        total = sum_tile(grad, order, first, length, D, STRIDE, BLOCK, ROWS, out.dtype.element_ty)
        column = tl.arange(0, BLOCK)[None, :]
        tl.store(out + (row.to(tl.int64) * D)[:, None] + column, total, mask=inside[:, None] & (column < D))

    @triton.jit
    def _runs_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        grad,
        rows,
        order,
        starts,
        partial,
        num_positions,
        D: tl.constexpr,
        STRIDE: tl.constexpr,
        BLOCK: tl.constexpr,
        RUN_SIZE: tl.constexpr,
    ):
        first, length, at = run_of_block(rows, starts, tl.program_id(0), tl.program_id(1), num_positions, RUN_SIZE)
        if length > 0:
            one = tl.zeros([1], tl.int32)
            total = sum_tile(grad, order, first + one, length + one, D, STRIDE, BLOCK, 1, partial.dtype.element_ty)
            column = tl.arange(0, BLOCK)[None, :]
            tl.store(partial + at.to(tl.int64) * D + column, total, mask=column < D)

    @triton.jit
    def _finish_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        partial,
        rows,
        starts,
        out,
        num_positions,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
        RUN_SIZE: tl.constexpr,
        UNROLL: tl.constexpr = 8,
    ):
        row, start, end = long_row_of_block(rows, starts, tl.program_id(0), num_positions, RUN_SIZE)
        if end > 0:
            total = sum_partial(partial, start, end, D, BLOCK, RUN_SIZE, UNROLL)
            column = tl.arange(0, BLOCK)[None, :]
            tl.store(out + row.to(tl.int64) * D + column, total, mask=column < D)
