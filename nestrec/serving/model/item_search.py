"""Top-k search of the item index of a retrieval model, in two steps: a search, then exact reranking of its results.

    search         finds the top k rows and some spare rows, by scores in the precision of the index
    reranking      computes inner products in float64, rounded to float32, like evaluation; ties go to the smaller row

`ExactSearch` scores all rows (exact search). `GraphSearch` runs it on a GPU as a CUDA graph: one copy to the device,
one launch, one copy back. Batches are padded to one of a few numbers of queries, results and excluded pairs, and each
combination is captured on first use; larger batches are launched kernel by kernel. `SearchConfig` can select
approximate nearest neighbor (ANN) search on a CPU instead, see `faiss_search`.

Legend: B queries, D elements, N rows of the index (item - 1), K best, P excluded pairs.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Count
from nestrec.base.cuda import capture_cuda_graph, pinned_empty, to_device
from nestrec.ops.embedding.top_k_search import (
    LOWEST_KEY,
    ExcludedPairs,
    IndexRows,
    merge_keys,
    pack_score_keys,
    reference_scores,
    scores_and_rows,
    top_k_keys,
    top_k_keys_reference,
)
from nestrec.serving.model.served_tables import DeviceTable, ServedTable

NUM_SPARE_ROWS = 64
"""Number of rows that a search returns in addition to k, because the reranking can change the order."""
_CHUNK_ROWS = 1 << 15
_CHUNK_QUERIES = 64
"""Queries per chunk on a CPU, so that the scores of a chunk of rows fit into the CPU caches."""
_CHUNK_VECTORS = 1 << 25
"""Maximum number of row elements that are reranked at once."""


@dataclass(frozen=True, slots=True)
class ExcludedRows:
    """Excluded (query, row) pairs, in any order."""

    query_P: NDArray[np.int64]
    row_P: NDArray[np.int64]

    @staticmethod
    def of(items: Sequence[NDArray[np.int64]]) -> "ExcludedRows":
        """Create pairs from the excluded item ids of each query; id 0 (unknown item) is ignored."""
        counts = [len(ids) for ids in items]
        queries = np.repeat(np.arange(len(items)), counts)
        rows = np.concatenate([np.zeros(0, np.int64), *items]) - 1
        return ExcludedRows(queries[rows >= 0], rows[rows >= 0])

    def for_queries(self, first: int, end: int) -> "ExcludedRows":
        """Return the pairs of queries `first` to `end`, renumbered from 0."""
        is_selected = (self.query_P >= first) & (self.query_P < end)
        return ExcludedRows(self.query_P[is_selected] - first, self.row_P[is_selected])

    def to_device(self, device: torch.device) -> ExcludedPairs | None:
        if not len(self.row_P):
            return None
        return ExcludedPairs.of(to_device(self.query_P, device), to_device(self.row_P, device))


class ItemSearch(Protocol):
    """Search of an index by inner product."""

    def best(
        self, queries_BD: torch.Tensor, k: int, excluded: ExcludedRows
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the best rows and their scores on the host, best first, each of shape (B, K) with K at most k.

        Missing results, if too many rows are excluded, are row -1 with score -inf.
        """
        ...


class ExactSearch:
    """Exact search: scores every row, in one fused pass on a GPU. Each shard of an index is searched on its device."""

    def __init__(self, table: ServedTable):
        self._table = table

    def best(
        self, queries_BD: torch.Tensor, k: int, excluded: ExcludedRows
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        if not queries_BD.is_cuda and len(queries_BD) > _CHUNK_QUERIES:
            bounds = range(0, len(queries_BD), _CHUNK_QUERIES)
            chunks = [(queries_BD[b : b + _CHUNK_QUERIES], excluded.for_queries(b, b + _CHUNK_QUERIES)) for b in bounds]
            rows, scores = zip(*(self.best(queries, k, pairs) for queries, pairs in chunks), strict=True)
            return np.concatenate(rows), np.concatenate(scores)
        scores_BK, rows_BK = scores_and_rows(self.best_keys(queries_BD, k, excluded.to_device(queries_BD.device)))
        return rows_BK.cpu().numpy(), scores_BK.cpu().numpy()

    def best_keys(self, queries_BD: torch.Tensor, k: int, pairs: ExcludedPairs | None) -> torch.Tensor:
        """Return packed keys of the best rows by exact scores, best first, on the device, of shape (B, at most k).

        If the complete index is on one GPU, this method can be captured in a CUDA graph.
        """
        count = min(k + NUM_SPARE_ROWS, self._table.num_rows)
        keys = [
            best_of_part(queries_BD.to(part_ND.device), part_ND, start, count, _on(pairs, part_ND.device))
            for start, part_ND in self._table.parts()
        ]
        keys = [part.to(queries_BD.device) for part in keys]  # only after the search was launched on all devices
        rows_BK = scores_and_rows(keys[0] if len(keys) == 1 else merge_keys(keys, count))[1]
        return _ordered_keys(self._table, queries_BD, rows_BK, k)


def _on(pairs: ExcludedPairs | None, device: torch.device) -> ExcludedPairs | None:
    if pairs is None or pairs.row_P.device == device:
        return pairs
    return ExcludedPairs(query_P=pairs.query_P.to(device), row_P=pairs.row_P.to(device))


def best_of_part(
    queries_BD: torch.Tensor, part_ND: torch.Tensor, first: int, k: int, pairs: ExcludedPairs | None
) -> torch.Tensor:
    """Return packed keys of the best rows of a shard that starts at row `first`, of shape (B, at most k)."""
    if part_ND.is_cuda:
        return top_k_keys(queries_BD, IndexRows(rows_ND=part_ND, first=first), k, pairs)
    best_keys = torch.zeros(len(queries_BD), 0, dtype=torch.int64)
    for start in range(0, len(part_ND), _CHUNK_ROWS):
        chunk = IndexRows(rows_ND=part_ND[start : start + _CHUNK_ROWS], first=first + start)
        if best_keys.shape[1] < k:
            chunk_keys = top_k_keys_reference(queries_BD, chunk, k, pairs)
        else:  # few rows of later chunks reach the current k-th score, so filtering is faster than a top-k
            chunk_keys = keys_above(best_keys[:, -1:], reference_scores(queries_BD, chunk, pairs), chunk.first)
        best_keys = merge_keys([best_keys, chunk_keys], k)
    return best_keys


def keys_above(threshold_B1: torch.Tensor, scores_BC: torch.Tensor, first: int) -> torch.Tensor:
    """Return packed keys of the columns that score at least as high as a threshold key.

    The result has shape (B, maximum count of a query), padded with the lowest key.
    """
    is_above = scores_BC >= scores_and_rows(threshold_B1)[0]
    queries, columns = is_above.nonzero(as_tuple=True)
    counts = torch.bincount(queries, minlength=len(scores_BC))
    position = torch.arange(len(queries)) - (counts.cumsum(0) - counts)[queries]
    keys = torch.full((len(scores_BC), int(counts.max()) if len(counts) else 0), LOWEST_KEY)
    keys[queries, position] = pack_score_keys(scores_BC[queries, columns], columns + first)
    return keys


def order_exactly(
    table: ServedTable, queries_BD: torch.Tensor, rows_BK: torch.Tensor, k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Rerank search results by exact scores.

    Args:
        table: The index.
        queries_BD: Query vectors.
        rows_BK: Rows found by the search; -1 for missing ones.
        k: Number of results.

    Returns:
        Rows and scores on the host, each of shape (B, at most k), best first; row -1 for missing results.
    """
    scores_BK, rows_BK = scores_and_rows(_ordered_keys(table, queries_BD, rows_BK, k))
    return rows_BK.cpu().numpy(), scores_BK.cpu().numpy()


def _ordered_keys(table: ServedTable, queries_BD: torch.Tensor, rows_BK: torch.Tensor, k: int) -> torch.Tensor:
    keys = _exact_keys(table, queries_BD, rows_BK)
    return keys.topk(min(k, keys.shape[1]), dim=1).values


def _exact_keys(table: ServedTable, queries_BD: torch.Tensor, rows_BK: torch.Tensor) -> torch.Tensor:
    """Return packed keys of rows with their exact scores, of shape (B, K)."""
    chunk_size = max(1, _CHUNK_VECTORS // max(1, rows_BK.shape[1] * queries_BD.shape[1]))
    keys = [torch.zeros(0, rows_BK.shape[1], dtype=torch.int64, device=queries_BD.device)]
    for start in range(0, len(rows_BK), chunk_size):
        part_BK = rows_BK[start : start + chunk_size]
        ids = part_BK.clamp(min=0).flatten()
        vectors = table.rows(ids if isinstance(table, DeviceTable) else ids.cpu()).to(queries_BD.device)
        vectors_BKD = vectors.double().view(*part_BK.shape, queries_BD.shape[1])  # explicit sizes: K can be 0
        exact = (vectors_BKD @ queries_BD[start : start + chunk_size].double()[:, :, None]).squeeze(2).float()
        keys.append(pack_score_keys(torch.where(part_BK < 0, -torch.inf, exact), part_BK.clamp(min=0)))
    return torch.cat(keys)


_QUERIES = (16, 64)
_BEST = (32, 128, 512, 1024)
_PAIRS = (0, 4096, 65536)


class GraphSearch:
    """Exact search of an unsharded index on one GPU, in CUDA graphs. Thread-safe: a lock serializes searches."""

    def __init__(self, table: DeviceTable):
        self._table = table
        self._eager = ExactSearch(table)
        self._graphs: dict[tuple[int, int, int], _CapturedSearch] = {}
        self._num_rows = table.num_rows
        self._memory = torch.cuda.graph_pool_handle()
        self._lock = threading.Lock()

    def best(
        self, queries_BD: torch.Tensor, k: int, excluded: ExcludedRows
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        needed = ((len(queries_BD), _QUERIES), (k, _BEST), (len(excluded.row_P), _PAIRS))
        sizes = [next((size for size in known if size >= count), -1) for count, known in needed]
        if min(sizes) < 0:
            return self._eager.best(queries_BD, k, excluded)
        size = (sizes[0], sizes[1], sizes[2])
        with self._lock:
            if self._num_rows != self._table.num_rows:  # a published version added items to the catalog
                self._graphs = {}
                self._num_rows = self._table.num_rows
            if size not in self._graphs:
                self._graphs[size] = _CapturedSearch(self._table, queries_BD.dtype, size, self._memory)
            scores_BK, rows_BK = scores_and_rows(self._graphs[size].run(queries_BD, excluded)[:, :k])
        return rows_BK.numpy(), scores_BK.numpy()


class _CapturedSearch:
    """CUDA graph of a search with fixed numbers of queries, results and excluded pairs (`size`)."""

    def __init__(self, table: DeviceTable, dtype: torch.dtype, size: tuple[int, int, int], memory: Any):
        num_queries, self._k, num_pairs = size
        device = table.weight.device
        self._search = ExactSearch(table)
        self._graph = torch.cuda.CUDAGraph()
        self._queries_BD = torch.zeros(num_queries, table.weight.shape[1], dtype=dtype, device=device)
        self._pairs_2P = torch.full((2, num_pairs), -1, device=device)
        self._pinned_pairs_2P = pinned_empty([2, num_pairs], torch.int64, device).fill_(-1)
        self._forward()  # compiles and loads kernels, which is not allowed during a capture
        torch.cuda.synchronize()
        with capture_cuda_graph(self._graph, memory):
            self._keys_BK = self._forward()
        self._host_BK = pinned_empty(self._keys_BK.shape, torch.int64, device)

    def run(self, queries_BD: torch.Tensor, excluded: ExcludedRows) -> torch.Tensor:
        """Return the packed keys on the host, (B, K); they are valid until the next call."""
        self._queries_BD[: len(queries_BD)] = queries_BD
        if self._pinned_pairs_2P.numel():
            self._pinned_pairs_2P[:, len(excluded.row_P) :] = -1  # padding: row -1 does not exist
            self._pinned_pairs_2P[0, : len(excluded.row_P)] = torch.from_numpy(excluded.query_P)
            self._pinned_pairs_2P[1, : len(excluded.row_P)] = torch.from_numpy(excluded.row_P)
            self._pairs_2P.copy_(self._pinned_pairs_2P, non_blocking=True)
        self._graph.replay()
        self._host_BK.copy_(self._keys_BK, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._host_BK[: len(queries_BD)]

    def _forward(self) -> torch.Tensor:
        pairs = ExcludedPairs.of(*self._pairs_2P) if self._pairs_2P.numel() else None
        return self._search.best_keys(self._queries_BD, self._k, pairs)


@config
class SearchConfig:
    """Options of the search of a retrieval index on a CPU: exact, or approximate nearest neighbor (ANN) by faiss."""

    kind: Literal["exact", "faiss_hnsw", "faiss_ivf"] = "exact"
    """Search method on a CPU: exact search, or ANN search with an HNSW graph or IVF lists of faiss. A GPU always uses
    exact search."""
    hnsw_m: Count = 32
    """Number of neighbors per row in the HNSW graph (M)."""
    hnsw_ef_construction: Count = 80
    """Number of rows that are examined to find the neighbors of a new row (HNSW efConstruction)."""
    hnsw_ef_search: Count = 256
    """Number of rows that a search examines (HNSW efSearch); larger values increase recall and latency."""
    ivf_nlist: Count | None = None
    """Number of IVF lists (nlist); none uses four times the square root of the number of items."""
    ivf_nprobe: Count = 32
    """Number of IVF lists that a search examines (nprobe); larger values increase recall and latency."""


@config
class SearchRecall:
    """Recall@k of an ANN search relative to exact search, measured by the export."""

    kind: str
    """Search method: faiss_hnsw or faiss_ivf."""
    recall: float
    """Mean fraction of the exact top k that the ANN search finds."""
    k: int
    """Number of results per query in the measurement."""
    queries: int
    """Number of queries in the measurement."""
    of: str
    """Origin of the queries."""
