"""Runs batches on a GPU by captured CUDA graphs over the paged KV cache.

Batches of work on a GPU: one copy to the device, one captured graph, one copy back.

Batches are padded to one of a few numbers of rows and of candidates, and for each pair of them everything from ids to
scores is captured once; of a retrieval model, everything from ids to the items that were found (`graph_best`), and for
requests that are answered otherwise everything to the states. Nothing here waits for the device: `InFlightBatch.wait`
does. All of it runs on one stream, so batches keep their order and may share buffers.

Legend: T rows of the batch, C candidates, R records, D model width, F fields of a record, K best, P excluded pairs.

The search of an index as the end of a captured batch: one graph from ids to the items that were found.

It takes batches whose requests all ask for the best of the catalogue, for few enough and with few enough exclusions;
of any other batch the states are captured, and the search comes after them.

Legend: C rows that are asked for, D model width, K best, P excluded pairs.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.cuda import capturing, pinned_empty
from nestrec.models.cached.paged_batch import PagedBatch, PagedLayers
from nestrec.models.sequence import KVCacheSpec
from nestrec.ops.attention.paged.query_blocks import FIELDS
from nestrec.ops.embedding.top_k_search import ExcludedPairs, scores_and_rows
from nestrec.ops.layers.token_rows import token_rows
from nestrec.serving.engine.batch_layout import BatchBuffer, Extent, Layout, RequestRows, Sections, lay_out
from nestrec.serving.engine.reference_runner import BatchItem, BatchItemScores, InFlightBatch, found_by_states
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.model.item_search import ExactSearch
from nestrec.serving.model.model_adapter import PagedModelAdapter
from nestrec.serving.model.request_inputs import Candidates
from nestrec.serving.model.retrieval_adapter import RetrievalAdapter, shortened
from nestrec.serving.model.served_tables import DeviceTable

MOST_BEST, MOST_PAIRS = 128, 8192
"""of a request, and of a batch"""


class GraphBest:
    """Of an index that lies whole on the device of its model."""

    def __init__(self, form: RetrievalAdapter):
        assert isinstance(form.servable.index, DeviceTable)
        self._form = form
        self._table = form.servable.index
        self._num_rows = self._table.num_rows
        self._search = ExactSearch(self._table)

    @property
    def num_best(self) -> int:
        """K"""
        return min(MOST_BEST, self._num_rows)

    @property
    def is_current(self) -> bool:
        """What was captured searches the index as it is: a model that follows a run learns of new items."""
        return self._form.servable.index is self._table and self._table.num_rows == self._num_rows

    def keys(self, state_CD: torch.Tensor, pairs_2P: torch.Tensor) -> torch.Tensor:
        """(C, K) of rows by exact scores, best first."""
        pairs = ExcludedPairs.of(*pairs_2P.long())
        return self._search.best_keys(self._form.query(state_CD), self.num_best, pairs)


def are_found_inside(parts: Sequence[BatchItem]) -> bool:
    """Whether a batch can end with the search."""
    asked = [part.candidates for part in parts if part.candidates is not None]
    return (
        bool(asked)
        and all(0 < one.num_best <= MOST_BEST and one.allowed is None for one in asked)
        and all(part.tokens.length for part in parts)
        and sum(len(one.excluded) for one in asked) <= MOST_PAIRS
    )


def write_pairs(asked: Sequence[Candidates], pairs_2P: NDArray[np.int32]) -> None:
    """What requests exclude; the rest names rows that there are none of."""
    counts = np.array([len(one.excluded) for one in asked], np.int64)
    _write_pairs(counts, np.concatenate([one.excluded for one in asked]), pairs_2P)


@njit(cache=True)  # in one call that keeps the interpreter
def _write_pairs(counts: NDArray[np.int64], items: NDArray[np.int64], pairs: NDArray[np.int32]) -> None:
    place = count = 0
    for query in range(len(counts)):
        for _ in range(counts[query]):
            if items[place] > 0:  # 0 is no item
                pairs[0, count] = query
                pairs[1, count] = items[place] - 1
                count += 1
            place += 1
    pairs[:, count:] = -1


def found_of(parts: Sequence[BatchItem], keys_CK: torch.Tensor) -> list[BatchItemScores | None]:
    """What requests have found, by keys on the host."""
    scores_CK, rows_CK = (found.numpy() for found in scores_and_rows(keys_CK))
    results: list[BatchItemScores | None] = []
    place = 0
    for part in parts:
        if part.candidates is None:
            results.append(None)
            continue
        results.append(BatchItemScores(*shortened(rows_CK[place], scores_CK[place], part.candidates.num_best)))
        place += 1
    return results


_CANDIDATES = (0, 512, 1024)
"""numbers of candidates that batches are padded to, beside the number of their rows"""

_FEW_ASKED = (0, 64)
"""the same of retrieval models, which are asked for one row a user"""
_SEARCHED = (16, 64)
"""the same where the search is a part of the graph"""
_TILE_ROWS, _TILE_COLUMNS = 256, 128
"""of a product on a Hopper GPU"""
_MOST_ROW_STEP = 1024


class PagedEncoder(Protocol):
    """A backbone over pages (`nestrec.models.cached.paged_batch`)."""

    pages: PagedLayers

    def weights_changed(self) -> None:
        """Those of the model have other values; what was captured reads them where they were."""
        ...

    def forward(self, x_TD: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """(C, D) states of what is asked for"""
        ...


def layout_of(form: PagedModelAdapter, encoder: PagedEncoder) -> Layout:
    """Of all batches of a model."""
    return Layout(
        num_fields=form.num_fields,
        tokens_an_event=form.tokens_an_event,
        seen=encoder.pages.seen,
        last_seen=encoder.pages.last_seen,
        num_heads=form.servable.kept.num_heads,
        has_times=form.servable.reads_times,
        num_before=len(form.servable.prefix_columns),
    )


class CapturedGraph:
    """The pass of one number of rows and candidates."""

    def __init__(
        self,
        form: PagedModelAdapter,
        encoder: PagedEncoder,
        room: BatchBuffer,
        content_RW: torch.Tensor | None = None,
        best: GraphBest | None = None,
    ):
        """content_RW: room for the vectors of records, where they are brought to the device before the graph runs.
        best: the search that the pass ends with."""
        self._form = form
        self._encoder = encoder
        self.room = room
        self._content_RW = content_RW
        self._best = best
        self._indices = torch.zeros(room.num_indices, dtype=torch.int32, device=form.servable.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._scores: torch.Tensor | None = None

    def capture(self, memory: Any) -> None:
        sections = self._indices.split(list(self.room.sizes))
        sections[4].fill_(-1)  # nothing is kept
        sections[-1].fill_(-1)  # nothing is excluded
        self._forward()  # compiles and loads what a capture may not
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph, memory):
            self._scores = self._forward()

    def run(self, packed: torch.Tensor) -> torch.Tensor:
        """(C, outputs) scores, (C, D) states or (C, K) keys of what was found; valid until the next batch."""
        self._indices.copy_(packed, non_blocking=True)
        if self._graph is None or self._scores is None:
            return self._forward()
        self._graph.replay()
        return self._scores

    def bring(self, sections: Sections, num_records: int) -> None:
        """Vectors of the batch's records to the device, where a table is not there."""
        if self._content_RW is not None:
            records = self._form.records(sections.records_FR[:, :num_records].T.astype(np.int64))
            self._content_RW[:num_records] = self._form.content(records)

    def _forward(self) -> torch.Tensor:
        form = self._form
        encoder = cast(Any, self._form.encoder)
        layout = self.room.layout
        sections = self._indices.split(list(self.room.sizes))
        time_T, query_time_T = (words.view(torch.float64) if layout.has_times else None for words in sections[:2])
        token_T, position_T, slot_T, blocks, last_blocks, pages, row_C, record_C, records, pairs = sections[2:]
        records_FR = records.view(layout.num_fields, -1)
        content_RW = form.content(records_FR.long().T) if self._content_RW is None else self._content_RW
        x_TD = token_rows(
            content_RW[:, : encoder.cfg.dim].contiguous(),  # interactions may stand behind it
            records_FR[-1 if layout.num_fields == 1 else 1],
            form.action_vectors,
            encoder.position,
            token_T,
            position_T,
            factor=encoder.cfg.dim**0.5,
        )
        batch = PagedBatch(
            slot_T=slot_T,
            blocks=blocks.view(len(layout.seen), -1, FIELDS).unbind(),
            last_blocks=last_blocks.view(-1, FIELDS),
            pages=pages,
            row_C=row_C,
            time_T=time_T,
            query_time_T=query_time_T,
        )
        state_CD = self._encoder.forward(x_TD, batch)
        if self._best is not None:
            return self._best.keys(state_CD, pairs.view(2, -1))
        return form.outcome(state_CD, content_RW.index_select(0, record_C))


class _Slot:
    """Host memory and events of a batch on its way."""

    def __init__(self, room: BatchBuffer, num_outcomes: int, dtype: torch.dtype):
        """num_outcomes: of each row that is asked for."""
        gpu = torch.device("cuda")
        self.indices = pinned_empty([room.num_indices], torch.int32, gpu)
        self.outcome = pinned_empty([room.num_candidates, num_outcomes], dtype, gpu)
        self.begin, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._views: dict[BatchBuffer, _Views] = {}

    def views(self, room: BatchBuffer) -> "_Views":
        """Made once for each room: on the way of a request they would cost more than the copies."""
        if room not in self._views:
            indices = self.indices[: room.num_indices]
            self._views[room] = _Views(indices, Sections(room, indices.numpy()), self.outcome[: room.num_candidates])
        return self._views[room]


@dataclass(frozen=True, slots=True)
class _Views:
    indices: torch.Tensor
    sections: Sections
    outcome: torch.Tensor


class GraphRunner:
    """Runs models whose backbones know pages."""

    depth: int = 2
    warm_events: int = 4096
    spins: bool = True

    def __init__(self, form: PagedModelAdapter, encoder: PagedEncoder, pool: PagePool, *, max_tokens: int):
        self.form = form
        self.pool = pool
        self._encoder = encoder
        self.row_step = rows_a_wave(form.servable.kept, pool.tensor.device)
        self._layout = layout_of(form, encoder)
        self._most_pages = 32 * -(-form.servable.encoder_config.max_length // pool.page_tokens)
        self._sizes = row_counts(max_tokens)
        self._captured: dict[int, list[CapturedGraph]] = {}
        self._searching: dict[tuple[int, int], CapturedGraph] = {}
        self._memory: Any = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            self._best = _search_of(form)
            self._content_RW = room_for_content(form, self._sizes[-1])
            for size in reversed(self._sizes):  # the largest first: the others fit into its memory
                counts = candidate_counts(size) if form.appends_candidates else _FEW_ASKED
                rooms = [BatchBuffer(size, count, self._most_pages, self._layout) for count in counts]
                self._captured[size] = [CapturedGraph(form, encoder, room, self._content_RW) for room in rooms]
                for captured in reversed(self._captured[size]):
                    captured.capture(self._memory)
                if self._best is not None:
                    for count in reversed(_SEARCHED):
                        self._searches(self._best, size, count)
        most = self._captured[self._sizes[-1]][-1].room
        self._most = most if self._best is None else replace(most, num_pairs=MOST_PAIRS)
        self._slots = deque(self._slot(self._most) for _ in range(self.depth + 1))

    @torch.inference_mode()
    def weights_changed(self) -> None:
        self._encoder.weights_changed()

    @torch.inference_mode()
    def launch(self, parts: Sequence[BatchItem]) -> InFlightBatch:
        rows = RequestRows.of(self.form, parts)
        extent = Extent.of(rows, self.pool.page_tokens)
        searching = self._searching_for(extent) if are_found_inside(parts) else None
        captured = searching or self._captured_for(extent)
        slot = self._next_slot(captured.room)
        views = slot.views(captured.room)
        lay_out(self.pool, rows, views.sections)
        if searching is not None:
            write_pairs([part.candidates for part in parts if part.candidates is not None], views.sections.pairs_2P)
        captured.bring(views.sections, extent.num_records)
        slot.begin.record()  # after the host's part: a device that waits for it is not at work
        found = captured.run(views.indices)
        if self.form.appends_candidates or searching is not None:
            if extent.num_candidates:
                views.outcome.copy_(found, non_blocking=True)
        else:
            found = found.clone()  # the next batch writes over it
        slot.end.record()

        def wait() -> tuple[list[BatchItemScores | None], float]:
            slot.end.synchronize()
            seconds = slot.begin.elapsed_time(slot.end) / 1e3
            if self.form.appends_candidates:
                return _split(parts, views.outcome.numpy()), seconds
            if searching is not None:
                return found_of(parts, views.outcome[: extent.num_candidates]), seconds
            return self._searched(parts, rows, found), seconds

        return InFlightBatch(wait, slot.end.query)

    @torch.inference_mode()
    def _searched(
        self, parts: Sequence[BatchItem], rows: Sequence[RequestRows], states: torch.Tensor
    ) -> list[BatchItemScores | None]:
        """What users are nearest to, by the states of their last events."""
        places = itertools.accumulate((part.num_asked for part in rows), initial=0)
        last = [states[place] if part.num_asked else None for place, part in zip(places, rows, strict=False)]
        return found_by_states(self.form, parts, last)

    def _next_slot(self, room: BatchBuffer) -> _Slot:
        if room.num_indices > self._most.num_indices or room.num_candidates > self._most.num_candidates:
            return self._slot(room)
        self._slots.rotate()  # the one of a batch that has ended, where at most `depth` are on their way
        self._slots[0].end.synchronize()  # whoever launches more waits: its indices may not be written over
        return self._slots[0]

    def _slot(self, room: BatchBuffer) -> _Slot:
        if self.form.appends_candidates:
            return _Slot(room, len(self.form.outputs), torch.float32)
        return _Slot(room, 0 if self._best is None else MOST_BEST, torch.int64)

    def _captured_for(self, extent: Extent) -> CapturedGraph:
        for size in self._sizes[bisect.bisect_left(self._sizes, extent.num_rows) :]:
            for captured in self._captured[size]:
                if captured.room.holds(extent):
                    return captured
        room = BatchBuffer.for_extent(extent, self._layout)
        return CapturedGraph(self.form, self._encoder, room, room_for_content(self.form, room.num_records))

    def _searching_for(self, extent: Extent) -> CapturedGraph | None:
        """The pass that ends with the search; none where that is not captured."""
        if self._best is not None and not self._best.is_current:
            self._searching.clear()
            self._best = _search_of(self.form)
        if self._best is None:
            return None
        for size in self._sizes[bisect.bisect_left(self._sizes, extent.num_rows) :]:
            for count in _SEARCHED:
                if self._room(size, count).holds(extent):
                    return self._searches(self._best, size, count)
        return None

    def _searches(self, best: GraphBest, num_rows: int, num_asked: int) -> CapturedGraph:
        """Captured where it is not yet: after the index has changed its size."""
        if (num_rows, num_asked) not in self._searching:
            room = self._room(num_rows, num_asked)
            captured = CapturedGraph(self.form, self._encoder, room, self._content_RW, best)
            captured.capture(self._memory)
            self._searching[num_rows, num_asked] = captured
        return self._searching[num_rows, num_asked]

    def _room(self, num_rows: int, num_asked: int) -> BatchBuffer:
        return BatchBuffer(num_rows, num_asked, self._most_pages, self._layout, MOST_PAIRS)


def _search_of(form: PagedModelAdapter) -> GraphBest | None:
    """None where parts of the index lie elsewhere, or it is small."""
    index = form.servable.index
    is_there = isinstance(index, DeviceTable) and index.num_rows >= MOST_BEST
    return GraphBest(form) if isinstance(form, RetrievalAdapter) and is_there else None


def room_for_content(form: PagedModelAdapter, num_records: int) -> torch.Tensor | None:
    """(R, D) where a table is behind a cache, which the host asks; none where the graph looks rows up itself."""
    if form.servable.is_resident:
        return None
    one = form.content(form.records(np.zeros((1, form.num_fields), np.int64)))
    return one.new_zeros(num_records, one.shape[1])


def row_counts(max_tokens: int) -> list[int]:
    """Numbers of rows that batches are padded to: steps of an eighth or less from 2048 rows on."""
    counts = [*range(256, 5120, 256), *range(5120, 12288, 512), *range(12288, 16384, 1024), *range(16384, 40960, 2048)]
    return [count for count in counts if count < max_tokens + 2048]


def rows_a_wave(kept: KVCacheSpec, device: torch.device) -> int:
    """Rows for which every multiprocessor has one tile of the widest product of a layer: those are as fast as fewer."""
    tiles = -(-4 * kept.num_heads * kept.head_dim // _TILE_COLUMNS)
    waves = torch.cuda.get_device_properties(device).multi_processor_count // tiles
    return min(_MOST_ROW_STEP, max(1, waves) * _TILE_ROWS)


def candidate_counts(num_rows: int) -> list[int]:
    """Numbers of candidates that batches of so many rows are padded to."""
    return [*(count for count in _CANDIDATES if count < num_rows), num_rows]


def _split(parts: Sequence[BatchItem], scores: NDArray[np.float32]) -> list[BatchItemScores | None]:
    results: list[BatchItemScores | None] = []
    first = 0
    for part in parts:
        if part.candidates is None:
            results.append(None)
            continue
        results.append(BatchItemScores(part.candidates.items, scores[first : first + part.num_candidates].copy()))
        first += part.num_candidates
    return results
