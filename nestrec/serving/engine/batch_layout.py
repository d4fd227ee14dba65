"""A batch of ranking work as arrays, in the order of its rows: histories of all users first, then all candidates."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.models.hstu import HSTU
from nestrec.ops.attention.paged_blocks import BLOCK_ROWS, FIELDS, PagedSegment, segment_array, write_blocks
from nestrec.serving.engine.runner import Part
from nestrec.serving.model.ranking_form import RankingForm
from nestrec.serving.prefix.page_pool import PagePool

Indices = NDArray[np.int32]
_SPARE_BLOCKS = 64
"""partly filled blocks of a batch: at most two a user"""


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a batch is."""

    num_history: int
    """rows before the first candidate"""
    num_candidates: int
    num_blocks: int
    num_last_blocks: int
    """of candidates"""
    num_pages: int

    @property
    def num_rows(self) -> int:
        return self.num_history + self.num_candidates

    @property
    def num_records(self) -> int:
        """events and candidates"""
        return self.num_history // 2 + self.num_candidates

    @staticmethod
    def of(parts: Sequence[Part], page_tokens: int) -> "Extent":
        history = [part.end - part.first for part in parts]
        asked = [part.num_candidates for part in parts]
        last = sum(-(-count // BLOCK_ROWS) for count in asked)
        blocks = last + sum(-(-count // BLOCK_ROWS) for count in history)
        pages = sum(-(-part.first // page_tokens) for part in parts)
        return Extent(sum(history), sum(asked), blocks, last, pages)


@dataclass(frozen=True, slots=True)
class Room:
    """Where the arrays of a batch lie in one piece of memory, of which one copy is enough.

    Legend: T rows, C candidates, R records, F fields of a record.
    """

    num_rows: int
    num_candidates: int
    num_pages: int
    num_fields: int

    @property
    def num_blocks(self) -> int:
        return self.num_rows // BLOCK_ROWS + _SPARE_BLOCKS

    @property
    def num_last_blocks(self) -> int:
        return self.num_candidates // BLOCK_ROWS + _SPARE_BLOCKS if self.num_candidates else 0

    @property
    def num_records(self) -> int:
        """A row of history is half an event, a row of a candidate a whole record."""
        return -(-(self.num_rows + self.num_candidates) // 2)

    @property
    def sizes(self) -> tuple[int, ...]:
        """of token_T, position_T, slot_T, blocks, last_blocks, pages, row_C, record_C, records_FR"""
        return (
            self.num_rows,
            self.num_rows,
            self.num_rows,
            self.num_blocks * FIELDS,
            self.num_last_blocks * FIELDS,
            self.num_pages,
            self.num_candidates,
            self.num_candidates,
            self.num_records * self.num_fields,
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
    def for_extent(extent: Extent, num_fields: int) -> "Room":
        """As large as one batch needs it."""
        rows_for_blocks = max(0, extent.num_blocks - _SPARE_BLOCKS) * BLOCK_ROWS
        asked_for_blocks = max(0, extent.num_last_blocks - _SPARE_BLOCKS) * BLOCK_ROWS
        candidates = max(extent.num_candidates, asked_for_blocks)
        return Room(max(extent.num_rows, rows_for_blocks, candidates), candidates, extent.num_pages, num_fields)


class Sections:
    """The arrays of a batch inside one array; see `Room.sizes`."""

    def __init__(self, room: Room, array: Indices):
        parts = [array[first:end] for first, end in _bounds(room)]
        self.token_T, self.position_T, self.slot_T = parts[:3]
        self.blocks, self.last_blocks = (part.reshape(-1, FIELDS) for part in parts[3:5])
        self.pages, self.row_C, self.record_C = parts[5:8]
        self.records_FR = parts[8].reshape(room.num_fields, -1)


def lay_out(form: RankingForm, pool: PagePool, parts: Sequence[Part], to: Sections) -> None:
    """Write a batch. What is left of its room names row 0, and nothing of it is kept."""
    rows, segments, pages = [], [], list[int]()
    row, candidate_row, prefix_pages = 0, sum(part.end - part.first for part in parts), 0
    for part in parts:
        stored, asked = max(part.first, min(part.store_until, part.end)), part.num_candidates
        rows.append((part.first, part.end, stored, asked, len(pages), -(-part.first // pool.page_tokens)))
        segments.append(PagedSegment(part.first, part.end - part.first, asked, row, candidate_row, prefix_pages))
        pages += part.pages
        row, candidate_row, prefix_pages = (
            row + part.end - part.first,
            candidate_row + asked,
            prefix_pages + rows[-1][5],
        )
    _write_rows(
        np.array(rows, np.int64),
        np.array(pages, np.int64),
        pool.page_tokens,
        to.token_T,
        to.position_T,
        to.slot_T,
        to.pages,
        to.row_C,
        to.record_C,
    )
    heads, table = form.servable.kept.num_heads, segment_array(segments)
    rules = cast(HSTU, form.encoder).cfg.attention.rules(0)
    seen = (rules.max_attention_length or 0, rules.num_context)
    write_blocks(table, heads, False, to.blocks, *seen)
    write_blocks(table, heads, True, to.last_blocks, *seen)
    asked_columns = [form.candidate_columns(part.candidates) for part in parts if part.candidates is not None]
    for field, column in enumerate(to.records_FR):
        events = (part.tokens.columns[field][part.first // 2 : part.end // 2] for part in parts)
        _fill(column, *events, *(columns[field] for columns in asked_columns))


def _fill(to: Indices, *values: NDArray[np.integer]) -> None:
    """One after the other, and zeros after them."""
    first = 0
    for value in values:
        to[first : first + len(value)] = value
        first += len(value)
    to[first:] = 0


@njit(cache=True, nogil=True)
def _write_rows(  # noqa: PLR0917 - compiled functions take their arguments by position
    parts: NDArray[np.int64],
    pages: NDArray[np.int64],
    page_tokens: int,
    token_T: Indices,
    position_T: Indices,
    slot_T: Indices,
    used_pages: Indices,
    row_C: Indices,
    record_C: Indices,
) -> None:
    """parts: (first, end, end of what is kept, candidates, first page, pages of the prefix) of each."""
    row, page = 0, 0
    for i in range(len(parts)):
        first, end, stored, _, first_page, num_pages = parts[i]
        for token in range(first, end):
            token_T[row], position_T[row], slot_T[row] = row, token, -1
            if token < stored:
                slot_T[row] = pages[first_page + token // page_tokens] * page_tokens + token % page_tokens
            row += 1
        used_pages[page : page + num_pages] = pages[first_page : first_page + num_pages]
        page += num_pages
    num_history, asked = row, 0
    for i in range(len(parts)):
        for _ in range(parts[i, 3]):
            token_T[row], position_T[row] = num_history + 2 * asked, parts[i, 1]
            row_C[asked], record_C[asked] = row, num_history // 2 + asked
            row, asked = row + 1, asked + 1
    slot_T[num_history:] = -1
    token_T[row:], position_T[row:] = 0, 0
    row_C[asked:], record_C[asked:] = 0, 0


@functools.lru_cache(maxsize=1024)
def _bounds(room: Room) -> tuple[tuple[int, int], ...]:
    return tuple(itertools.pairwise(itertools.accumulate(room.sizes, initial=0)))
