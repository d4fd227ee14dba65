"""Batches of ranking work on a GPU: one copy to the device, one captured graph, one copy back.

Batches are padded to one of a few numbers of rows and of candidates, and for each pair of them everything from ids to
scores is captured once. Nothing here waits for the device: `Launched.wait` does. All of it runs on one stream, so
batches keep their order and may share buffers.

Legend: T rows of the batch, C candidates, R records, D model width, F fields of a record.
"""

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.models.hstu import HSTU, HSTUConfig
from nestrec.models.hstu_paged import PagedBatch, PagedHSTU
from nestrec.ops.attention.paged_blocks import FIELDS
from nestrec.ops.layers.token_rows import token_rows
from nestrec.serving.engine.batch_layout import Extent, Room, Sections, lay_out
from nestrec.serving.engine.runner import Launched, Part, Scored
from nestrec.serving.model.ranking_form import RankingForm
from nestrec.serving.prefix.page_pool import PagePool

_CANDIDATES = (0, 512, 1024)
"""numbers of candidates that batches are padded to, beside the number of their rows"""

_TILE_ROWS, _TILE_COLUMNS = 256, 128
"""of a product on a Hopper GPU"""
_MOST_ROW_STEP = 1024


class Captured:
    """The pass of one number of rows and candidates."""

    def __init__(self, form: RankingForm, encoder: PagedHSTU, room: Room, content_RD: torch.Tensor | None = None):
        """content_RD: room for the vectors of records, where they are brought to the device before the graph runs."""
        self._form, self._encoder, self.room, self._content_RD = form, encoder, room, content_RD
        self._indices = torch.zeros(room.num_indices, dtype=torch.int32, device=form.servable.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._scores: torch.Tensor | None = None

    def capture(self, memory: Any) -> None:
        self._indices.split(list(self.room.sizes))[2].fill_(-1)  # nothing is kept
        self._forward()  # compiles and loads what a capture may not
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._scores = self._forward()

    def run(self, packed: torch.Tensor) -> torch.Tensor:
        """(C, outputs) scores; valid until the next batch."""
        self._indices.copy_(packed, non_blocking=True)
        if self._graph is None or self._scores is None:
            return self._forward()
        self._graph.replay()
        return self._scores

    def bring(self, sections: Sections, num_records: int) -> None:
        """Vectors of the batch's records to the device, where a table is not there."""
        if self._content_RD is not None:
            records = self._form.records(sections.records_FR[:, :num_records].T.astype(np.int64))
            self._content_RD[:num_records] = self._form.content(records)

    def _forward(self) -> torch.Tensor:
        form, encoder = self._form, cast(HSTU, self._form.encoder)
        sections = self._indices.split(list(self.room.sizes))
        token_T, position_T, slot_T, blocks, last_blocks, pages, row_C, record_C, records = sections
        records_FR = records.view(self.room.num_fields, -1)
        content_RD = form.content(records_FR.long().T) if self._content_RD is None else self._content_RD
        x_TD = token_rows(
            content_RD,
            records_FR[1],
            form.action_vectors,
            encoder.position,
            token_T,
            position_T,
            factor=encoder.cfg.dim**0.5,
        )
        batch = PagedBatch(
            slot_T=slot_T,
            blocks=blocks.view(-1, FIELDS),
            last_blocks=last_blocks.view(-1, FIELDS),
            pages=pages,
            row_C=row_C,
        )
        state_CD = self._encoder.forward(x_TD, batch)
        return form.logits(state_CD, content_RD.index_select(0, record_C))


class _Slot:
    """Host memory and events of a batch on its way."""

    def __init__(self, num_indices: int, num_candidates: int, num_outputs: int):
        self.indices = torch.empty(num_indices, dtype=torch.int32, pin_memory=True)
        self.scores = torch.empty(num_candidates, num_outputs, dtype=torch.float32, pin_memory=True)
        self.begin, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._views: dict[Room, _Views] = {}

    def views(self, room: Room) -> "_Views":
        """Made once for each room: on the way of a request they would cost more than the copies."""
        if room not in self._views:
            indices, scores = self.indices[: room.num_indices], self.scores[: room.num_candidates]
            self._views[room] = _Views(indices, Sections(room, indices.numpy()), scores, scores.numpy())
        return self._views[room]


@dataclass(frozen=True, slots=True)
class _Views:
    indices: torch.Tensor
    sections: Sections
    scores: torch.Tensor
    scored: NDArray[np.float32]


class GraphRunner:
    """Runs ranking models without relative biases."""

    depth: int = 2
    warm_events: int = 4096
    spins: bool = True

    def __init__(self, form: RankingForm, pool: PagePool, *, max_tokens: int):
        self.form, self.pool = form, pool
        self.row_step = rows_a_wave(cast(HSTU, form.encoder).cfg, pool.tensor.device)
        most_pages = 32 * -(-form.servable.encoder_config.max_length // pool.page_tokens)
        self._sizes = row_counts(max_tokens)
        self._captured: dict[int, list[Captured]] = {}
        memory: Any = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            self._encoder = PagedHSTU(cast(HSTU, form.encoder), pool.tensor, pool.page_tokens)
            content_RD = room_for_content(form, self._sizes[-1])
            for size in reversed(self._sizes):  # the largest first: the others fit into its memory
                rooms = [Room(size, count, most_pages, form.num_fields) for count in candidate_counts(size)]
                self._captured[size] = [Captured(form, self._encoder, room, content_RD) for room in rooms]
                for captured in reversed(self._captured[size]):
                    captured.capture(memory)
        self._most = self._captured[self._sizes[-1]][-1].room
        self._slots = deque(self._slot(self._most) for _ in range(self.depth + 1))

    @torch.inference_mode()
    def weights_changed(self) -> None:
        self._encoder.weights_changed()

    @torch.inference_mode()
    def launch(self, parts: Sequence[Part]) -> Launched:
        extent = Extent.of(parts, self.pool.page_tokens)
        captured = self._captured_for(extent)
        slot = self._next_slot(captured.room)
        views = slot.views(captured.room)
        lay_out(self.form, self.pool, parts, views.sections)
        captured.bring(views.sections, extent.num_records)
        slot.begin.record()  # after the host's part: a device that waits for it is not at work
        scores = captured.run(views.indices)
        if extent.num_candidates:
            views.scores.copy_(scores, non_blocking=True)
        slot.end.record()

        def wait() -> tuple[list[Scored | None], float]:
            slot.end.synchronize()
            return _split(parts, views.scored), slot.begin.elapsed_time(slot.end) / 1e3

        return Launched(wait, slot.end.query)

    def _next_slot(self, room: Room) -> _Slot:
        if room.num_indices > self._most.num_indices or room.num_candidates > self._most.num_candidates:
            return self._slot(room)
        self._slots.rotate()  # the one of a batch that has ended, where at most `depth` are on their way
        self._slots[0].end.synchronize()  # whoever launches more waits: its indices may not be written over
        return self._slots[0]

    def _slot(self, room: Room) -> _Slot:
        return _Slot(room.num_indices, room.num_candidates, len(self.form.outputs))

    def _captured_for(self, extent: Extent) -> Captured:
        for size in self._sizes[bisect.bisect_left(self._sizes, extent.num_rows) :]:
            for captured in self._captured[size]:
                if captured.room.holds(extent):
                    return captured
        room = Room.for_extent(extent, self.form.num_fields)
        return Captured(self.form, self._encoder, room, room_for_content(self.form, room.num_records))


def room_for_content(form: RankingForm, num_records: int) -> torch.Tensor | None:
    """(R, D) where a table is behind a cache, which the host asks; none where the graph looks rows up itself."""
    if form.servable.is_resident:
        return None
    one = form.content(form.records(np.zeros((1, form.num_fields), np.int64)))
    return one.new_zeros(num_records, one.shape[1])


def row_counts(max_tokens: int) -> list[int]:
    """Numbers of rows that batches are padded to: steps of an eighth or less from 2048 rows on."""
    counts = [*range(256, 5120, 256), *range(5120, 12288, 512), *range(12288, 16384, 1024), *range(16384, 40960, 2048)]
    return [count for count in counts if count < max_tokens + 2048]


def rows_a_wave(cfg: HSTUConfig, device: torch.device) -> int:
    """Rows for which every multiprocessor has one tile of the widest product of a layer: those are as fast as fewer."""
    tiles = -(-4 * cfg.num_heads * cfg.head_dim // _TILE_COLUMNS)
    waves = torch.cuda.get_device_properties(device).multi_processor_count // tiles
    return min(_MOST_ROW_STEP, max(1, waves) * _TILE_ROWS)


def candidate_counts(num_rows: int) -> list[int]:
    """Numbers of candidates that batches of so many rows are padded to."""
    return [*(count for count in _CANDIDATES if count < num_rows), num_rows]


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
