"""Layout of a batch as arrays: first the history rows of all users, then all query rows.

Query rows are the candidates of a ranking model, or the last events of the users of a retrieval model, whose states are
the retrieval queries. Both attend to their history and not to each other.
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
"""Number of partly filled blocks reserved per batch; a user has at most two."""


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Rows of one batch item."""

    tokens: HistoryTokens
    first: int
    end: int
    """End of the history tokens to compute; excludes the last event if that is a query row."""
    stored: int
    """Number of tokens whose keys and values will be in the pages after the batch."""
    pages: list[int]
    queries: QueryRows | None

    @property
    def num_queries(self) -> int:
        return 0 if self.queries is None else self.queries.count

    @property
    def prefix_records(self) -> NDArray[np.int64]:
        """Records of the user-feature tokens that precede the history."""
        return self.tokens.prefix_records[self.first : self.end]

    @property
    def events(self) -> slice:
        return slice(self.tokens.num_events_within(self.first), self.tokens.num_events_within(self.end))

    @property
    def num_records(self) -> int:
        """Number of records without those of query rows."""
        tokens = self.tokens
        return len(self.prefix_records) + tokens.num_events_within(self.end) - tokens.num_events_within(self.first)

    @staticmethod
    def of(adapter: PagedModelAdapter, items: Sequence[BatchItem]) -> "list[RequestRows]":
        rows = []
        for item in items:
            queries = None if item.candidates is None else adapter.query_rows(item.tokens, item.candidates)
            end = item.end - (1 if queries is not None and queries.is_last_event else 0)
            stored = max(item.first, min(item.store_until, end))
            rows.append(RequestRows(item.tokens, item.first, end, stored, item.pages, queries))
        return rows


@dataclass(frozen=True, slots=True)
class Extent:
    """Size of a batch."""

    num_history: int
    """Number of history rows."""
    num_candidates: int
    """Number of query rows."""
    num_blocks: int
    num_last_blocks: int
    """Number of blocks of the last layer, which computes query rows only."""
    num_pages: int
    num_records: int
    """Number of records: user features, history events and query rows."""

    @property
    def num_rows(self) -> int:
        return self.num_history + self.num_candidates

    @staticmethod
    def of(rows: Sequence[RequestRows], page_tokens: int) -> "Extent":
        history = [item.end - item.first for item in rows]
        num_queries = [item.num_queries for item in rows]
        last = sum(-(-count // BLOCK_ROWS) for count in num_queries)
        blocks = last + sum(-(-count // BLOCK_ROWS) for count in history)
        pages = sum(-(-item.first // page_tokens) for item in rows)
        records = sum(item.num_records for item in rows)
        return Extent(sum(history), sum(num_queries), blocks, last, pages, records + sum(num_queries))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Array layout that all batches of a model share."""

    num_fields: int
    """Number of fields per record."""
    tokens_per_event: int
    visible: tuple[VisibleRange, ...]
    """Distinct attention ranges of the layers; each has its own block table."""
    last_visible: VisibleRange
    """Attention range of the last layer."""
    num_heads: int
    has_times: bool
    num_prefix_tokens: int = 0
    """Number of user-feature tokens before each history."""


@dataclass(frozen=True, slots=True)
class BatchBuffer:
    """Capacity of a batch buffer: the arrays of a batch are sections of one array, so that one copy transfers them.

    Legend: T rows, C candidates, R records, F fields of a record.
    """

    num_rows: int
    num_candidates: int
    num_pages: int
    layout: Layout
    num_pairs: int = 0
    """Number of (query row, excluded item) pairs."""

    @property
    def num_blocks(self) -> int:
        return self.num_rows // BLOCK_ROWS + _SPARE_BLOCKS

    @property
    def num_last_blocks(self) -> int:
        return self.num_candidates // BLOCK_ROWS + _SPARE_BLOCKS if self.num_candidates else 0

    @property
    def num_records(self) -> int:
        """Number of records: one per candidate or user-feature row, and one or one half per history row."""
        if self.layout.tokens_per_event == 1 or self.layout.num_prefix_tokens:
            return self.num_rows
        return -(-(self.num_rows + self.num_candidates) // 2)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in 32-bit words of time_T and query_time_T (two words per value), token_T, position_T, slot_T, blocks,
        last_blocks, pages, row_C, record_C, records_FR and pairs_2P."""
        return (
            2 * self.num_rows if self.layout.has_times else 0,
            2 * self.num_rows if self.layout.has_times else 0,
            self.num_rows,
            self.num_rows,
            self.num_rows,
            len(self.layout.visible) * self.num_blocks * FIELDS,
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

    def has_capacity_for(self, extent: Extent) -> bool:
        return (
            extent.num_rows <= self.num_rows
            and extent.num_candidates <= self.num_candidates
            and extent.num_blocks <= self.num_blocks
            and extent.num_last_blocks <= self.num_last_blocks
            and extent.num_pages <= self.num_pages
        )

    @staticmethod
    def for_extent(extent: Extent, layout: Layout) -> "BatchBuffer":
        """Return the smallest buffer for one batch."""
        rows_for_blocks = max(0, extent.num_blocks - _SPARE_BLOCKS) * BLOCK_ROWS
        candidates_for_blocks = max(0, extent.num_last_blocks - _SPARE_BLOCKS) * BLOCK_ROWS
        candidates = max(extent.num_candidates, candidates_for_blocks)
        return BatchBuffer(max(extent.num_rows, rows_for_blocks, candidates), candidates, extent.num_pages, layout)


class Sections:
    """Arrays of a batch as views of one array; see `BatchBuffer.sizes`."""

    def __init__(self, buffer: BatchBuffer, array: Indices):
        views = [array[first:end] for first, end in _bounds(buffer)]
        self.layout = buffer.layout
        self.time_T, self.query_time_T = (view.view(np.float64) for view in views[:2])
        self.token_T, self.position_T, self.slot_T = views[2:5]
        self.blocks = views[5].reshape(len(buffer.layout.visible), -1, FIELDS)
        self.last_blocks = views[6].reshape(-1, FIELDS)
        self.pages, self.row_C, self.record_C = views[7:10]
        self.records_FR = views[10].reshape(buffer.layout.num_fields, -1)
        self.pairs_2P = views[11].reshape(2, -1)


def lay_out(pool: PagePool, items: Sequence[RequestRows], to: Sections) -> None:
    """Write a batch into its buffer. Padding rows refer to row 0 and are not stored in the KV cache."""
    rows = []
    segments = []
    pages = list[int]()
    row = 0
    candidate_row = sum(item.end - item.first for item in items)
    prefix_pages = 0
    for item in items:
        num_queries = item.num_queries
        history = item.end - item.first
        prefix = -(-item.first // pool.page_tokens)
        rows.append(
            (item.first, item.end, item.stored, num_queries, len(pages), prefix, len(item.tokens.prefix_records))
        )
        segments.append(
            PagedSegment(item.first, history, num_queries, row, candidate_row, prefix_pages, item.tokens.cut)
        )
        pages += item.pages
        row, candidate_row, prefix_pages = row + history, candidate_row + num_queries, prefix_pages + prefix
    _write_rows(
        np.array(rows, np.int64).reshape(-1, 7),
        np.array(pages, np.int64),
        pool.page_tokens,
        to.layout.tokens_per_event,
        to.token_T,
        to.position_T,
        to.slot_T,
        to.pages,
        to.row_C,
        to.record_C,
    )
    table = segment_array(segments)
    for blocks, seen in zip(to.blocks, to.layout.visible, strict=True):
        write_blocks(table, to.layout.num_heads, False, blocks, seen)
    write_blocks(table, to.layout.num_heads, True, to.last_blocks, to.layout.last_visible)
    _fill_records(items, to)
    if to.layout.has_times:
        _fill_times(items, to)


def _fill_records(items: Sequence[RequestRows], to: Sections) -> None:
    sources = [(item.tokens.columns, item.prefix_records, item.events) for item in items]
    for field, column in enumerate(to.records_FR):
        of_history = list[NDArray[np.int64]]()
        for columns, before, events in sources:
            if len(before):
                of_history.append(before[:, field])
            of_history.append(columns[field][events])
        _fill(column, *of_history, *(item.queries.columns[field] for item in items if item.queries is not None))


def _fill_times(items: Sequence[RequestRows], to: Sections) -> None:
    row = 0
    for item in items:
        tokens = item.tokens
        rows = slice(row, row + item.end - item.first)
        tokens.write_seconds(tokens.times_ms, item.first, item.end, to.time_T[rows])
        if tokens.query_times_ms is tokens.times_ms:
            to.query_time_T[rows] = to.time_T[rows]
        else:
            tokens.write_seconds(tokens.query_times_ms, item.first, item.end, to.query_time_T[rows])
        row = rows.stop
    for item in items:
        if item.queries is not None:
            rows = slice(row, row + item.num_queries)
            to.time_T[rows] = item.queries.time_ms / 1000.0
            to.query_time_T[rows] = item.queries.query_time_ms / 1000.0
            row = rows.stop
    to.time_T[row:] = to.query_time_T[row:] = 0.0


def _fill(to: NDArray[np.generic], *values: NDArray[np.integer]) -> None:
    """Concatenate the values into `to` and fill the rest with zeros."""
    first = 0
    for value in values:
        to[first : first + len(value)] = value
        first += len(value)
    to[first:] = 0


@njit(cache=True)  # keeps the GIL: it runs for microseconds, and reacquiring the GIL would take longer
def _write_rows(  # noqa: PLR0917 - compiled functions take their arguments by position
    items: NDArray[np.int64],
    pages: NDArray[np.int64],
    page_tokens: int,
    tokens_per_event: int,
    token_T: Indices,
    position_T: Indices,
    slot_T: Indices,
    used_pages: Indices,
    row_C: Indices,
    record_C: Indices,
) -> None:
    """Write the rows of all items.

    A value of `token_T` is twice the index of the token's record, plus 1 for the second token of an event.

    Args:
        parts: (items, 7) columns: first token, end, end of the stored tokens, candidates, first page, pages of the
            prefix, user-feature tokens before the history.
        pages: Pages of all items, concatenated.
    """
    row, page, record = 0, 0, 0
    for i in range(len(items)):
        first, end, stored, _, first_page, num_pages, before = items[i]
        for token in range(first, min(end, before)):
            token_T[row + token - first] = 2 * record
            record += 1
        event_row = row + max(0, before - first)
        for _ in range((end - max(first, before)) // tokens_per_event):
            for second in range(tokens_per_event):
                token_T[event_row] = 2 * record + second
                event_row += 1
            record += 1
        for token in range(first, end):
            position_T[row + token - first] = token
        slot_T[row + max(0, stored - first) : row + end - first] = -1
        token = first
        while token < stored:  # page by page: a division per token would take longer than everything else
            until = min(stored, (token // page_tokens + 1) * page_tokens)
            slot = pages[first_page + token // page_tokens] * page_tokens + token % page_tokens
            for _ in range(token, until):
                slot_T[row + token - first] = slot
                token, slot = token + 1, slot + 1
        row += end - first
        used_pages[page : page + num_pages] = pages[first_page : first_page + num_pages]
        page += num_pages
    num_history = row
    num_queries = 0
    for i in range(len(items)):
        for _ in range(items[i, 3]):
            token_T[row] = 2 * record
            position_T[row] = items[i, 1]
            row_C[num_queries] = row
            record_C[num_queries] = record
            row, num_queries, record = row + 1, num_queries + 1, record + 1
    slot_T[num_history:] = -1
    token_T[row:], position_T[row:] = 0, 0
    row_C[num_queries:], record_C[num_queries:] = 0, 0


@functools.lru_cache(maxsize=1024)
def _bounds(buffer: BatchBuffer) -> tuple[tuple[int, int], ...]:
    return tuple(itertools.pairwise(itertools.accumulate(buffer.sizes, initial=0)))
