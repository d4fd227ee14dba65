"""A search that does not look at every row, for indexes on a CPU: graphs (HNSW) or lists (IVF) of faiss.

What faiss has built is kept as plain tensors, checked before they are handed back to it: its own files would have to be
trusted. Rows that it finds are put into the exact order like those of any first choice; rows that it misses are what
`recall` counts.

Legend: B queries, D elements, N rows of the index, K best, L lists.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import CorruptFileError
from nestrec.base.lazy import import_extra
from nestrec.serving.model.item_search import SPARE, ExactSearch, Excluded, SearchConfig, SearchRecall, exactly_ordered
from nestrec.serving.model.served_tables import DeviceTable

Tensors = Mapping[str, torch.Tensor]
_RECALL_K, _SEED = 100, 0


class FaissSearch:
    """Rows by the structure that `built` gave."""

    def __init__(self, rows_ND: torch.Tensor, cfg: SearchConfig, tensors: Tensors):
        self._table = DeviceTable(rows_ND)
        self.cfg = cfg
        self._exact = ExactSearch(self._table)
        faiss = _faiss()
        vectors = _vectors(rows_ND)
        if cfg.kind == "faiss_hnsw":
            self._index = _restored_graph(faiss, vectors, cfg, tensors)
            self._how = faiss.SearchParametersHNSW(efSearch=cfg.width)
        else:
            self._index = _restored_lists(faiss, vectors, tensors)
            self._how = faiss.SearchParametersIVF(nprobe=cfg.probes)

    def best(
        self, queries_BD: torch.Tensor, k: int, excluded: Excluded
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Whoever has too much excluded to be left with k rows gets those of the exact search."""
        counts = np.bincount(excluded.query_P, minlength=len(queries_BD))
        count = min(k + SPARE + int(counts.max(initial=0)), self._table.num_rows)
        rows_BK = self._index.search(_vectors(queries_BD), count, params=self._how)[1]
        pairs = np.unique(excluded.query_P * self._table.num_rows + excluded.row_P)
        numbers = np.arange(len(rows_BK))[:, None] * self._table.num_rows + rows_BK
        rows_BK = np.where(np.isin(numbers, pairs), -1, rows_BK)
        rows, scores = exactly_ordered(self._table, queries_BD, torch.from_numpy(rows_BK), k)
        short = np.flatnonzero((rows >= 0).sum(1) < np.minimum(rows.shape[1], self._table.num_rows - counts))
        for b in short.tolist():
            own = Excluded(np.zeros(counts[b], np.int64), excluded.row_P[excluded.query_P == b])
            found = self._exact.best(queries_BD[b : b + 1], k, own)
            rows[b] = -1
            scores[b] = -np.inf
            rows[b, : found[0].shape[1]], scores[b, : found[0].shape[1]] = found[0][0], found[1][0]
        return rows, scores


def built(rows_ND: torch.Tensor, cfg: SearchConfig) -> dict[str, torch.Tensor]:
    """The structure of an index, to be written."""
    faiss = _faiss()
    vectors = _vectors(rows_ND)
    if cfg.kind == "faiss_hnsw":
        graph = faiss.IndexHNSWFlat(vectors.shape[1], cfg.links, faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction = cfg.build_width
        graph.add(vectors)
        arrays = {name: faiss.vector_to_array(getattr(graph.hnsw, name)) for name in ("neighbors", "levels")}
        return {name: torch.from_numpy(array.astype(np.int32)) for name, array in arrays.items()}
    num_lists = min(len(vectors), cfg.lists or max(1, 4 * math.isqrt(len(vectors))))
    clusters = faiss.Kmeans(vectors.shape[1], num_lists, niter=10, spherical=True, seed=_SEED, verbose=False)
    clusters.cp.min_points_per_centroid = 1
    clusters.train(vectors)
    list_N = clusters.index.search(vectors, 1)[1][:, 0].astype(np.int32)
    return {"centroids": torch.from_numpy(clusters.centroids.copy()), "lists": torch.from_numpy(list_N)}


def measured_recall(search: FaissSearch, rows_ND: torch.Tensor, queries_BD: torch.Tensor, of: str) -> SearchRecall:
    """of: whose queries they are"""
    k = min(_RECALL_K, len(rows_ND))
    nothing = Excluded.of([])
    found = search.best(queries_BD, k, nothing)[0]
    wanted = ExactSearch(DeviceTable(rows_ND)).best(queries_BD, k, nothing)[0]
    shares = [len(np.intersect1d(a, b)) / k for a, b in zip(found, wanted, strict=True)]
    mean = float(np.mean(shares)) if shares else 0.0
    return SearchRecall(kind=search.cfg.kind, recall=round(mean, 5), k=k, queries=len(queries_BD), of=of)


def _restored_graph(faiss: Any, vectors: NDArray[np.float32], cfg: SearchConfig, tensors: Tensors) -> Any:
    graph = faiss.IndexHNSWFlat(vectors.shape[1], cfg.links, faiss.METRIC_INNER_PRODUCT)
    levels, neighbors = (tensors[name].numpy().astype(np.int32) for name in ("levels", "neighbors"))
    table = faiss.vector_to_array(graph.hnsw.cum_nneighbor_per_level)
    _check(len(levels) == len(vectors), "levels")
    _check(bool((levels >= 1).all() and (levels < len(table)).all()), "levels")
    offsets = np.concatenate([[0], np.cumsum(table[levels])]).astype(np.uint64)
    _check(len(neighbors) == int(offsets[-1]), "neighbors")
    _check(bool((neighbors >= -1).all() and (neighbors < len(vectors)).all()), "neighbors")
    # A link of some level leads to rows that have that level, or a search would read beyond what they have.
    for level in range(1, int(levels.max(initial=1))):
        owners = np.flatnonzero(levels > level)
        places = offsets[owners].astype(np.int64)[:, None] + np.arange(table[level], table[level + 1])
        there = neighbors[places]
        _check(bool((levels[there[there >= 0]] > level).all()), "neighbors")
    graph.storage.add(vectors)
    graph.ntotal = len(vectors)
    for name, array in (("neighbors", neighbors), ("levels", levels), ("offsets", offsets)):
        faiss.copy_array_to_vector(array, getattr(graph.hnsw, name))
    graph.hnsw.max_level = int(levels.max(initial=1)) - 1
    graph.hnsw.entry_point = int(np.argmax(levels)) if len(levels) else -1
    return graph


def _restored_lists(faiss: Any, vectors: NDArray[np.float32], tensors: Tensors) -> Any:
    centroids = _vectors(tensors["centroids"])
    lists = tensors["lists"].numpy().astype(np.int64)
    _check(len(lists) == len(vectors) and centroids.shape[1] == vectors.shape[1], "lists")
    _check(bool((lists >= 0).all() and (lists < len(centroids)).all()), "lists")
    coarse = faiss.IndexFlatIP(vectors.shape[1])
    coarse.add(centroids)
    index = faiss.IndexIVFFlat(coarse, vectors.shape[1], len(centroids), faiss.METRIC_INNER_PRODUCT)
    coarse.this.disown()
    index.own_fields = index.is_trained = True
    numbers = np.arange(len(vectors))
    index.add_core(len(vectors), faiss.swig_ptr(vectors), faiss.swig_ptr(numbers), faiss.swig_ptr(lists))
    return index


def _vectors(rows_ND: torch.Tensor) -> NDArray[np.float32]:
    return np.ascontiguousarray(rows_ND.float().cpu().numpy())


def _check(holds: bool, name: str) -> None:
    if not holds:
        raise CorruptFileError("is no such structure of the index", option="search", value=name, remedy="export again")


def _faiss() -> Any:
    faiss = import_extra(
        "faiss",
        "faiss",
        "needs faiss, which is not installed",
        field="search.kind",
        value="faiss",
        instead=", or export with --search.kind exact",
    )
    faiss.omp_set_num_threads(torch.get_num_threads())
    return faiss
