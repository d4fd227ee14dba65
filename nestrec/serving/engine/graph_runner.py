"""Runs batches on a GPU with CUDA graphs over the paged KV cache: one copy to the device, one graph, one copy back.

Batches are padded to buckets, pairs of a number of rows and a number of candidates, and one graph is captured per
bucket. The graph of a ranking model computes everything from ids to scores.

For a retrieval model, the graph also contains the item search if all requests of a batch ask for the best items of the
catalog, for few enough items and with few enough exclusions. Other batches use a graph that ends with the states, and
the search follows outside the graph.

Nothing here waits for the device except `InFlightBatch.wait`. Everything runs on one stream, so batches stay in order
and may share buffers.

Legend: T rows of the batch, C query rows, R records, D model width, F fields of a record, K best, P excluded pairs.
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

from nestrec.base.cuda import capture_cuda_graph, pinned_empty
from nestrec.models.cached.paged_batch import PagedBatch, PagedLayers
from nestrec.models.sequence import KVCacheSpec
from nestrec.ops.attention.paged.query_blocks import FIELDS
from nestrec.ops.embedding.top_k_search import ExcludedPairs, scores_and_rows
from nestrec.ops.layers.token_rows import token_rows
from nestrec.serving.engine.batch_layout import BatchBuffer, Extent, Layout, RequestRows, Sections, lay_out
from nestrec.serving.engine.reference_runner import BatchItem, BatchItemScores, InFlightBatch, score_by_states
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.model.item_search import ExactSearch
from nestrec.serving.model.model_adapter import PagedModelAdapter
from nestrec.serving.model.request_inputs import Candidates
from nestrec.serving.model.retrieval_adapter import RetrievalAdapter, trim_results
from nestrec.serving.model.served_tables import DeviceTable

MAX_BEST, MAX_PAIRS = 128, 8192
"""Maximum number of best items per request, and of excluded (query, item) pairs per batch, in a captured search."""


class GraphSearch:
    """Item search that can be captured in a graph, over an index that is entirely on the model's device."""

    def __init__(self, adapter: RetrievalAdapter):
        assert isinstance(adapter.servable.index, DeviceTable)
        self._adapter = adapter
        self._table = adapter.servable.index
        self._num_rows = self._table.num_rows
        self._search = ExactSearch(self._table)

    @property
    def num_best(self) -> int:
        """Number of best items to find (K)."""
        return min(MAX_BEST, self._num_rows)

    @property
    def is_current(self) -> bool:
        """Whether the captured search covers the current index, which grows if the model follows an online training."""
        return self._adapter.servable.index is self._table and self._table.num_rows == self._num_rows

    def keys(self, state_CD: torch.Tensor, pairs_2P: torch.Tensor) -> torch.Tensor:
        """Return the (C, K) packed keys of the rows with the best exact scores, best first."""
        pairs = ExcludedPairs.of(*pairs_2P.long())
        return self._search.best_keys(self._adapter.query(state_CD), self.num_best, pairs)


def can_search_in_graph(items: Sequence[BatchItem]) -> bool:
    """Return whether the captured search supports all requests of a batch."""
    searches = [item.candidates for item in items if item.candidates is not None]
    return (
        bool(searches)
        and all(0 < search.num_best <= MAX_BEST and search.allowed is None for search in searches)
        and all(item.tokens.length for item in items)
        and sum(len(search.excluded) for search in searches) <= MAX_PAIRS
    )


def write_pairs(searches: Sequence[Candidates], pairs_2P: NDArray[np.int32]) -> None:
    """Write the excluded items of each request; the rest of `pairs_2P` is filled with -1."""
    counts = np.array([len(search.excluded) for search in searches], np.int64)
    _write_pairs(counts, np.concatenate([search.excluded for search in searches]), pairs_2P)


@njit(cache=True)  # keeps the GIL: reacquiring it would take longer than the loop
def _write_pairs(counts: NDArray[np.int64], items: NDArray[np.int64], pairs: NDArray[np.int32]) -> None:
    position = count = 0
    for query in range(len(counts)):
        for _ in range(counts[query]):
            if items[position] > 0:  # 0 means an unknown item
                pairs[0, count] = query
                pairs[1, count] = items[position] - 1
                count += 1
            position += 1
    pairs[:, count:] = -1


def results_of_keys(items: Sequence[BatchItem], keys_CK: torch.Tensor) -> list[BatchItemScores | None]:
    """Return the items that each request found, from packed keys in host memory."""
    scores_CK, rows_CK = (unpacked.numpy() for unpacked in scores_and_rows(keys_CK))
    results: list[BatchItemScores | None] = []
    query = 0
    for item in items:
        if item.candidates is None:
            results.append(None)
            continue
        results.append(BatchItemScores(*trim_results(rows_CK[query], scores_CK[query], item.candidates.num_best)))
        query += 1
    return results


_CANDIDATES = (0, 512, 1024)
"""Buckets of the number of candidates, in addition to the number of rows."""

_RETRIEVAL_QUERIES = (0, 64)
"""Buckets of the number of query rows for retrieval models, which have one per user."""
_SEARCH_QUERIES = (16, 64)
"""Buckets of the number of query rows for graphs that contain the search."""
_TILE_ROWS, _TILE_COLUMNS = 256, 128
"""Tile size of a matrix product on a Hopper GPU."""
_MAX_ROW_STEP = 1024


class PagedEncoder(Protocol):
    """Protocol of a backbone over the paged KV cache (`nestrec.models.cached.paged_batch`)."""

    pages: PagedLayers

    def refresh_weights(self) -> None:
        """Refresh derived values in place after the model's weights changed; captured graphs read the same memory."""
        ...

    def forward(self, x_TD: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Return the (C, D) states of the query rows."""
        ...


def layout_of(adapter: PagedModelAdapter, encoder: PagedEncoder) -> Layout:
    """Return the array layout that all batches of a model share."""
    return Layout(
        num_fields=adapter.num_fields,
        tokens_per_event=adapter.tokens_per_event,
        visible=encoder.pages.visible_ranges,
        last_visible=encoder.pages.last_visible_range,
        num_heads=adapter.servable.cache_spec.num_heads,
        has_times=adapter.servable.reads_times,
        num_prefix_tokens=len(adapter.servable.prefix_columns),
    )


class CapturedGraph:
    """CUDA graph of one bucket: the forward pass for a padded number of rows and of candidates."""

    def __init__(
        self,
        adapter: PagedModelAdapter,
        encoder: PagedEncoder,
        buffer: BatchBuffer,
        content_RW: torch.Tensor | None = None,
        best: GraphSearch | None = None,
    ):
        """Allocate the device buffers; `capture` captures the graph.

        Args:
            adapter: Adapter of the model.
            encoder: Backbone over pages.
            buffer: Size of the bucket.
            content_RW: Buffer for record embeddings, if the host copies them to the device before the graph runs.
            best: Item search at the end of the graph, if any.
        """
        self._adapter = adapter
        self._encoder = encoder
        self.buffer = buffer
        self._content_RW = content_RW
        self._best = best
        self._indices = torch.zeros(buffer.num_indices, dtype=torch.int32, device=adapter.servable.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._scores: torch.Tensor | None = None

    def capture(self, memory: Any) -> None:
        sections = self._indices.split(list(self.buffer.sizes))
        sections[4].fill_(-1)  # no row is written to the KV cache
        sections[-1].fill_(-1)  # no item is excluded
        self._forward()  # compiles and loads kernels, which is not allowed during capture
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with capture_cuda_graph(self._graph, memory):
            self._scores = self._forward()

    def run(self, packed: torch.Tensor) -> torch.Tensor:
        """Run the batch.

        Returns:
            (C, outputs) scores, (C, D) states, or (C, K) packed keys of the best items; valid until the next batch.
        """
        self._indices.copy_(packed, non_blocking=True)
        if self._graph is None or self._scores is None:
            return self._forward()
        self._graph.replay()
        return self._scores

    def copy_content(self, sections: Sections, num_records: int) -> None:
        """Copy the embeddings of the batch's records to the device, if a table is not on the device."""
        if self._content_RW is not None:
            records = self._adapter.records(sections.records_FR[:, :num_records].T.astype(np.int64))
            self._content_RW[:num_records] = self._adapter.content(records)

    def _forward(self) -> torch.Tensor:
        adapter = self._adapter
        encoder = cast(Any, self._adapter.encoder)
        layout = self.buffer.layout
        sections = self._indices.split(list(self.buffer.sizes))
        time_T, query_time_T = (words.view(torch.float64) if layout.has_times else None for words in sections[:2])
        token_T, position_T, slot_T, blocks, last_blocks, pages, row_C, record_C, records, pairs = sections[2:]
        records_FR = records.view(layout.num_fields, -1)
        content_RW = adapter.content(records_FR.long().T) if self._content_RW is None else self._content_RW
        x_TD = token_rows(
            content_RW[:, : encoder.cfg.dim].contiguous(),  # interaction features may follow
            records_FR[-1 if layout.num_fields == 1 else 1],
            adapter.action_vectors,
            encoder.position,
            token_T,
            position_T,
            factor=encoder.cfg.dim**0.5,
        )
        batch = PagedBatch(
            slot_T=slot_T,
            blocks=blocks.view(len(layout.visible), -1, FIELDS).unbind(),
            last_blocks=last_blocks.view(-1, FIELDS),
            pages=pages,
            row_C=row_C,
            time_T=time_T,
            query_time_T=query_time_T,
        )
        state_CD = self._encoder.forward(x_TD, batch)
        if self._best is not None:
            return self._best.keys(state_CD, pairs.view(2, -1))
        return adapter.outcome(state_CD, content_RW.index_select(0, record_C))


class _Slot:
    """Pinned host memory and CUDA events of a batch in flight."""

    def __init__(self, buffer: BatchBuffer, num_outcomes: int, dtype: torch.dtype):
        gpu = torch.device("cuda")
        self.indices = pinned_empty([buffer.num_indices], torch.int32, gpu)
        self.outcome = pinned_empty([buffer.num_candidates, num_outcomes], dtype, gpu)
        self.begin, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._views: dict[BatchBuffer, _Views] = {}

    def views(self, buffer: BatchBuffer) -> "_Views":
        """Return cached views for a buffer size: creating them per batch would cost more than the copies."""
        if buffer not in self._views:
            indices = self.indices[: buffer.num_indices]
            self._views[buffer] = _Views(
                indices, Sections(buffer, indices.numpy()), self.outcome[: buffer.num_candidates]
            )
        return self._views[buffer]


@dataclass(frozen=True, slots=True)
class _Views:
    indices: torch.Tensor
    sections: Sections
    outcome: torch.Tensor


class GraphRunner:
    """Runs models whose backbones support the paged KV cache, with CUDA graphs."""

    depth: int = 2
    warm_events: int = 4096
    spins: bool = True

    def __init__(self, adapter: PagedModelAdapter, encoder: PagedEncoder, pool: PagePool, *, max_tokens: int):
        self.adapter = adapter
        self.pool = pool
        self._encoder = encoder
        self.row_step = rows_per_wave(adapter.servable.cache_spec, pool.tensor.device)
        self._layout = layout_of(adapter, encoder)
        self._max_pages = 32 * -(-adapter.servable.encoder_config.max_length // pool.page_tokens)
        self._sizes = row_counts(max_tokens)
        self._captured: dict[int, list[CapturedGraph]] = {}
        self._search_graphs: dict[tuple[int, int], CapturedGraph] = {}
        self._memory: Any = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            self._best = _search_of(adapter)
            self._content_RW = content_buffer(adapter, self._sizes[-1])
            for size in reversed(self._sizes):  # largest first: the other graphs reuse its memory
                counts = candidate_counts(size) if adapter.appends_candidates else _RETRIEVAL_QUERIES
                buffers = [BatchBuffer(size, count, self._max_pages, self._layout) for count in counts]
                self._captured[size] = [CapturedGraph(adapter, encoder, buffer, self._content_RW) for buffer in buffers]
                for captured in reversed(self._captured[size]):
                    captured.capture(self._memory)
                if self._best is not None:
                    for count in reversed(_SEARCH_QUERIES):
                        self._search_graph(self._best, size, count)
        largest = self._captured[self._sizes[-1]][-1].buffer
        self._largest = largest if self._best is None else replace(largest, num_pairs=MAX_PAIRS)
        self._slots = deque(self._slot(self._largest) for _ in range(self.depth + 1))

    @torch.inference_mode()
    def weights_changed(self) -> None:
        self._encoder.refresh_weights()

    @torch.inference_mode()
    def launch(self, items: Sequence[BatchItem]) -> InFlightBatch:
        rows = RequestRows.of(self.adapter, items)
        extent = Extent.of(rows, self.pool.page_tokens)
        searching = self._search_graph_for(extent) if can_search_in_graph(items) else None
        captured = searching or self._captured_for(extent)
        slot = self._next_slot(captured.buffer)
        views = slot.views(captured.buffer)
        lay_out(self.pool, rows, views.sections)
        if searching is not None:
            write_pairs([item.candidates for item in items if item.candidates is not None], views.sections.pairs_2P)
        captured.copy_content(views.sections, extent.num_records)
        slot.begin.record()  # after the host's work, during which the device may be idle
        outcome = captured.run(views.indices)
        if self.adapter.appends_candidates or searching is not None:
            if extent.num_candidates:
                views.outcome.copy_(outcome, non_blocking=True)
        else:
            outcome = outcome.clone()  # the next batch overwrites it
        slot.end.record()

        def wait() -> tuple[list[BatchItemScores | None], float]:
            slot.end.synchronize()
            seconds = slot.begin.elapsed_time(slot.end) / 1e3
            if self.adapter.appends_candidates:
                return _split(items, views.outcome.numpy()), seconds
            if searching is not None:
                return results_of_keys(items, views.outcome[: extent.num_candidates]), seconds
            return self._search(items, rows, outcome), seconds

        return InFlightBatch(wait, slot.end.query)

    @torch.inference_mode()
    def _search(
        self, items: Sequence[BatchItem], rows: Sequence[RequestRows], states: torch.Tensor
    ) -> list[BatchItemScores | None]:
        """Score or search items outside the graph, from the states of the users' last events."""
        indices = itertools.accumulate((item.num_queries for item in rows), initial=0)
        last = [states[index] if item.num_queries else None for index, item in zip(indices, rows, strict=False)]
        return score_by_states(self.adapter, items, last)

    def _next_slot(self, buffer: BatchBuffer) -> _Slot:
        if buffer.num_indices > self._largest.num_indices or buffer.num_candidates > self._largest.num_candidates:
            return self._slot(buffer)
        self._slots.rotate()  # the slot of a batch that has ended, if at most `depth` batches are in flight
        self._slots[0].end.synchronize()  # a caller that launches more must wait before the indices are overwritten
        return self._slots[0]

    def _slot(self, buffer: BatchBuffer) -> _Slot:
        if self.adapter.appends_candidates:
            return _Slot(buffer, len(self.adapter.outputs), torch.float32)
        return _Slot(buffer, 0 if self._best is None else MAX_BEST, torch.int64)

    def _captured_for(self, extent: Extent) -> CapturedGraph:
        for size in self._sizes[bisect.bisect_left(self._sizes, extent.num_rows) :]:
            for captured in self._captured[size]:
                if captured.buffer.has_capacity_for(extent):
                    return captured
        buffer = BatchBuffer.for_extent(extent, self._layout)
        return CapturedGraph(self.adapter, self._encoder, buffer, content_buffer(self.adapter, buffer.num_records))

    def _search_graph_for(self, extent: Extent) -> CapturedGraph | None:
        """Return the graph with the search for a batch, or None if there is no such graph."""
        if self._best is not None and not self._best.is_current:
            self._search_graphs.clear()
            self._best = _search_of(self.adapter)
        if self._best is None:
            return None
        for size in self._sizes[bisect.bisect_left(self._sizes, extent.num_rows) :]:
            for count in _SEARCH_QUERIES:
                if self._search_buffer(size, count).has_capacity_for(extent):
                    return self._search_graph(self._best, size, count)
        return None

    def _search_graph(self, best: GraphSearch, num_rows: int, num_queries: int) -> CapturedGraph:
        """Return a graph with the search, capturing it first if necessary: the index may have changed its size."""
        if (num_rows, num_queries) not in self._search_graphs:
            buffer = self._search_buffer(num_rows, num_queries)
            captured = CapturedGraph(self.adapter, self._encoder, buffer, self._content_RW, best)
            captured.capture(self._memory)
            self._search_graphs[num_rows, num_queries] = captured
        return self._search_graphs[num_rows, num_queries]

    def _search_buffer(self, num_rows: int, num_queries: int) -> BatchBuffer:
        return BatchBuffer(num_rows, num_queries, self._max_pages, self._layout, MAX_PAIRS)


def _search_of(adapter: PagedModelAdapter) -> GraphSearch | None:
    """Return the captured search, or None if the index is small or not entirely on the device."""
    index = adapter.servable.index
    is_on_device = isinstance(index, DeviceTable) and index.num_rows >= MAX_BEST
    return GraphSearch(adapter) if isinstance(adapter, RetrievalAdapter) and is_on_device else None


def content_buffer(adapter: PagedModelAdapter, num_records: int) -> torch.Tensor | None:
    """Return an (R, D) buffer for embeddings that the host looks up, or None if the graph looks them up itself."""
    if adapter.servable.is_resident:
        return None
    sample = adapter.content(adapter.records(np.zeros((1, adapter.num_fields), np.int64)))
    return sample.new_zeros(num_records, sample.shape[1])


def row_counts(max_tokens: int) -> list[int]:
    """Return the buckets of the number of rows; from 2048 rows on, they grow by at most an eighth."""
    counts = [*range(256, 5120, 256), *range(5120, 12288, 512), *range(12288, 16384, 1024), *range(16384, 40960, 2048)]
    return [count for count in counts if count < max_tokens + 2048]


def rows_per_wave(spec: KVCacheSpec, device: torch.device) -> int:
    """Return the number of rows that fill the multiprocessors of a GPU with one wave of tiles.

    It refers to the widest matrix product of a layer; fewer rows take as long.
    """
    tiles = -(-4 * spec.num_heads * spec.head_dim // _TILE_COLUMNS)
    waves = torch.cuda.get_device_properties(device).multi_processor_count // tiles
    return min(_MAX_ROW_STEP, max(1, waves) * _TILE_ROWS)


def candidate_counts(num_rows: int) -> list[int]:
    """Return the buckets of the number of candidates for batches of `num_rows` rows."""
    return [*(count for count in _CANDIDATES if count < num_rows), num_rows]


def _split(items: Sequence[BatchItem], scores: NDArray[np.float32]) -> list[BatchItemScores | None]:
    results: list[BatchItemScores | None] = []
    first = 0
    for item in items:
        if item.candidates is None:
            results.append(None)
            continue
        results.append(BatchItemScores(item.candidates.items, scores[first : first + item.num_candidates].copy()))
        first += item.num_candidates
    return results
