"""Batches of ranking work on a GPU: one copy to the device, one captured graph, one copy back.

Batches are padded to one of a few numbers of rows, and for each of them everything from ids to scores is captured once.
Nothing here waits for the device: `Launched.wait` does. All of it runs on one stream, so batches keep their order and
may share buffers.

Legend: T rows of the batch, D model width, F fields of a record.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.models.hstu_paged import PagedBatch, paged_forward
from nestrec.ops.paged_attention import BLOCK_ROWS, FIELDS
from nestrec.serving.batch_layout import Layout, lay_out
from nestrec.serving.forms import RankingForm
from nestrec.serving.page_pool import PagePool
from nestrec.serving.runner import Launched, Part, Scored

_SPARE_BLOCKS = 64
"""partly filled blocks of a batch: at most two a user"""


class Captured:
    """The pass of one number of rows. One buffer holds all of its indices, so that one copy brings them."""

    def __init__(
        self, form: RankingForm, pool: PagePool, num_rows: int, most_pages: int, content_RD: torch.Tensor | None = None
    ):
        """content_RD: room for the vectors of records, where they are brought to the device before the graph runs."""
        self._form, self._pool, self.num_rows = form, pool, num_rows
        self._num_fields = form.num_fields
        self._num_blocks, self._most_pages = num_rows // BLOCK_ROWS + _SPARE_BLOCKS, most_pages
        blocks = self._num_blocks * FIELDS
        sizes = [num_rows] * 4 + [blocks, blocks, most_pages, num_rows * self._num_fields]
        self._starts = np.cumsum([0, *sizes])
        self._indices = torch.zeros(sum(sizes), dtype=torch.int32, device=form.encoder.position.device)
        self._parts = self._indices.split(sizes)
        self._content_RD = content_RD
        self._graph: torch.cuda.CUDAGraph | None = None
        self._scores: torch.Tensor | None = None

    @property
    def num_indices(self) -> int:
        return len(self._indices)

    def capture(self, memory: Any) -> None:
        self._parts[3].fill_(-1)
        self._forward()  # compiles what is not compiled yet
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._scores = self._forward()

    def fits(self, layout: Layout) -> bool:
        return (
            layout.num_rows <= self.num_rows
            and len(layout.blocks) <= self._num_blocks
            and len(layout.pages) <= self._most_pages
        )

    def run(self, packed: torch.Tensor) -> torch.Tensor:
        """(T, outputs) scores, of which those of candidates mean something; valid until the next batch."""
        self._indices.copy_(packed, non_blocking=True)
        if self._graph is None or self._scores is None:
            return self._forward()
        self._graph.replay()
        return self._scores

    def bring(self, layout: Layout) -> None:
        """Vectors of the batch's records to the device, where a table is not there."""
        if self._content_RD is not None:
            content_RD = self._form.content(self._form.records(layout.records_RF))
            self._content_RD[: len(content_RD)] = content_RD

    def packed(self, layout: Layout, room: torch.Tensor | None = None) -> torch.Tensor:
        """All indices of a batch, in host memory: in `room` where they fit."""
        if room is None or len(room) < len(self._indices):
            room = torch.empty(len(self._indices), dtype=torch.int32, pin_memory=self._indices.is_cuda)
        packed = room[: len(self._indices)]
        array, starts = packed.numpy(), self._starts
        array[: starts[3]] = 0
        array[starts[3] : starts[4]] = -1
        array[starts[4] :] = 0
        arrays: tuple[NDArray[Any], ...] = (
            layout.record_T, layout.is_action_T, layout.position_T, layout.slot_T, layout.blocks, layout.last_blocks,
            np.array(layout.pages, np.int32), layout.records_RF,
        )  # fmt: skip
        for start, values in zip(starts, arrays, strict=False):
            array[start : start + values.size] = values.ravel()
        return packed

    def _forward(self) -> torch.Tensor:
        record_T, is_action_T, position_T, slot_T, blocks, last_blocks, pages, records = self._parts
        records_TF = records.view(-1, self._num_fields).index_select(0, record_T).long()
        content_TD = self._content_of(records_TF, record_T)
        x_TD = torch.where(is_action_T[:, None] == 1, self._form.action(records_TF), content_TD)
        batch = PagedBatch(
            position_T=position_T, slot_T=slot_T, blocks=blocks.view(-1, FIELDS),
            last_blocks=last_blocks.view(-1, FIELDS), pages=pages,
        )  # fmt: skip
        state_TD = paged_forward(self._form.encoder, x_TD, batch, self._pool.tensor, self._pool.page_tokens)
        return self._form.logits(state_TD, content_TD)

    def _content_of(self, records_TF: torch.Tensor, record_T: torch.Tensor) -> torch.Tensor:
        if self._content_RD is None:
            return self._form.content(records_TF)
        return self._content_RD.index_select(0, record_T)


class GraphRunner:
    """Runs ranking models without relative biases."""

    depth: int = 2
    warm_events: int = 4096

    def __init__(self, form: RankingForm, pool: PagePool, *, max_tokens: int):
        self.form, self.pool = form, pool
        most_pages = 32 * -(-form.encoder.cfg.max_length // pool.page_tokens)
        self._captured: list[Captured] = []
        memory: Any = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            sizes = row_counts(max_tokens)
            content_RD = room_for_content(form, sizes[-1])
            for size in reversed(sizes):  # the largest first: the others fit into its memory
                captured = Captured(form, pool, size, most_pages, content_RD)
                captured.capture(memory)
                self._captured.insert(0, captured)
        most = max(captured.num_indices for captured in self._captured)
        rooms = (torch.empty(most, dtype=torch.int32, pin_memory=True) for _ in range(self.depth + 1))
        self._rooms = deque(rooms)

    @torch.inference_mode()
    def launch(self, parts: Sequence[Part]) -> Launched:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        layout = lay_out(self.form, self.pool, parts)
        captured = self._captured_for(layout)
        self._rooms.rotate()  # the one of a batch that has ended
        packed = captured.packed(layout, self._rooms[0])
        captured.bring(layout)
        begin.record()  # after the host's part: a device that waits for it is not at work
        scores = captured.run(packed)[layout.num_history : layout.num_rows]
        host = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
        host.copy_(scores, non_blocking=True)
        end.record()

        def wait() -> tuple[list[Scored | None], float]:
            end.synchronize()
            return _split(parts, host.numpy()), begin.elapsed_time(end) / 1e3

        return Launched(wait, end.query)

    def _captured_for(self, layout: Layout) -> Captured:
        for captured in self._captured:
            if captured.fits(layout):
                return captured
        rows_for_blocks = max(0, len(layout.blocks) - _SPARE_BLOCKS) * BLOCK_ROWS
        num_rows = max(layout.num_rows, rows_for_blocks)
        return Captured(self.form, self.pool, num_rows, len(layout.pages), room_for_content(self.form, num_rows))


def room_for_content(form: RankingForm, num_records: int) -> torch.Tensor | None:
    """(R, D) where a table is behind a cache, which the host asks; none where the graph looks rows up itself."""
    if form.servable.is_resident:
        return None
    one = form.content(form.records(np.zeros((1, form.num_fields), np.int64)))
    return one.new_zeros(num_records, one.shape[1])


def row_counts(max_tokens: int) -> list[int]:
    """Numbers of rows that batches are padded to: steps of an eighth or less from 2048 rows on."""
    counts = [*range(256, 12288, 256), *range(12288, 16384, 1024), *range(16384, 40960, 2048)]
    return [count for count in counts if count < max_tokens + 2048]


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
