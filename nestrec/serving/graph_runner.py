"""Batches of ranking work on a GPU: one host-to-device copy, one captured graph, one copy back.

Batches are padded to one of a few numbers of rows, and for each of them the pass through the layers is captured once.
Nothing here waits for the device: `Launched.wait` does. All of it runs on one stream, so batches keep their order and
may share buffers.

Legend: T rows of the batch (histories of all users first, then all candidates), D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.models.hstu_paged import PagedBatch, paged_forward
from nestrec.ops.paged_attention import BLOCK_ROWS, FIELDS, PagedSegment, plan_blocks
from nestrec.serving.forms import RankingForm
from nestrec.serving.page_pool import PagePool
from nestrec.serving.runner import Launched, Part, Scored

_SPARE_BLOCKS = 64
"""partly filled blocks of a batch: at most two a user"""


@dataclass(frozen=True, slots=True)
class Layout:
    """A batch on the host, in the order of its rows."""

    records: NDArray[np.int64]
    """(events + candidates, fields)"""
    position_T: NDArray[np.int64]
    slot_T: NDArray[np.int64]
    blocks: NDArray[np.int32]
    pages: list[int]
    num_history: int
    """tokens before the first candidate"""


def lay_out(form: RankingForm, pool: PagePool, parts: Sequence[Part]) -> Layout:
    """Rows, slots, blocks and pages of a batch."""
    num_history = sum(part.end - part.first for part in parts)
    events, asked, positions, places, slots, segments = [], [], [], [], [], []
    pages: list[int] = []
    row, candidate_row = 0, num_history
    for part in parts:
        count, stored = part.end - part.first, min(part.store_until, part.end)
        segments.append(
            PagedSegment(
                prefix_length=part.first,
                num_history=count,
                num_candidates=part.num_candidates,
                history_row=row,
                candidate_row=candidate_row,
                first_page=len(pages),
            )
        )
        pages += part.pages[: -(-part.first // pool.page_tokens)]
        events.append(part.tokens.records[part.first // 2 : part.end // 2])
        positions.append(np.arange(part.first, part.end))
        slots.append(pool.slots(part.pages, part.first, stored) if stored > part.first else np.zeros(0, np.int64))
        slots.append(np.full(count - len(slots[-1]), -1))
        if part.candidates is not None:
            asked.append(form.candidate_records(part.candidates))
            places.append(np.full(part.num_candidates, part.end))
        row, candidate_row = row + count, candidate_row + part.num_candidates
    return Layout(
        records=np.concatenate([*events, *asked]), position_T=np.concatenate([*positions, *places]),
        slot_T=np.concatenate([*slots, np.full(candidate_row - num_history, -1)]), blocks=plan_blocks(segments),
        pages=pages, num_history=num_history,
    )  # fmt: skip


class _Captured:
    """The pass of one number of rows. `indices` holds position, slot, blocks and pages one behind the other."""

    def __init__(self, form: RankingForm, pool: PagePool, num_rows: int, most_pages: int):
        self._form, self._pool, self.num_rows = form, pool, num_rows
        self.num_blocks = num_rows // BLOCK_ROWS + _SPARE_BLOCKS
        self.most_pages = most_pages
        device = form.encoder.position.device
        size = 2 * num_rows + self.num_blocks * FIELDS + most_pages
        self._indices = torch.zeros(size, dtype=torch.int32, device=device)
        parts = self._indices.split([num_rows, num_rows, self.num_blocks * FIELDS, most_pages])
        self._batch = PagedBatch(position_T=parts[0], slot_T=parts[1], blocks=parts[2].view(-1, FIELDS), pages=parts[3])
        self.x_TD = form.encoder.position.new_zeros(num_rows, form.encoder.cfg.dim)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._state_TD: torch.Tensor | None = None

    def capture(self, memory: Any) -> None:
        self._indices[self.num_rows : 2 * self.num_rows] = -1
        self._forward()  # compiles what is not compiled yet
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._state_TD = self._forward()

    def fits(self, layout: Layout) -> bool:
        return len(layout.blocks) <= self.num_blocks and len(layout.pages) <= self.most_pages

    def run(self, layout: Layout) -> torch.Tensor:
        """(T, D) states, valid until the next batch."""
        self._indices.copy_(self._packed(layout), non_blocking=True)
        if self._graph is None or self._state_TD is None:
            return self._forward()
        self._graph.replay()
        return self._state_TD

    def _packed(self, layout: Layout) -> torch.Tensor:
        packed = torch.zeros(len(self._indices), dtype=torch.int32, pin_memory=True)
        array, num_rows, count = packed.numpy(), self.num_rows, len(layout.position_T)
        array[:count] = layout.position_T
        array[num_rows : 2 * num_rows] = -1
        array[num_rows : num_rows + count] = layout.slot_T
        first = 2 * num_rows
        array[first : first + layout.blocks.size] = layout.blocks.ravel()
        first += self.num_blocks * FIELDS
        array[first : first + len(layout.pages)] = layout.pages
        return packed

    def _forward(self) -> torch.Tensor:
        return paged_forward(self._form.encoder, self.x_TD, self._batch, self._pool.tensor, self._pool.page_tokens)


class GraphRunner:
    """Runs ranking models without relative biases."""

    depth: int = 2
    warm_events: int = 4096

    def __init__(self, form: RankingForm, pool: PagePool, *, max_tokens: int):
        self.form, self.pool = form, pool
        self._most_pages = 32 * -(-form.encoder.cfg.max_length // pool.page_tokens)
        self._sizes = [n for n in _row_counts() if n < max_tokens + 1024]
        self._captured: dict[int, _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            for size in reversed(self._sizes):  # the largest first: the others fit into its memory
                self._captured[size] = _Captured(form, pool, size, self._most_pages)
                self._captured[size].capture(self._memory)

    @torch.inference_mode()
    def launch(self, parts: Sequence[Part]) -> Launched:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        layout = lay_out(self.form, self.pool, parts)
        begin.record()
        content, state_TD = self._states(layout)
        num_events, last = layout.num_history // 2, len(layout.position_T)
        scores = self.form.logits(state_TD[layout.num_history : last], content[num_events:])
        host = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
        host.copy_(scores, non_blocking=True)
        end.record()

        def wait() -> tuple[list[Scored | None], float]:
            end.synchronize()
            return _split(parts, host.numpy()), begin.elapsed_time(end) / 1e3

        return Launched(wait)

    def _states(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Content vectors of events and candidates, and the states of all rows."""
        device = self.form.encoder.position.device
        num_rows, num_events = len(layout.position_T), layout.num_history // 2
        records = torch.from_numpy(layout.records).pin_memory().to(device, non_blocking=True)
        content = self.form.content(records)
        captured = self._captured_for(layout)
        captured.x_TD[: layout.num_history] = self.form.event_tokens(records[:num_events], content[:num_events])
        captured.x_TD[layout.num_history : num_rows] = content[num_events:]
        return content, captured.run(layout)

    def _captured_for(self, layout: Layout) -> _Captured:
        num_rows = len(layout.position_T)
        for size in self._sizes:
            if size >= num_rows and self._captured[size].fits(layout):
                return self._captured[size]
        blocks = max(0, len(layout.blocks) - _SPARE_BLOCKS) * BLOCK_ROWS
        return _Captured(self.form, self.pool, max(num_rows, blocks), len(layout.pages))


def _row_counts() -> list[int]:
    return [*range(256, 2048, 256), *range(2048, 6144, 512), *range(6144, 32768 + 1, 1024)]


def _split(parts: Sequence[Part], scores: NDArray[np.float32]) -> list[Scored | None]:
    results: list[Scored | None] = []
    first = 0
    for part in parts:
        if part.candidates is None:
            results.append(None)
            continue
        results.append(Scored(part.candidates.items, scores[first : first + part.num_candidates].copy()))
        first += part.num_candidates
    return results
