"""A batch of work as arrays, in the order of its rows: histories of all users first, then all rows that are asked for.

Those are candidates of a ranking model, or the last events of users of a retrieval model, whose states are their
queries: both stand behind a history that they see, and do not see each other.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.ops.attention.paged.query_blocks import (
    BLOCK_ROWS,
    FIELDS,
    PagedSegment,
    VisibleRange,
    segment_array,
    write_blocks,
)
from nestrec.serving.engine.reference_runner import BatchItem
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.model.model_adapter import HistoryTokens, PagedModelAdapter, QueryRows

Indices = NDArray[np.int32]
_SPARE_BLOCKS = 64
"""partly filled blocks of a batch: at most two a user"""


@dataclass(frozen=True, slots=True)
class RequestRows:
    """The rows of a part."""

    tokens: HistoryTokens
    first: int
    end: int
    """of the history; the last event of a user who asks is none of it where it is asked for"""
    stored: int
    """tokens that will be in the pages"""
    pages: list[int]
    asked: QueryRows | None

    @property
    def num_asked(self) -> int:
        return 0 if self.asked is None else self.asked.count

    @property
    def before(self) -> NDArray[np.int64]:
        """Records of what stands before the history."""
        return self.tokens.before[self.first : self.end]

    @property
    def events(self) -> slice:
        return slice(self.tokens.events_within(self.first), self.tokens.events_within(self.end))

    @property
    def num_records(self) -> int:
        """But for what is asked for."""
        tokens = self.tokens
        return len(self.before) + tokens.events_within(self.end) - tokens.events_within(self.first)

    @staticmethod
    def of(form: PagedModelAdapter, parts: Sequence[BatchItem]) -> "list[RequestRows]":
        found = []
        for part in parts:
            asked = None if part.candidates is None else form.asked(part.tokens, part.candidates)
            end = part.end - (1 if asked is not None and asked.is_last_event else 0)
            stored = max(part.first, min(part.store_until, end))
            found.append(RequestRows(part.tokens, part.first, end, stored, part.pages, asked))
        return found


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a batch is."""

    num_history: int
    """rows before the first that is asked for"""
    num_candidates: int
    """rows that are asked for"""
    num_blocks: int
    num_last_blocks: int
    """of those"""
    num_pages: int
    num_records: int
    """what stands before histories, events, and what is asked for"""

    @property
    def num_rows(self) -> int:
        return self.num_history + self.num_candidates

    @staticmethod
    def of(rows: Sequence[RequestRows], page_tokens: int) -> "Extent":
        history = [part.end - part.first for part in rows]
        asked = [part.num_asked for part in rows]
        last = sum(-(-count // BLOCK_ROWS) for count in asked)
        blocks = last + sum(-(-count // BLOCK_ROWS) for count in history)
        pages = sum(-(-part.first // page_tokens) for part in rows)
        records = sum(part.num_records for part in rows)
        return Extent(sum(history), sum(asked), blocks, last, pages, records + sum(asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the arrays of all batches of a model have in common."""

    num_fields: int
    """of a record"""
    tokens_an_event: int
    seen: tuple[VisibleRange, ...]
    """what layers see, each kind once: a table of blocks for each"""
    last_seen: VisibleRange
    """what the last layer sees"""
    num_heads: int
    has_times: bool
    num_before: int = 0
    """tokens that stand before each history"""


@dataclass(frozen=True, slots=True)
class BatchBuffer:
    """Where the arrays of a batch lie in one piece of memory, of which one copy is enough.

    Legend: T rows, C candidates, R records, F fields of a record.
    """

    num_rows: int
    num_candidates: int
    num_pages: int
    layout: Layout
    num_pairs: int = 0
    """(row that is asked for, item that it may not find)"""

    @property
    def num_blocks(self) -> int:
        return self.num_rows // BLOCK_ROWS + _SPARE_BLOCKS

    @property
    def num_last_blocks(self) -> int:
        return self.num_candidates // BLOCK_ROWS + _SPARE_BLOCKS if self.num_candidates else 0

    @property
    def num_records(self) -> int:
        """A row of history is an event or half of one, a row of a candidate or of a token before a history a whole
        record."""
        if self.layout.tokens_an_event == 1 or self.layout.num_before:
            return self.num_rows
        return -(-(self.num_rows + self.num_candidates) // 2)

    @property
    def sizes(self) -> tuple[int, ...]:
        """of time_T and query_time_T (two words each), token_T, position_T, slot_T, blocks, last_blocks, pages, row_C,
        record_C, records_FR, pairs_2P"""
        return (
            2 * self.num_rows if self.layout.has_times else 0,
            2 * self.num_rows if self.layout.has_times else 0,
            self.num_rows,
            self.num_rows,
            self.num_rows,
            len(self.layout.seen) * self.num_blocks * FIELDS,
            self.num_last_blocks * FIELDS,
            self.num_pages,
            self.num_candidates,
            self.num_candidates,
            self.num_records * self.layout.num_fields,
            2 * self.num_pairs,
        )

    @property
    def num_indices(self) -> int:
        return sum(self.sizes)

    def holds(self, extent: Extent) -> bool:
        return (
            extent.num_rows <= self.num_rows
            and extent.num_candidates <= self.num_candidates
            and extent.num_blocks <= self.num_blocks
            and extent.num_last_blocks <= self.num_last_blocks
            and extent.num_pages <= self.num_pages
        )

    @staticmethod
    def for_extent(extent: Extent, layout: Layout) -> "BatchBuffer":
        """As large as one batch needs it."""
        rows_for_blocks = max(0, extent.num_blocks - _SPARE_BLOCKS) * BLOCK_ROWS
        asked_for_blocks = max(0, extent.num_last_blocks - _SPARE_BLOCKS) * BLOCK_ROWS
        candidates = max(extent.num_candidates, asked_for_blocks)
        return BatchBuffer(max(extent.num_rows, rows_for_blocks, candidates), candidates, extent.num_pages, layout)


class Sections:
    """The arrays of a batch inside one array; see `BatchBuffer.sizes`."""

    def __init__(self, room: BatchBuffer, array: Indices):
        parts = [array[first:end] for first, end in _bounds(room)]
        self.layout = room.layout
        self.time_T, self.query_time_T = (part.view(np.float64) for part in parts[:2])
        self.token_T, self.position_T, self.slot_T = parts[2:5]
        self.blocks = parts[5].reshape(len(room.layout.seen), -1, FIELDS)
        self.last_blocks = parts[6].reshape(-1, FIELDS)
        self.pages, self.row_C, self.record_C = parts[7:10]
        self.records_FR = parts[10].reshape(room.layout.num_fields, -1)
        self.pairs_2P = parts[11].reshape(2, -1)


def lay_out(pool: PagePool, parts: Sequence[RequestRows], to: Sections) -> None:
    """Write a batch. What is left of its room names row 0, and nothing of it is kept."""
    rows = []
    segments = []
    pages = list[int]()
    row = 0
    candidate_row = sum(part.end - part.first for part in parts)
    prefix_pages = 0
    for part in parts:
        asked = part.num_asked
        history = part.end - part.first
        prefix = -(-part.first // pool.page_tokens)
        rows.append((part.first, part.end, part.stored, asked, len(pages), prefix, len(part.tokens.before)))
        segments.append(PagedSegment(part.first, history, asked, row, candidate_row, prefix_pages, part.tokens.cut))
        pages += part.pages
        row, candidate_row, prefix_pages = row + history, candidate_row + asked, prefix_pages + prefix
    _write_rows(
        np.array(rows, np.int64).reshape(-1, 7),
        np.array(pages, np.int64),
        pool.page_tokens,
        to.layout.tokens_an_event,
        to.token_T,
        to.position_T,
        to.slot_T,
        to.pages,
        to.row_C,
        to.record_C,
    )
    table = segment_array(segments)
    for blocks, seen in zip(to.blocks, to.layout.seen, strict=True):
        write_blocks(table, to.layout.num_heads, False, blocks, seen)
    write_blocks(table, to.layout.num_heads, True, to.last_blocks, to.layout.last_seen)
    _fill_records(parts, to)
    if to.layout.has_times:
        _fill_times(parts, to)


def _fill_records(parts: Sequence[RequestRows], to: Sections) -> None:
    places = [(part.tokens.columns, part.before, part.events) for part in parts]
    for field, column in enumerate(to.records_FR):
        of_history = list[NDArray[np.int64]]()
        for columns, before, events in places:
            if len(before):
                of_history.append(before[:, field])
            of_history.append(columns[field][events])
        _fill(column, *of_history, *(part.asked.columns[field] for part in parts if part.asked is not None))


def _fill_times(parts: Sequence[RequestRows], to: Sections) -> None:
    row = 0
    for part in parts:
        tokens = part.tokens
        rows = slice(row, row + part.end - part.first)
        tokens.write_seconds(tokens.times_ms, part.first, part.end, to.time_T[rows])
        if tokens.asked_ms is tokens.times_ms:
            to.query_time_T[rows] = to.time_T[rows]
        else:
            tokens.write_seconds(tokens.asked_ms, part.first, part.end, to.query_time_T[rows])
        row = rows.stop
    for part in parts:
        if part.asked is not None:
            rows = slice(row, row + part.num_asked)
            to.time_T[rows] = part.asked.time_ms / 1000.0
            to.query_time_T[rows] = part.asked.asked_ms / 1000.0
            row = rows.stop
    to.time_T[row:] = to.query_time_T[row:] = 0.0


def _fill(to: NDArray[np.generic], *values: NDArray[np.integer]) -> None:
    """One after the other, and zeros after them."""
    first = 0
    for value in values:
        to[first : first + len(value)] = value
        first += len(value)
    to[first:] = 0


@njit(cache=True)  # some microseconds: giving up the interpreter and asking for it again would take longer
def _write_rows(  # noqa: PLR0917 - compiled functions take their arguments by position
    parts: NDArray[np.int64],
    pages: NDArray[np.int64],
    page_tokens: int,
    tokens_an_event: int,
    token_T: Indices,
    position_T: Indices,
    slot_T: Indices,
    used_pages: Indices,
    row_C: Indices,
    record_C: Indices,
) -> None:
    """parts: (first, end, end of what is kept, candidates, first page, pages of the prefix, tokens before the history)
    of each.

    A token is twice its record, and one more where it is the second one of its event."""
    row, page, record = 0, 0, 0
    for i in range(len(parts)):
        first, end, stored, _, first_page, num_pages, before = parts[i]
        for token in range(first, min(end, before)):
            token_T[row + token - first] = 2 * record
            record += 1
        place = row + max(0, before - first)
        for _ in range((end - max(first, before)) // tokens_an_event):
            for second in range(tokens_an_event):
                token_T[place] = 2 * record + second
                place += 1
            record += 1
        for token in range(first, end):
            position_T[row + token - first] = token
        slot_T[row + max(0, stored - first) : row + end - first] = -1
        token = first
        while token < stored:  # page by page: a division takes longer than all the rest
            until = min(stored, (token // page_tokens + 1) * page_tokens)
            slot = pages[first_page + token // page_tokens] * page_tokens + token % page_tokens
            for _ in range(token, until):
                slot_T[row + token - first] = slot
                token, slot = token + 1, slot + 1
        row += end - first
        used_pages[page : page + num_pages] = pages[first_page : first_page + num_pages]
        page += num_pages
    num_history = row
    asked = 0
    for i in range(len(parts)):
        for _ in range(parts[i, 3]):
            token_T[row] = 2 * record
            position_T[row] = parts[i, 1]
            row_C[asked] = row
            record_C[asked] = record
            row, asked, record = row + 1, asked + 1, record + 1
    slot_T[num_history:] = -1
    token_T[row:], position_T[row:] = 0, 0
    row_C[asked:], record_C[asked:] = 0, 0


@functools.lru_cache(maxsize=1024)
def _bounds(room: BatchBuffer) -> tuple[tuple[int, int], ...]:
    return tuple(itertools.pairwise(itertools.accumulate(room.sizes, initial=0)))
