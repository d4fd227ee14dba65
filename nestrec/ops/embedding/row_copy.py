"""Copies of embedding rows: gather, scatter, and runs of rows in one launch.

Whole rows from place to place in one launch: gather, scatter, and copy between two buffers.

    target[to[i], :] = source[from[i], :]    for all i with from[i] >= 0 and to[i] >= 0

Rows are runs of int32 words whose meaning nobody here knows, weight and optimiser state together, so nothing of a row
can be left behind. Without `from` (or `to`) row i is taken from (put to) place i. Rows move in pieces of 16 bytes,
dealt to threads without regard to where a row ends, so that rows of any width keep all threads busy.

Shapes: N source rows, M target rows, W words of a row, P moved rows.

Rows of several tables in one run of memory, gathered, scattered and added in the order of one list.

    gather     packed[offset(i) + j]  = run[at(i) + j]           for j below the width of row i's table
    scatter    run[at(i) + j]  = packed[offset(i) + j]
    add        run[at(i) + j] += packed[offset(i) + j]           one row after the other, in the order of the list

with at(i) = start of its table + place * stride of its table, and offset(i) the widths of the rows before it: rows lie
packed in the order of the list. One call, or launch, for all tables, whatever their number and widths.

Shapes: T tables, N rows of a list.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.cuda import all_to_device, to_device
from nestrec.base.thread_team import for_parts
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
    """Move rows of int32 words; negative places are skipped, target places are distinct.

    Rows may be strided. The index tensors are int32 or int64, on the rows' device.
    """
    _run(source_NW, target_MW, source_index_P, target_index_P)


def move_rows_reference(
    source_NW: torch.Tensor,
    target_MW: torch.Tensor,
    source_index_P: torch.Tensor | None = None,
    target_index_P: torch.Tensor | None = None,
) -> None:
    """The definition."""
    count = _num_moved(source_NW, target_MW, source_index_P, target_index_P)
    every = torch.arange(count, device=source_NW.device)
    source = every if source_index_P is None else source_index_P.long()
    target = every if target_index_P is None else target_index_P.long()
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
    assert source_NW.dtype == target_MW.dtype == torch.int32, "rows are int32 words"
    assert source_NW.shape[1] == target_MW.shape[1], "rows of both sides have the same words"
    assert source_NW.stride(1) == target_MW.stride(1) == 1, "the words of a row lie together"
    assert all(i.dtype in (torch.int32, torch.int64) and i.is_contiguous() for i in indices), "contiguous places"
    assert len({len(i) for i in indices}) <= 1, "a target place for each source place"


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
    rows_a_block = block // (width // piece)
    with torch.cuda.device_of(source_NW):
        _move_kernel[(triton.cdiv(count, rows_a_block),)](
            source_NW,
            target_MW,
            source_index_P,
            target_index_P,
            count,
            SOURCE_STRIDE=source_NW.stride(0),
            TARGET_STRIDE=target_MW.stride(0),
            PIECES=width // piece,
            PIECE=piece,
            ROWS=rows_a_block,
            BLOCK=block,
            num_warps=_NUM_WARPS,
        )


def _word_offsets(rows: torch.Tensor) -> tuple[int, int]:
    """What decides on the alignment of a row's words."""
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
        place = piece // PIECES
        row = tl.program_id(0) * ROWS + place
        inside = (place < ROWS) & (row < count)
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
    """Where the rows of each table lie in a run of elements."""

    starts: Int64
    """(T,) first element of each table; negative: rows of this table are passed over."""
    strides: Int64
    """(T,) elements from row to row."""
    widths: Int64
    """(T,) elements of a row that count."""
    on_device: torch.Tensor | None
    """(3, T) the same, where the run is not on the host."""

    @staticmethod
    def of(starts: Int64, strides: Int64, widths: Int64, device: torch.device) -> "Spans":
        there = None if device.type == "cpu" else to_device(np.stack([starts, strides, widths]), device)
        return Spans(starts, strides, widths, there)

    @staticmethod
    def packed(num_rows: Int64, widths: Int64, device: torch.device) -> tuple["Spans", int]:
        """Tables of so many rows one behind the other, without gaps; and the elements of all."""
        ends = np.cumsum(num_rows * widths)
        return Spans.of(ends - num_rows * widths, widths, widths, device), int(ends[-1])


@dataclass(frozen=True, slots=True)
class RowList:
    """Rows of several tables, in an order."""

    tables: Int32
    """(N,) table of each row."""
    places: Int32
    """(N,) place of each row among those of its table."""
    offsets: Int64
    """(N + 1,) where each row begins where they lie packed, and where the last one ends."""
    on_device: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """The three, where the rows are not on the host."""

    @staticmethod
    def of(tables: Int32, places: Int32, widths: Int64, device: torch.device) -> "RowList":
        """widths: (T,) elements of a row of each table."""
        offsets = np.empty(len(tables) + 1, np.int64)
        _offsets(tables, widths, offsets)
        there = None
        if device.type != "cpu":
            there_tables, there_places, there_offsets = all_to_device([tables, places, offsets], device)
            there = there_tables, there_places, there_offsets
        return RowList(tables, places, offsets, there)

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def num_elements(self) -> int:
        return int(self.offsets[-1] - self.offsets[0])

    def part(self, start: int, stop: int) -> "RowList":
        """Some rows of it; they lie packed on their own."""
        there = self.on_device
        if there is not None:
            there = there[0][start:stop], there[1][start:stop], there[2][start : stop + 1]
        return RowList(self.tables[start:stop], self.places[start:stop], self.offsets[start : stop + 1], there)


@dataclass(frozen=True, slots=True)
class TargetGroups:
    """The rows of a list by what they are added to: rows of one place, in the order of the list."""

    order: torch.Tensor
    """(N,) int32 rows of the list, those of one place side by side."""
    starts: torch.Tensor
    """(number of places + 1,) int32 where those of each place begin."""

    @staticmethod
    def of(rows: RowList, num_rows: Int64, device: torch.device) -> "TargetGroups | None":
        """num_rows: (T,) rows of each table. None on the host, which adds one row after the other."""
        if device.type == "cpu":
            return None
        before = np.concatenate([[0], np.cumsum(num_rows)])
        order, starts = group(rows.tables, rows.places, before)
        return TargetGroups(*all_to_device([order, starts], device))


def gather_spans(run: torch.Tensor, spans: Spans, rows: RowList, packed: torch.Tensor) -> None:
    """Rows of a run, packed in the order of the list."""
    if len(rows) and runs_triton(run):
        _launch_spans(run, spans, rows, packed, None, gathers=True, adds=False)
    elif len(rows):
        _host(_gather, run, spans, rows, packed)


def scatter_spans(packed: torch.Tensor, rows: RowList, run: torch.Tensor, spans: Spans) -> None:
    """Packed rows to their places in a run; no two of them have one place."""
    if len(rows) and runs_triton(run):
        _launch_spans(run, spans, rows, packed, None, gathers=False, adds=False)
    elif len(rows):
        _host(_scatter, run, spans, rows, packed)


def add_spans(
    packed: torch.Tensor, rows: RowList, run: torch.Tensor, spans: Spans, groups: TargetGroups | None = None
) -> None:
    """Packed rows added to their places in a run, in the order of the list.

    groups: needed on a device where two rows have one place.
    """
    if not len(rows):
        return
    if runs_triton(run):
        _launch_spans(run, spans, rows, packed, groups, gathers=False, adds=True)
        return
    arrays = run.numpy(), spans.starts, spans.strides, spans.widths, rows.tables, rows.places, rows.offsets
    values = packed.numpy()
    # Threads share out the run, not the list, so that each element is still summed in order.
    for_parts(len(run), len(rows), lambda low, high: _add(*arrays, values, low, high))


def _host(loop, run: torch.Tensor, spans: Spans, rows: RowList, packed: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    arrays = run.numpy(), spans.starts, spans.strides, spans.widths, rows.tables, rows.places, rows.offsets
    values = packed.numpy()
    for_parts(len(rows), len(rows), lambda first, end: loop(*arrays, values, first, end))


@njit(cache=True, nogil=True)
def _offsets(tables, widths, offsets):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    for i in range(len(tables)):
        offsets[i] = total
        total += widths[tables[i]]
    offsets[len(tables)] = total


# Places are unsigned in the inner loops: of others numba asks, at every element, whether to count from the end, and
# does not vectorise the loop.


@njit(cache=True, nogil=True)
def _gather(run, starts, strides, widths, tables, places, offsets, packed, first, end):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for i in range(first, end):
        table = tables[i]
        if starts[table] >= 0:
            at = np.uint64(starts[table] + places[i] * strides[table])
            to = np.uint64(offsets[i] - offsets[0])
            for j in range(np.uint64(widths[table])):
                packed[to + j] = run[at + j]


@njit(cache=True, nogil=True)
def _scatter(run, starts, strides, widths, tables, places, offsets, packed, first, end):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for i in range(first, end):
        table = tables[i]
        if starts[table] >= 0:
            to = np.uint64(starts[table] + places[i] * strides[table])
            at = np.uint64(offsets[i] - offsets[0])
            for j in range(np.uint64(widths[table])):
                run[to + j] = packed[at + j]


@njit(cache=True, nogil=True)
def _add(run, starts, strides, widths, tables, places, offsets, packed, low, high):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for i in range(len(tables)):
        table = tables[i]
        place = starts[table] + places[i] * strides[table]
        if starts[table] >= 0 and low <= place < high:
            to, at = np.uint64(place), np.uint64(offsets[i] - offsets[0])
            for j in range(np.uint64(widths[table])):
                run[to + j] += packed[at + j]


@njit(cache=True, nogil=True)
def group(tables, places, before):  # type: ignore[no-untyped-def]
    """Rows of a list by (table, place), stable, and where each place begins; before: rows of the tables before each."""
    count = np.zeros(before[-1] + 1, np.int32)
    for i in range(len(tables)):
        count[before[tables[i]] + places[i] + 1] += 1
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
        row = before[tables[i]] + places[i]
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
    assert run.dtype == packed.dtype, "elements of one type"
    table = spans.on_device
    lists = rows.on_device
    if table is None or lists is None:  # under Triton's interpreter
        table = to_device(np.stack([spans.starts, spans.strides, spans.widths]), run.device)
        tables, places, offsets = (to_device(a, run.device) for a in (rows.tables, rows.places, rows.offsets))
        lists = tables, places, offsets
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
        places,
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
        place = tl.load(places + row, mask=inside, other=0).to(tl.int64)
        column = tl.arange(0, BLOCK)[None, :]
        used = (inside & (start >= 0))[:, None] & (column < width[:, None])
        at = run + (start + place * stride)[:, None] + column
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
