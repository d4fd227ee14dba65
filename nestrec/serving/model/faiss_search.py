"""Approximate nearest neighbor (ANN) search of an index on a CPU: HNSW graphs or IVF lists of faiss.

An export stores the structure that faiss built as plain tensors, which are validated when they are loaded; faiss' own
file format cannot be validated. Results are reranked exactly, like those of every search; the rows that the search
misses reduce `SearchRecall.recall`.

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
from nestrec.serving.model.item_search import (
    NUM_SPARE_ROWS,
    ExactSearch,
    ExcludedRows,
    SearchConfig,
    SearchRecall,
    order_exactly,
)
from nestrec.serving.model.served_tables import DeviceTable

Tensors = Mapping[str, torch.Tensor]
_RECALL_K, _SEED = 100, 0


class FaissSearch:
    """ANN search with the structure that `build_index` returned.

    Args:
        rows_ND: Rows of the index.
        cfg: Search options.
        tensors: The structure, validated before use.

    Raises:
        CorruptFileError: The structure is invalid.
    """

    def __init__(self, rows_ND: torch.Tensor, cfg: SearchConfig, tensors: Tensors):
        self._table = DeviceTable(rows_ND)
        self.cfg = cfg
        self._exact = ExactSearch(self._table)
        faiss = _faiss()
        vectors = _vectors(rows_ND)
        if cfg.kind == "faiss_hnsw":
            self._index = _restore_hnsw(faiss, vectors, cfg, tensors)
            self._parameters = faiss.SearchParametersHNSW(efSearch=cfg.hnsw_ef_search)
        else:
            self._index = _restore_ivf(faiss, vectors, tensors)
            self._parameters = faiss.SearchParametersIVF(nprobe=cfg.ivf_nprobe)

    def best(
        self, queries_BD: torch.Tensor, k: int, excluded: ExcludedRows
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Search as `ItemSearch.best`; queries for which the exclusions leave fewer than k results use exact search."""
        counts = np.bincount(excluded.query_P, minlength=len(queries_BD))
        count = min(k + NUM_SPARE_ROWS + int(counts.max(initial=0)), self._table.num_rows)
        rows_BK = self._index.search(_vectors(queries_BD), count, params=self._parameters)[1]
        pairs = np.unique(excluded.query_P * self._table.num_rows + excluded.row_P)
        numbers = np.arange(len(rows_BK))[:, None] * self._table.num_rows + rows_BK
        rows_BK = np.where(np.isin(numbers, pairs), -1, rows_BK)
        rows, scores = order_exactly(self._table, queries_BD, torch.from_numpy(rows_BK), k)
        short = np.flatnonzero((rows >= 0).sum(1) < np.minimum(rows.shape[1], self._table.num_rows - counts))
        for b in short.tolist():
            query_excluded = ExcludedRows(np.zeros(counts[b], np.int64), excluded.row_P[excluded.query_P == b])
            exact = self._exact.best(queries_BD[b : b + 1], k, query_excluded)
            rows[b] = -1
            scores[b] = -np.inf
            rows[b, : exact[0].shape[1]], scores[b, : exact[0].shape[1]] = exact[0][0], exact[1][0]
        return rows, scores


def build_index(rows_ND: torch.Tensor, cfg: SearchConfig) -> dict[str, torch.Tensor]:
    """Build the ANN structure of an index and return it as tensors, which an export stores."""
    faiss = _faiss()
    vectors = _vectors(rows_ND)
    if cfg.kind == "faiss_hnsw":
        graph = faiss.IndexHNSWFlat(vectors.shape[1], cfg.hnsw_m, faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction = cfg.hnsw_ef_construction
        graph.add(vectors)
        arrays = {name: faiss.vector_to_array(getattr(graph.hnsw, name)) for name in ("neighbors", "levels")}
        return {name: torch.from_numpy(array.astype(np.int32)) for name, array in arrays.items()}
    num_lists = min(len(vectors), cfg.ivf_nlist or max(1, 4 * math.isqrt(len(vectors))))
    clusters = faiss.Kmeans(vectors.shape[1], num_lists, niter=10, spherical=True, seed=_SEED, verbose=False)
    clusters.cp.min_points_per_centroid = 1
    clusters.train(vectors)
    list_N = clusters.index.search(vectors, 1)[1][:, 0].astype(np.int32)
    return {"centroids": torch.from_numpy(clusters.centroids.copy()), "lists": torch.from_numpy(list_N)}


def measure_recall(search: FaissSearch, rows_ND: torch.Tensor, queries_BD: torch.Tensor, source: str) -> SearchRecall:
    """Measure the recall of an ANN search relative to exact search.

    Args:
        search: The ANN search.
        rows_ND: Rows of the index.
        queries_BD: Query vectors.
        source: Origin of the queries, for the report.
    """
    k = min(_RECALL_K, len(rows_ND))
    no_exclusions = ExcludedRows.of([])
    approximate = search.best(queries_BD, k, no_exclusions)[0]
    exact = ExactSearch(DeviceTable(rows_ND)).best(queries_BD, k, no_exclusions)[0]
    recalls = [len(np.intersect1d(a, b)) / k for a, b in zip(approximate, exact, strict=True)]
    mean = float(np.mean(recalls)) if recalls else 0.0
    return SearchRecall(kind=search.cfg.kind, recall=round(mean, 5), k=k, queries=len(queries_BD), of=source)


def _restore_hnsw(faiss: Any, vectors: NDArray[np.float32], cfg: SearchConfig, tensors: Tensors) -> Any:
    graph = faiss.IndexHNSWFlat(vectors.shape[1], cfg.hnsw_m, faiss.METRIC_INNER_PRODUCT)
    levels, neighbors = (tensors[name].numpy().astype(np.int32) for name in ("levels", "neighbors"))
    table = faiss.vector_to_array(graph.hnsw.cum_nneighbor_per_level)
    _check(len(levels) == len(vectors), "levels")
    _check(bool((levels >= 1).all() and (levels < len(table)).all()), "levels")
    offsets = np.concatenate([[0], np.cumsum(table[levels])]).astype(np.uint64)
    _check(len(neighbors) == int(offsets[-1]), "neighbors")
    _check(bool((neighbors >= -1).all() and (neighbors < len(vectors)).all()), "neighbors")
    # Neighbors at a level must have that level themselves; otherwise a search would read out of bounds.
    for level in range(1, int(levels.max(initial=1))):
        owners = np.flatnonzero(levels > level)
        positions = offsets[owners].astype(np.int64)[:, None] + np.arange(table[level], table[level + 1])
        level_neighbors = neighbors[positions]
        _check(bool((levels[level_neighbors[level_neighbors >= 0]] > level).all()), "neighbors")
    graph.storage.add(vectors)
    graph.ntotal = len(vectors)
    for name, array in (("neighbors", neighbors), ("levels", levels), ("offsets", offsets)):
        faiss.copy_array_to_vector(array, getattr(graph.hnsw, name))
    graph.hnsw.max_level = int(levels.max(initial=1)) - 1
    graph.hnsw.entry_point = int(np.argmax(levels)) if len(levels) else -1
    return graph


def _restore_ivf(faiss: Any, vectors: NDArray[np.float32], tensors: Tensors) -> Any:
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


def _check(is_valid: bool, name: str) -> None:
    if not is_valid:
        raise CorruptFileError(
            "the tensor is not a valid search structure of this index",
            option="search",
            value=name,
            remedy="export the run again",
        )


def _faiss() -> Any:
    faiss = import_extra(
        "faiss",
        "faiss",
        "requires faiss, which is not installed",
        field="search.kind",
        value="faiss",
        instead=", or export with --search.kind exact",
    )
    faiss.omp_set_num_threads(torch.get_num_threads())
    return faiss
