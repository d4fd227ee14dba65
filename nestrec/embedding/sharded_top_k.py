"""Exact top-k search in a sharded table: each shard scores its own rows, and the short result lists are merged.

The table is never gathered and no row is created. Scores are dot products summed in float64 and rounded to float32, so
that they do not depend on the sharding; equal scores are ordered by key, smallest first.

Shapes: B queries, D elements, C rows of a chunk, K best rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.distributed.collectives import all_gather_rows, all_to_all_rows
from nestrec.distributed.topology import Topology
from nestrec.embedding.hashing import hashed_rows, owner_of
from nestrec.embedding.table_config import TableConfig
from nestrec.embedding.table_shard import TableShard
from nestrec.jagged import Jagged
from nestrec.ops.embedding.stochastic_rounding import to_float32

RowTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Candidates = NDArray[np.int64] | range | None
Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]
NO_KEY = -1
_CHUNK_ROWS = 1 << 14
_CHUNK_QUERIES = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKQuery:
    """A top-k query that every shard answers."""

    k: int
    exclude: Jagged | None = None
    """Keys to exclude, one row per query; set on every rank or on none."""
    candidates: Candidates = None
    """Sorted keys to search; None searches every key of a static table and every row of a dynamic table."""
    row_transform: RowTransform | None = None
    """Function from (vectors, keys) to vectors, applied before scoring."""
    needs_rows: bool = True
    """Whether candidates without a row in a dynamic table are skipped; otherwise they have their initial vector."""


def top_k(
    shard: TableShard, topology: Topology, queries_BD: torch.Tensor, query: TopKQuery
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B, k) float32 scores, highest first, and (B, k) int64 keys. Collective.

    If there are fewer than k candidates, scores are padded with -inf and keys with -1.
    """
    all_queries_BD, counts = all_gather_rows(topology.vectors, topology.keys, queries_BD)
    excluded = _gather_excluded(topology, query.exclude)
    scores, keys = _best_of_shard(shard, topology, all_queries_BD, query, excluded)
    num_local = [len(queries_BD)] * topology.num_shards
    scores = all_to_all_rows(topology.vectors, scores, counts, num_local)
    keys = all_to_all_rows(topology.vectors, keys, counts, num_local)
    by_owner = (topology.num_shards, len(queries_BD), query.k)
    lists = [t.view(by_owner).transpose(0, 1).flatten(1) for t in (scores, keys)]
    return _best(lists[0], lists[1], query.k)


def _gather_excluded(topology: Topology, exclude: Jagged | None) -> Pairs | None:
    """Gather the excluded (query index, key) pairs of all ranks."""
    if exclude is None:
        return None
    lengths, _ = all_gather_rows(topology.keys, topology.keys, exclude.lengths().cpu())
    keys, _ = all_gather_rows(topology.keys, topology.keys, exclude.values.cpu())
    return np.repeat(np.arange(len(lengths)), lengths.numpy()), keys.numpy()


def _best_of_shard(
    shard: TableShard, topology: Topology, queries_BD: torch.Tensor, question: TopKQuery, excluded: Pairs | None
) -> tuple[torch.Tensor, torch.Tensor]:
    device = queries_BD.device
    best_scores = torch.full((len(queries_BD), question.k), -torch.inf, device=device)
    best_keys = torch.full((len(queries_BD), question.k), NO_KEY, dtype=torch.int64, device=device)
    queries = queries_BD.double()
    owned = _owned_candidates(shard, topology, question)
    for start in range(0, len(owned), _CHUNK_ROWS):
        keys = owned[start : start + _CHUNK_ROWS]
        keys_C = torch.from_numpy(keys).to(device)
        vectors_CD = to_float32(shard.layout.view(shard.read(stored_keys(shard.table, keys)), "weight").to(device))
        if question.row_transform is not None:
            vectors_CD = question.row_transform(vectors_CD, keys_C)
        masked = _columns_of_excluded(excluded, keys, device)
        for first in range(0, len(queries), _CHUNK_QUERIES):
            query_chunk = slice(first, first + _CHUNK_QUERIES)
            scores_BC = (queries[query_chunk] @ vectors_CD.double().T).float()
            _mask_excluded(scores_BC, masked, first)
            chunk = _best_of_chunk(scores_BC, keys_C, question.k)
            merged = [
                torch.cat(pair, 1)
                for pair in zip((best_scores[query_chunk], best_keys[query_chunk]), chunk, strict=True)
            ]
            best_scores[query_chunk], best_keys[query_chunk] = _best(merged[0], merged[1], question.k)
    return best_scores, best_keys


def owned_keys(table: TableConfig, topology: Topology, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the keys whose rows this rank owns, in the same order."""
    owned: NDArray[np.int64] = keys[owner_of(stored_keys(table, keys), topology.num_shards) == topology.shard]
    return owned


def stored_keys(table: TableConfig, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the keys under which rows are stored; several keys of a hashed table share a row."""
    return hashed_rows(keys, table.num_rows or 1) if table.is_hashed else keys


def _owned_candidates(shard: TableShard, topology: Topology, question: TopKQuery) -> NDArray[np.int64]:
    if question.candidates is None:
        return shard.keys()
    keys = owned_keys(shard.table, topology, np.asarray(question.candidates, np.int64))
    return shard.key_index.filter_readable(keys) if question.needs_rows else keys


def _columns_of_excluded(
    excluded: Pairs | None, keys: NDArray[np.int64], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (sorted query indices, columns) of the excluded pairs in a chunk of sorted keys."""
    if excluded is None:
        return None
    queries, excluded_keys = excluded
    columns = np.minimum(np.searchsorted(keys, excluded_keys), len(keys) - 1)
    is_match = keys[columns] == excluded_keys
    return torch.from_numpy(queries[is_match]).to(device), torch.from_numpy(columns[is_match]).to(device)


def _mask_excluded(scores_BC: torch.Tensor, masked: tuple[torch.Tensor, torch.Tensor] | None, first: int) -> None:
    if masked is None:
        return
    queries, columns = masked
    bounds = torch.tensor([first, first + len(scores_BC)], device=queries.device)
    low, high = torch.searchsorted(queries, bounds).tolist()
    scores_BC[queries[low:high] - first, columns[low:high]] = -torch.inf


def _best_of_chunk(scores_BC: torch.Tensor, keys_C: torch.Tensor, k: int) -> Sequence[torch.Tensor]:
    """Return the k best of sorted keys, in any order; ties at the boundary are resolved to smaller keys."""
    k = min(k, len(keys_C))
    scores_BK, columns_BK = scores_BC.topk(min(k + 1, len(keys_C)), dim=1)
    # topk may pick any of the columns that tie at the boundary; rows with such a tie are sorted stably instead. There
    # is a tie if the score after the boundary equals the one before it; counting equal scores would read all of them.
    has_tie = scores_BK[:, k:] == scores_BK[:, k - 1 : k]
    rows = has_tie.any(1).nonzero().squeeze(1)
    scores_BK, columns_BK = scores_BK[:, :k], columns_BK[:, :k]
    if len(rows):
        ordered, columns = scores_BC[rows].sort(dim=1, descending=True, stable=True)
        scores_BK[rows] = ordered[:, :k]
        columns_BK[rows] = columns[:, :k]
    keys_BK = torch.where(scores_BK == -torch.inf, NO_KEY, keys_C[columns_BK])
    return scores_BK, keys_BK


def _best(scores: torch.Tensor, keys: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first k entries by (highest score, smallest key)."""
    keys, order = keys.sort(dim=1, stable=True)
    scores, again = scores.gather(1, order).sort(dim=1, descending=True, stable=True)
    return scores[:, :k].contiguous(), keys.gather(1, again)[:, :k].contiguous()
