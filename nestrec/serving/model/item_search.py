"""The best of the catalogue for a batch of queries: a first choice by a search, then the exact order among it.

    first choice   the k best and some more, by scores in the index's own precision
    exact order    products summed in float64 and rounded to float32, as evaluation has them; equal ones by smaller row

Legend: B queries, D elements, N rows of the index (item - 1), K best, P excluded pairs.

The exact search of a GPU as captured graphs: one copy there, one launch, one copy back.

Batches are padded to one of a few numbers of queries, of best rows and of excluded pairs; for each triple everything
from queries to ordered keys is captured when it is first asked for. What is larger is launched kernel by kernel.

Legend: B queries, D elements, K best, P excluded pairs.

How the index of a retrieval model is searched on a CPU, and what that finds.
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
from nestrec.base.cuda import capturing, pinned_empty, to_device
from nestrec.ops.embedding.top_k_search import (
    NOTHING,
    ExcludedPairs,
    IndexRows,
    best_keys,
    best_keys_reference,
    merged_keys,
    packed,
    reference_scores,
    scores_and_rows,
)
from nestrec.serving.model.served_tables import DeviceTable, ServedTable

SPARE = 64
"""rows of the first choice beyond those that are asked for: they may change places in the exact order"""
_CHUNK_ROWS = 1 << 15
_CHUNK_QUERIES = 64
"""on a CPU: scores of more of them with a chunk of rows leave its caches"""
_CHUNK_VECTORS = 1 << 25
"""elements of rows that are ordered exactly at once"""


@dataclass(frozen=True, slots=True)
class Excluded:
    """(query, row) pairs that may not be chosen, in any order."""

    query_P: NDArray[np.int64]
    row_P: NDArray[np.int64]

    @staticmethod
    def of(items: Sequence[NDArray[np.int64]]) -> "Excluded":
        """Item ids for each query; 0, which is no item, is left out."""
        counts = [len(one) for one in items]
        queries = np.repeat(np.arange(len(items)), counts)
        rows = np.concatenate([np.zeros(0, np.int64), *items]) - 1
        return Excluded(queries[rows >= 0], rows[rows >= 0])

    def of_queries(self, first: int, end: int) -> "Excluded":
        """Those of some queries, counted from the first of them."""
        is_own = (self.query_P >= first) & (self.query_P < end)
        return Excluded(self.query_P[is_own] - first, self.row_P[is_own])

    def on(self, device: torch.device) -> ExcludedPairs | None:
        if not len(self.row_P):
            return None
        return ExcludedPairs.of(to_device(self.query_P, device), to_device(self.row_P, device))


class ItemSearch(Protocol):
    """Finds rows of an index."""

    def best(
        self, queries_BD: torch.Tensor, k: int, excluded: Excluded
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(B, K) rows and scores on the host, best first, K at most k; -1 and -inf where fewer were left."""
        ...


class ExactSearch:
    """Looks at every row, in one fused pass on a GPU. Parts of an index are searched where they lie."""

    def __init__(self, table: ServedTable):
        self._table = table

    def best(
        self, queries_BD: torch.Tensor, k: int, excluded: Excluded
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        if not queries_BD.is_cuda and len(queries_BD) > _CHUNK_QUERIES:
            bounds = range(0, len(queries_BD), _CHUNK_QUERIES)
            pieces = [(queries_BD[b : b + _CHUNK_QUERIES], excluded.of_queries(b, b + _CHUNK_QUERIES)) for b in bounds]
            rows, scores = zip(*(self.best(queries, k, own) for queries, own in pieces), strict=True)
            return np.concatenate(rows), np.concatenate(scores)
        scores_BK, rows_BK = scores_and_rows(self.best_keys(queries_BD, k, excluded.on(queries_BD.device)))
        return rows_BK.cpu().numpy(), scores_BK.cpu().numpy()

    def best_keys(self, queries_BD: torch.Tensor, k: int, pairs: ExcludedPairs | None) -> torch.Tensor:
        """(B, at most k) keys by exact scores, best first, on the device. Captured by a graph where all lies on it."""
        count = min(k + SPARE, self._table.num_rows)
        keys = [
            best_of_part(queries_BD.to(part_ND.device), part_ND, start, count, _on(pairs, part_ND.device))
            for start, part_ND in self._table.parts()
        ]
        keys = [found.to(queries_BD.device) for found in keys]  # after all devices have begun
        rows_BK = scores_and_rows(keys[0] if len(keys) == 1 else merged_keys(keys, count))[1]
        return _ordered_keys(self._table, queries_BD, rows_BK, k)


def _on(pairs: ExcludedPairs | None, device: torch.device) -> ExcludedPairs | None:
    if pairs is None or pairs.row_P.device == device:
        return pairs
    return ExcludedPairs(query_P=pairs.query_P.to(device), row_P=pairs.row_P.to(device))


def best_of_part(
    queries_BD: torch.Tensor, part_ND: torch.Tensor, first: int, k: int, pairs: ExcludedPairs | None
) -> torch.Tensor:
    """(B, at most k) keys of the rows of a part, which begins with row `first`."""
    if part_ND.is_cuda:
        return best_keys(queries_BD, IndexRows(rows_ND=part_ND, first=first), k, pairs)
    found = torch.zeros(len(queries_BD), 0, dtype=torch.int64)
    for start in range(0, len(part_ND), _CHUNK_ROWS):
        chunk = IndexRows(rows_ND=part_ND[start : start + _CHUNK_ROWS], first=first + start)
        if found.shape[1] < k:
            fresh = best_keys_reference(queries_BD, chunk, k, pairs)
        else:  # of further chunks hardly any row is as good as the last of those found
            fresh = keys_above(found[:, -1:], reference_scores(queries_BD, chunk, pairs), chunk.first)
        found = merged_keys([found, fresh], k)
    return found


def keys_above(border_B1: torch.Tensor, scores_BC: torch.Tensor, first: int) -> torch.Tensor:
    """(B, most of a query) keys of columns that score at least as much as a key; filled up with what is below all."""
    is_above = scores_BC >= scores_and_rows(border_B1)[0]
    queries, columns = is_above.nonzero(as_tuple=True)
    counts = torch.bincount(queries, minlength=len(scores_BC))
    place = torch.arange(len(queries)) - (counts.cumsum(0) - counts)[queries]
    keys = torch.full((len(scores_BC), int(counts.max()) if len(counts) else 0), NOTHING)
    keys[queries, place] = packed(scores_BC[queries, columns], columns + first)
    return keys


def exactly_ordered(
    table: ServedTable, queries_BD: torch.Tensor, rows_BK: torch.Tensor, k: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(B, at most k) rows and scores on the host of a first choice, -1 where there is none."""
    scores_BK, rows_BK = scores_and_rows(_ordered_keys(table, queries_BD, rows_BK, k))
    return rows_BK.cpu().numpy(), scores_BK.cpu().numpy()


def _ordered_keys(table: ServedTable, queries_BD: torch.Tensor, rows_BK: torch.Tensor, k: int) -> torch.Tensor:
    keys = _exact_keys(table, queries_BD, rows_BK)
    return keys.topk(min(k, keys.shape[1]), dim=1).values


def _exact_keys(table: ServedTable, queries_BD: torch.Tensor, rows_BK: torch.Tensor) -> torch.Tensor:
    """(B, K) keys of rows by their exact scores."""
    most = max(1, _CHUNK_VECTORS // max(1, rows_BK.shape[1] * queries_BD.shape[1]))
    keys = [torch.zeros(0, rows_BK.shape[1], dtype=torch.int64, device=queries_BD.device)]
    for start in range(0, len(rows_BK), most):
        part_BK = rows_BK[start : start + most]
        places = part_BK.clamp(min=0).flatten()
        vectors = table.rows(places if isinstance(table, DeviceTable) else places.cpu()).to(queries_BD.device)
        vectors_BKD = vectors.double().view(*part_BK.shape, queries_BD.shape[1])  # also where no row is left
        exact = (vectors_BKD @ queries_BD[start : start + most].double()[:, :, None]).squeeze(2).float()
        keys.append(packed(torch.where(part_BK < 0, -torch.inf, exact), part_BK.clamp(min=0)))
    return torch.cat(keys)


_QUERIES = (16, 64)
_BEST = (32, 128, 512, 1024)
_PAIRS = (0, 4096, 65536)


class GraphSearch:
    """An index that lies whole on a GPU. Threads take turns."""

    def __init__(self, table: DeviceTable):
        self._table = table
        self._plain = ExactSearch(table)
        self._graphs: dict[tuple[int, int, int], _Captured] = {}
        self._num_rows = table.num_rows
        self._memory = torch.cuda.graph_pool_handle()
        self._lock = threading.Lock()

    def best(
        self, queries_BD: torch.Tensor, k: int, excluded: Excluded
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        needed = ((len(queries_BD), _QUERIES), (k, _BEST), (len(excluded.row_P), _PAIRS))
        sizes = [next((size for size in known if size >= count), -1) for count, known in needed]
        if min(sizes) < 0:
            return self._plain.best(queries_BD, k, excluded)
        size = (sizes[0], sizes[1], sizes[2])
        with self._lock:
            if self._num_rows != self._table.num_rows:  # a model that follows a run has learnt of new items
                self._graphs = {}
                self._num_rows = self._table.num_rows
            if size not in self._graphs:
                self._graphs[size] = _Captured(self._table, queries_BD.dtype, size, self._memory)
            scores_BK, rows_BK = scores_and_rows(self._graphs[size].run(queries_BD, excluded)[:, :k])
        return rows_BK.numpy(), scores_BK.numpy()


class _Captured:
    def __init__(self, table: DeviceTable, dtype: torch.dtype, size: tuple[int, int, int], memory: Any):
        """size: queries, best rows, excluded pairs"""
        num_queries, self._k, num_pairs = size
        device = table.weight.device
        self._search = ExactSearch(table)
        self._graph = torch.cuda.CUDAGraph()
        self._queries_BD = torch.zeros(num_queries, table.weight.shape[1], dtype=dtype, device=device)
        self._pairs_2P = torch.full((2, num_pairs), -1, device=device)
        self._sent_2P = pinned_empty([2, num_pairs], torch.int64, device).fill_(-1)
        self._forward()  # compiles and loads what a capture may not
        torch.cuda.synchronize()
        with capturing(self._graph, memory):
            self._keys_BK = self._forward()
        self._host_BK = pinned_empty(self._keys_BK.shape, torch.int64, device)

    def run(self, queries_BD: torch.Tensor, excluded: Excluded) -> torch.Tensor:
        """(B, K) keys on the host; valid until the next batch."""
        self._queries_BD[: len(queries_BD)] = queries_BD
        if self._sent_2P.numel():
            self._sent_2P[:, len(excluded.row_P) :] = -1  # rows that there are none of
            self._sent_2P[0, : len(excluded.row_P)] = torch.from_numpy(excluded.query_P)
            self._sent_2P[1, : len(excluded.row_P)] = torch.from_numpy(excluded.row_P)
            self._pairs_2P.copy_(self._sent_2P, non_blocking=True)
        self._graph.replay()
        self._host_BK.copy_(self._keys_BK, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._host_BK[: len(queries_BD)]

    def _forward(self) -> torch.Tensor:
        pairs = ExcludedPairs.of(*self._pairs_2P) if self._pairs_2P.numel() else None
        return self._search.best_keys(self._queries_BD, self._k, pairs)


@config
class SearchConfig:
    kind: Literal["exact", "faiss_hnsw", "faiss_ivf"] = "exact"
    """how the index of a retrieval model is searched on a CPU: every row, or by a graph or lists of faiss; a GPU looks
    at every row"""
    links: Count = 32
    """of a row in the graph (hnsw)"""
    build_width: Count = 80
    """rows that are looked at for the links of a new one (hnsw)"""
    width: Count = 256
    """rows that a search keeps in view (hnsw); more finds more"""
    lists: Count | None = None
    """into which rows are divided (ivf); none: four times the root of their number"""
    probes: Count = 32
    """lists that a search looks into (ivf); more finds more"""


@config
class SearchRecall:
    """What the search of an export finds of what a look at every row finds."""

    kind: str
    """faiss_hnsw or faiss_ivf"""
    recall: float
    """mean share of the k best that is found"""
    k: int
    """of the measurement"""
    queries: int
    """of the measurement"""
    of: str
    """whose queries they are"""
