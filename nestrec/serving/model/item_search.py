"""The best of the catalogue for a batch of queries: a first choice by a search, then the exact order among it.

    first choice   the k best and some more, by scores in the index's own precision
    exact order    products summed in float64 and rounded to float32, as evaluation has them; equal ones by smaller row

Legend: B queries, D elements, N rows of the index (item - 1), K best, P excluded pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.transfer import to_device
from nestrec.ops.rows.best import (
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
from nestrec.serving.model.tables import ResidentTable, ServedTable

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
        queries, rows = np.repeat(np.arange(len(items)), counts), np.concatenate([np.zeros(0, np.int64), *items]) - 1
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
        vectors = table.rows(places if isinstance(table, ResidentTable) else places.cpu()).to(queries_BD.device)
        vectors_BKD = vectors.double().view(*part_BK.shape, queries_BD.shape[1])  # also where no row is left
        exact = (vectors_BKD @ queries_BD[start : start + most].double()[:, :, None]).squeeze(2).float()
        keys.append(packed(torch.where(part_BK < 0, -torch.inf, exact), part_BK.clamp(min=0)))
    return torch.cat(keys)
