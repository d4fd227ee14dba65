"""A batch of ranking work as arrays, in the order of its rows: histories of all users first, then all candidates."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestrec.ops.paged_attention import PagedSegment, plan_blocks
from nestrec.serving.forms import RankingForm
from nestrec.serving.page_pool import PagePool
from nestrec.serving.runner import Part

Ints = NDArray[np.int64]
Indices = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Layout:
    """Legend: T rows, R records."""

    records_RF: Ints
    """events and candidates"""
    record_T: Indices
    """whose token a row is"""
    is_action_T: Indices
    """1 for the action token of an event, 0 for a content token"""
    position_T: Indices
    """in its sequence; a candidate's is the length of the history"""
    slot_T: Indices
    """where keys and values are kept; -1 where they are not"""
    blocks: Indices
    pages: list[int]
    num_history: int
    """rows before the first candidate"""

    @property
    def num_rows(self) -> int:
        return len(self.record_T)

    @property
    def last_blocks(self) -> Indices:
        """Blocks of candidates."""
        chosen: Indices = self.blocks[self.blocks[:, 7] == 1]
        return chosen


def lay_out(form: RankingForm, pool: PagePool, parts: Sequence[Part]) -> Layout:
    """Rows, slots, blocks and pages of a batch."""
    num_history = sum(part.end - part.first for part in parts)
    num_rows = num_history + sum(part.num_candidates for part in parts)
    count = _count_to(max(num_rows, *(part.end for part in parts)))
    position_T, slot_T = np.empty(num_rows, np.int32), np.full(num_rows, -1, np.int32)
    record_T, is_action_T = np.empty(num_rows, np.int32), np.zeros(num_rows, np.int32)
    np.right_shift(count[:num_history], 1, out=record_T[:num_history])
    record_T[num_history:] = count[num_history // 2 : num_rows - num_history // 2]
    np.bitwise_and(count[:num_history], 1, out=is_action_T[:num_history])
    segments, pages = [], list[int]()
    row, candidate_row = 0, num_history
    for part in parts:
        end, stored = row + part.end - part.first, min(part.store_until, part.end)
        segments.append(
            PagedSegment(
                prefix_length=part.first, num_history=part.end - part.first, num_candidates=part.num_candidates,
                history_row=row, candidate_row=candidate_row, first_page=len(pages),
            )
        )  # fmt: skip
        pages += part.pages[: -(-part.first // pool.page_tokens)]
        position_T[row:end] = count[part.first : part.end]
        if stored > part.first:
            slot_T[row : row + stored - part.first] = pool.slots(part.pages, part.first, stored)
        position_T[candidate_row : candidate_row + part.num_candidates] = part.end
        row, candidate_row = end, candidate_row + part.num_candidates
    events = [part.tokens.records[part.first // 2 : part.end // 2] for part in parts]
    asked = [form.candidate_records(part.candidates) for part in parts if part.candidates is not None]
    return Layout(
        records_RF=np.concatenate([*events, *asked]), record_T=record_T, is_action_T=is_action_T,
        position_T=position_T, slot_T=slot_T, blocks=plan_blocks(segments), pages=pages, num_history=num_history,
    )  # fmt: skip


def _count_to(number: int) -> Indices:
    """0, 1, 2 and so on, at least to `number`."""
    return _counted((number - 1).bit_length())


@functools.lru_cache(maxsize=32)
def _counted(bits: int) -> Indices:
    return np.arange(1 << bits, dtype=np.int32)
