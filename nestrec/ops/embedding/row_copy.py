"""Copies of embedding rows in one kernel launch: gather, scatter and add, for one table or for several tables at once.

`move_rows` copies rows between two buffers:

    target[to[i], :] = source[from[i], :]    for all i with from[i] >= 0 and to[i] >= 0

A row is a sequence of int32 words with the weight and the optimizer state, so both are always copied together. Without
`from` (or `to`) row i is read from (written to) index i. Rows are copied in chunks of 16 bytes, which are assigned to
threads independent of row boundaries, so that all threads are busy for rows of any width.

Shapes: N source rows, M target rows, W words of a row, P moved rows.

`gather_spans`, `scatter_spans` and `add_spans` process rows of several tables in one flat buffer (`run`), in the order
of a list of rows:

    gather     packed[offset(i) + j]  = run[at(i) + j]           for j below the width of row i's table
    scatter    run[at(i) + j]  = packed[offset(i) + j]
    add        run[at(i) + j] += packed[offset(i) + j]           sequentially, in the order of the list

with at(i) = start of its table + index * stride of its table, and offset(i) = total width of the rows before it: packed
rows are contiguous in the order of the list. All tables share one call or launch, whatever their number and widths.

Shapes: T tables, N rows of a list.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.cuda import arrays_to_device, to_device
from nestrec.base.thread_team import parallel_for
from nestrec.ops.kernel_op import HAS_TRITON, kernel_op, runs_triton

_PIECE_WORDS = 4
_BLOCK_PIECES = 512
_NUM_WARPS = 8


def move_rows(
    source_NW: torch.Tensor,
    target_MW: torch.Tensor,
    source_index_P: torch.Tensor | None = None,
    target_index_P: torch.Tensor | None = None,
) -> None:
    """Copy rows of int32 words from one buffer to another.

    Args:
        source_NW: Rows to read; may be strided.
        target_MW: Rows to write; may be strided.
        source_index_P: Row to read for each copy, int32 or int64 on the device of the rows; negative indices are
            skipped. None reads row i.
        target_index_P: Row to write for each copy, int32 or int64 on the device of the rows; negative indices are
            skipped, the others must be unique. None writes row i.
    """
    _run(source_NW, target_MW, source_index_P, target_index_P)


def move_rows_reference(
    source_NW: torch.Tensor,
    target_MW: torch.Tensor,
    source_index_P: torch.Tensor | None = None,
    target_index_P: torch.Tensor | None = None,
) -> None:
    """Reference implementation of `move_rows`."""
    count = _num_moved(source_NW, target_MW, source_index_P, target_index_P)
    all_rows = torch.arange(count, device=source_NW.device)
    source = all_rows if source_index_P is None else source_index_P.long()
    target = all_rows if target_index_P is None else target_index_P.long()
    moved = (source >= 0) & (target >= 0)
    target_MW[target[moved]] = source_NW[source[moved]]


def _num_moved(
    source_NW: torch.Tensor,
    target_MW: torch.Tensor,
    source_index_P: torch.Tensor | None,
    target_index_P: torch.Tensor | None,
) -> int:
    if source_index_P is not None:
        return len(source_index_P)
    return len(target_index_P) if target_index_P is not None else min(len(source_NW), len(target_MW))


def _check(source_NW: torch.Tensor, target_MW: torch.Tensor, indices: list[torch.Tensor]) -> None:
    assert source_NW.dtype == target_MW.dtype == torch.int32, "rows must be int32 words"
    assert source_NW.shape[1] == target_MW.shape[1], "source and target rows must have the same width"
    assert source_NW.stride(1) == target_MW.stride(1) == 1, "the words of a row must be contiguous"
    assert all(i.dtype in (torch.int32, torch.int64) and i.is_contiguous() for i in indices), (
        "indices must be contiguous int32 or int64 tensors"
    )
    assert len({len(i) for i in indices}) <= 1, "source and target indices must have the same length"


@kernel_op("move_rows", fake=lambda *_: None, mutates=("target_MW",))
def _run(
    source_NW: torch.Tensor,
    target_MW: torch.Tensor,
    source_index_P: torch.Tensor | None,
    target_index_P: torch.Tensor | None,
) -> None:
    _check(source_NW, target_MW, [i for i in (source_index_P, target_index_P) if i is not None])
    if runs_triton(source_NW):
        _launch(source_NW, target_MW, source_index_P, target_index_P)
    else:
        move_rows_reference(source_NW, target_MW, source_index_P, target_index_P)


def _launch(
    source_NW: torch.Tensor,
    target_MW: torch.Tensor,
    source_index_P: torch.Tensor | None,
    target_index_P: torch.Tensor | None,
) -> None:
    count = _num_moved(source_NW, target_MW, source_index_P, target_index_P)
    width = source_NW.shape[1]
    if count == 0 or width == 0:
        return
    aligned = all(x % _PIECE_WORDS == 0 for x in (width, *_word_offsets(source_NW), *_word_offsets(target_MW)))
    piece = _PIECE_WORDS if aligned else 1
    block = max(_BLOCK_PIECES * _PIECE_WORDS // piece, triton.next_power_of_2(width // piece))
    rows_per_block = block // (width // piece)
    with torch.cuda.device_of(source_NW):
        _move_kernel[(triton.cdiv(count, rows_per_block),)](
            source_NW,
            target_MW,
            source_index_P,
            target_index_P,
            count,
            SOURCE_STRIDE=source_NW.stride(0),
            TARGET_STRIDE=target_MW.stride(0),
            PIECES=width // piece,
            PIECE=piece,
            ROWS=rows_per_block,
            BLOCK=block,
            num_warps=_NUM_WARPS,
        )


def _word_offsets(rows: torch.Tensor) -> tuple[int, int]:
    """Return the row stride and the start address in words, which determine the alignment of rows."""
    return rows.stride(0), rows.data_ptr() // 4


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _move_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        source,
        target,
        source_index,
        target_index,
        count,
        SOURCE_STRIDE: tl.constexpr,
        TARGET_STRIDE: tl.constexpr,
        PIECES: tl.constexpr,
        PIECE: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        piece = tl.arange(0, BLOCK)
        local_row = piece // PIECES
        row = tl.program_id(0) * ROWS + local_row
        inside = (local_row < ROWS) & (row < count)
        start = (piece % PIECES) * PIECE
        if source_index is None:
            source_row = row.to(tl.int64)
        else:
            source_row = tl.load(source_index + row, mask=inside, other=-1).to(tl.int64)
        if target_index is None:
            target_row = row.to(tl.int64)
        else:
            target_row = tl.load(target_index + row, mask=inside, other=-1).to(tl.int64)
        moved = (inside & (source_row >= 0) & (target_row >= 0))[:, None]
        word = tl.arange(0, PIECE)[None, :]
        words = tl.load(source + (source_row * SOURCE_STRIDE + start)[:, None] + word, mask=moved)
        tl.store(target + (target_row * TARGET_STRIDE + start)[:, None] + word, words, mask=moved)


_TILE_ELEMENTS = 2048
_SPAN_WARPS = 4
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spans:
    """Layout of the tables in a flat buffer: start, row stride and row width of each table."""

    starts: Int64
    """(T,) index of the first element of each table; rows of tables with a negative start are skipped."""
    strides: Int64
    """(T,) number of elements from one row to the next."""
    widths: Int64
    """(T,) number of elements of a row that are copied."""
    on_device: torch.Tensor | None
    """(3, T) device copy of `starts`, `strides` and `widths`; None if the buffer is on the host."""

    @staticmethod
    def of(starts: Int64, strides: Int64, widths: Int64, device: torch.device) -> "Spans":
        on_device = None if device.type == "cpu" else to_device(np.stack([starts, strides, widths]), device)
        return Spans(starts, strides, widths, on_device)

    @staticmethod
    def packed(num_rows: Int64, widths: Int64, device: torch.device) -> tuple["Spans", int]:
        """Return the layout of contiguous tables with `num_rows` rows each, and the total number of elements."""
        ends = np.cumsum(num_rows * widths)
        return Spans.of(ends - num_rows * widths, widths, widths, device), int(ends[-1])


@dataclass(frozen=True, slots=True)
class RowList:
    """Ordered list of rows of several tables."""

    tables: Int32
    """(N,) table of each row."""
    indices: Int32
    """(N,) index of each row in its table."""
    offsets: Int64
    """(N + 1,) offset of each row in the packed buffer, and the end of the last row."""
    on_device: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """Device copies of `tables`, `indices` and `offsets`; None if the rows are on the host."""

    @staticmethod
    def of(tables: Int32, indices: Int32, widths: Int64, device: torch.device) -> "RowList":
        """Build the list from the table and the index of each row; widths: (T,) number of elements per row."""
        offsets = np.empty(len(tables) + 1, np.int64)
        _offsets(tables, widths, offsets)
        on_device = None
        if device.type != "cpu":
            device_tables, device_indices, device_offsets = arrays_to_device([tables, indices, offsets], device)
            on_device = device_tables, device_indices, device_offsets
        return RowList(tables, indices, offsets, on_device)

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def num_elements(self) -> int:
        return int(self.offsets[-1] - self.offsets[0])

    def slice_rows(self, start: int, stop: int) -> "RowList":
        """Return the rows [start, stop) of the list, with a packed buffer of their own."""
        on_device = self.on_device
        if on_device is not None:
            on_device = on_device[0][start:stop], on_device[1][start:stop], on_device[2][start : stop + 1]
        return RowList(self.tables[start:stop], self.indices[start:stop], self.offsets[start : stop + 1], on_device)


@dataclass(frozen=True, slots=True)
class TargetGroups:
    """Rows of a list grouped by the target row that they are added to; rows of a group are in the order of the list."""

    order: torch.Tensor
    """(N,) int32 positions in the list, grouped by target row."""
    starts: torch.Tensor
    """(number of target rows + 1,) int32 start of each group in `order`."""

    @staticmethod
    def of(rows: RowList, num_rows: Int64, device: torch.device) -> "TargetGroups | None":
        """Group the rows; num_rows: (T,) number of rows per table. None on the host, which adds rows sequentially."""
        if device.type == "cpu":
            return None
        before = np.concatenate([[0], np.cumsum(num_rows)])
        order, starts = group(rows.tables, rows.indices, before)
        return TargetGroups(*arrays_to_device([order, starts], device))


def gather_spans(run: torch.Tensor, spans: Spans, rows: RowList, packed: torch.Tensor) -> None:
    """Copy rows of a flat buffer to `packed`, in the order of the list."""
    if len(rows) and runs_triton(run):
        _launch_spans(run, spans, rows, packed, None, gathers=True, adds=False)
    elif len(rows):
        _host(_gather, run, spans, rows, packed)


def scatter_spans(packed: torch.Tensor, rows: RowList, run: torch.Tensor, spans: Spans) -> None:
    """Copy packed rows to a flat buffer; the target rows must be unique."""
    if len(rows) and runs_triton(run):
        _launch_spans(run, spans, rows, packed, None, gathers=False, adds=False)
    elif len(rows):
        _host(_scatter, run, spans, rows, packed)


def add_spans(
    packed: torch.Tensor, rows: RowList, run: torch.Tensor, spans: Spans, groups: TargetGroups | None = None
) -> None:
    """Add packed rows to the rows of a flat buffer, in the order of the list.

    Args:
        packed: Rows to add, packed in the order of the list.
        rows: Table and index of each row.
        run: Flat buffer that is updated in place.
        spans: Layout of the tables in the buffer.
        groups: Rows grouped by target; required on a GPU if two rows have the same target.
    """
    if not len(rows):
        return
    if runs_triton(run):
        _launch_spans(run, spans, rows, packed, groups, gathers=False, adds=True)
        return
    arrays = run.numpy(), spans.starts, spans.strides, spans.widths, rows.tables, rows.indices, rows.offsets
    values = packed.numpy()
    # Threads split the buffer, not the list, so that each element is still summed in order.
    parallel_for(len(run), len(rows), lambda low, high: _add(*arrays, values, low, high))


def _host(loop, run: torch.Tensor, spans: Spans, rows: RowList, packed: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    arrays = run.numpy(), spans.starts, spans.strides, spans.widths, rows.tables, rows.indices, rows.offsets
    values = packed.numpy()
    parallel_for(len(rows), len(rows), lambda first, end: loop(*arrays, values, first, end))


@njit(cache=True, nogil=True)
def _offsets(tables, widths, offsets):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    for i in range(len(tables)):
        offsets[i] = total
        total += widths[tables[i]]
    offsets[len(tables)] = total


# Indices are unsigned in the inner loops: for signed ones numba checks at every element for a negative index (which
# counts from the end) and does not vectorize the loop.


@njit(cache=True, nogil=True)
def _gather(run, starts, strides, widths, tables, indices, offsets, packed, first, end):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for i in range(first, end):
        table = tables[i]
        if starts[table] >= 0:
            at = np.uint64(starts[table] + indices[i] * strides[table])
            to = np.uint64(offsets[i] - offsets[0])
            for j in range(np.uint64(widths[table])):
                packed[to + j] = run[at + j]


@njit(cache=True, nogil=True)
def _scatter(run, starts, strides, widths, tables, indices, offsets, packed, first, end):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for i in range(first, end):
        table = tables[i]
        if starts[table] >= 0:
            to = np.uint64(starts[table] + indices[i] * strides[table])
            at = np.uint64(offsets[i] - offsets[0])
            for j in range(np.uint64(widths[table])):
                run[to + j] = packed[at + j]


@njit(cache=True, nogil=True)
def _add(run, starts, strides, widths, tables, indices, offsets, packed, low, high):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for i in range(len(tables)):
        table = tables[i]
        start = starts[table] + indices[i] * strides[table]
        if starts[table] >= 0 and low <= start < high:
            to, at = np.uint64(start), np.uint64(offsets[i] - offsets[0])
            for j in range(np.uint64(widths[table])):
                run[to + j] += packed[at + j]


@njit(cache=True, nogil=True)
def group(tables, indices, before):  # type: ignore[no-untyped-def]
    """Return the stable order of the rows by (table, index) and the start of each group of equal ones.

    before: total number of rows of the tables before each table.
    """
    count = np.zeros(before[-1] + 1, np.int32)
    for i in range(len(tables)):
        count[before[tables[i]] + indices[i] + 1] += 1
    num_groups = 0
    for row in range(len(count) - 1):
        num_groups += count[row + 1] > 0
    starts = np.zeros(num_groups + 1, np.int32)
    number = 0
    for row in range(len(count) - 1):
        if count[row + 1] > 0:
            starts[number + 1] = starts[number] + count[row + 1]
            number += 1
        count[row + 1] += count[row]
    order = np.empty(len(tables), np.int32)
    for i in range(len(tables)):
        row = before[tables[i]] + indices[i]
        order[count[row]] = i
        count[row] += 1
    return order, starts


def _launch_spans(
    run: torch.Tensor,
    spans: Spans,
    rows: RowList,
    packed: torch.Tensor,
    groups: TargetGroups | None,
    *,
    gathers: bool,
    adds: bool,
) -> None:
    assert run.dtype == packed.dtype, "run and packed must have the same dtype"
    table = spans.on_device
    lists = rows.on_device
    if table is None or lists is None:  # under Triton's interpreter
        table = to_device(np.stack([spans.starts, spans.strides, spans.widths]), run.device)
        tables, indices, offsets = (to_device(a, run.device) for a in (rows.tables, rows.indices, rows.offsets))
        lists = tables, indices, offsets
    block = triton.next_power_of_2(max(1, int(spans.widths.max())))
    tile = max(1, _TILE_ELEMENTS // block)
    count = len(rows) if groups is None else len(groups.starts) - 1
    with torch.cuda.device_of(run):
        _spans_kernel[(triton.cdiv(count, tile),)](
            run,
            packed,
            *lists,
            table,
            None if groups is None else groups.order,
            None if groups is None else groups.starts,
            count,
            TABLES=len(spans.starts),
            GATHERS=gathers,
            ADDS=adds,
            ROWS=tile,
            BLOCK=block,
            num_warps=_SPAN_WARPS,
        )


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _spans_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        run,
        packed,
        tables,
        indices,
        offsets,
        spans,
        order,
        starts,
        count,
        TABLES: tl.constexpr,
        GATHERS: tl.constexpr,
        ADDS: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside = number < count
        first = number
        length = tl.full([ROWS], 1, tl.int32)
        if order is not None:
            first = tl.load(starts + number, mask=inside, other=0)
            length = tl.load(starts + number + 1, mask=inside, other=0) - first
        row = first
        if order is not None:
            row = tl.load(order + first, mask=inside, other=0)
        table = tl.load(tables + row, mask=inside, other=0)
        start = tl.load(spans + table, mask=inside, other=-1)
        stride = tl.load(spans + TABLES + table, mask=inside, other=0)
        width = tl.load(spans + 2 * TABLES + table, mask=inside, other=0)
        index = tl.load(indices + row, mask=inside, other=0).to(tl.int64)
        column = tl.arange(0, BLOCK)[None, :]
        used = (inside & (start >= 0))[:, None] & (column < width[:, None])
        at = run + (start + index * stride)[:, None] + column
        base = tl.load(offsets)
        offset = tl.load(offsets + row, mask=inside, other=0) - base
        if GATHERS:
            tl.store(packed + offset[:, None] + column, tl.load(at, mask=used), mask=used)
        elif ADDS:
            total = tl.load(at, mask=used)
            value = tl.load(packed + offset[:, None] + column, mask=used)
            total = total + value
            if order is not None:
                for j in range(1, tl.max(length, axis=0)):
                    more = inside & (j < length)
                    next_row = tl.load(order + first + j, mask=more, other=0)
                    next_offset = tl.load(offsets + next_row, mask=more, other=0) - base
                    is_added = used & more[:, None]
                    value = tl.load(packed + next_offset[:, None] + column, mask=is_added)
                    total = tl.where(is_added, total + value, total)
            tl.store(at, total, mask=used)
        else:
            tl.store(at, tl.load(packed + offset[:, None] + column, mask=used), mask=used)
