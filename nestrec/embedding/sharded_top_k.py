"""The best rows of a sharded table for each query: owners score their own rows, and short lists are merged.

The table is never gathered and no row is created. Scores are dot products summed in float64 and rounded to float32,
so that they do not depend on how rows are sharded; equal scores are ordered by smaller key.

Shapes: B queries, D elements, C rows of a chunk, K best.
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
from nestrec.ops.embedding.stochastic_rounding import whole

RowTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Candidates = NDArray[np.int64] | range | None
Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]
NO_KEY = -1
_CHUNK_ROWS = 1 << 14
_CHUNK_QUERIES = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKQuery:
    """What is asked of every shard."""

    k: int
    exclude: Jagged | None = None
    """Keys that do not count, a row for each query; given on every rank or on none."""
    candidates: Candidates = None
    """Sorted keys that count; none: every key of a static table, every row of a dynamic one."""
    row_transform: RowTransform | None = None
    """(vectors, keys) to vectors, applied before scoring."""
    needs_rows: bool = True
    """Candidates without a row of a dynamic table do not count; else they count with their initial vector."""


def top_k(
    shard: TableShard, topology: Topology, queries_BD: torch.Tensor, question: TopKQuery
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, k) float32 scores, highest first, and (B, k) int64 keys. Collective.

    Where fewer than k rows count, scores end in -inf and keys in -1.
    """
    everyone, counts = all_gather_rows(topology.vectors, topology.keys, queries_BD)
    excluded = _gather_excluded(topology, question.exclude)
    scores, keys = _best_of_shard(shard, topology, everyone, question, excluded)
    mine = [len(queries_BD)] * topology.num_shards
    scores = all_to_all_rows(topology.vectors, scores, counts, mine)
    keys = all_to_all_rows(topology.vectors, keys, counts, mine)
    by_owner = (topology.num_shards, len(queries_BD), question.k)
    lists = [t.view(by_owner).transpose(0, 1).flatten(1) for t in (scores, keys)]
    return _best(lists[0], lists[1], question.k)


def _gather_excluded(topology: Topology, exclude: Jagged | None) -> Pairs | None:
    """(query number, key) pairs over the queries of all ranks."""
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
        vectors_CD = whole(shard.layout.view(shard.read(stored_keys(shard.table, keys)), "weight").to(device))
        if question.row_transform is not None:
            vectors_CD = question.row_transform(vectors_CD, keys_C)
        hidden = _places_of_excluded(excluded, keys, device)
        for first in range(0, len(queries), _CHUNK_QUERIES):
            part = slice(first, first + _CHUNK_QUERIES)
            scores_BC = (queries[part] @ vectors_CD.double().T).float()
            _hide(scores_BC, hidden, first)
            chunk = _best_of_chunk(scores_BC, keys_C, question.k)
            merged = [torch.cat(pair, 1) for pair in zip((best_scores[part], best_keys[part]), chunk, strict=True)]
            best_scores[part], best_keys[part] = _best(merged[0], merged[1], question.k)
    return best_scores, best_keys


def owned_keys(table: TableConfig, topology: Topology, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those whose rows this rank owns, in their order."""
    owned: NDArray[np.int64] = keys[owner_of(stored_keys(table, keys), topology.num_shards) == topology.shard]
    return owned


def stored_keys(table: TableConfig, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Under which the rows of keys are stored: that of several keys is the same in a hashed table."""
    return hashed_rows(keys, table.num_rows or 1) if table.is_hashed else keys


def _owned_candidates(shard: TableShard, topology: Topology, question: TopKQuery) -> NDArray[np.int64]:
    if question.candidates is None:
        return shard.keys()
    keys = owned_keys(shard.table, topology, np.asarray(question.candidates, np.int64))
    return shard.residency.only_readable(keys) if question.needs_rows else keys


def _places_of_excluded(
    excluded: Pairs | None, keys: NDArray[np.int64], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(query numbers, sorted; columns) of the excluded pairs that lie in a chunk of sorted keys."""
    if excluded is None:
        return None
    queries, wanted = excluded
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found = keys[places] == wanted
    return torch.from_numpy(queries[found]).to(device), torch.from_numpy(places[found]).to(device)


def _hide(scores_BC: torch.Tensor, hidden: tuple[torch.Tensor, torch.Tensor] | None, first: int) -> None:
    if hidden is None:
        return
    queries, columns = hidden
    bounds = torch.tensor([first, first + len(scores_BC)], device=queries.device)
    low, high = torch.searchsorted(queries, bounds).tolist()
    scores_BC[queries[low:high] - first, columns[low:high]] = -torch.inf


def _best_of_chunk(scores_BC: torch.Tensor, keys_C: torch.Tensor, k: int) -> Sequence[torch.Tensor]:
    """The k best of sorted keys, in any order, with ties at the border given to smaller keys."""
    k = min(k, len(keys_C))
    scores_BK, columns_BK = scores_BC.topk(min(k + 1, len(keys_C)), dim=1)
    # topk is free to pick any of the columns that tie at the border; where it had a choice, a stable sort decides. It
    # had one where the score behind the border is that of the border: to count the equal ones would read all scores.
    had_choice = scores_BK[:, k:] == scores_BK[:, k - 1 : k]
    rows = had_choice.any(1).nonzero().squeeze(1)
    scores_BK, columns_BK = scores_BK[:, :k], columns_BK[:, :k]
    if len(rows):
        ordered, columns = scores_BC[rows].sort(dim=1, descending=True, stable=True)
        scores_BK[rows] = ordered[:, :k]
        columns_BK[rows] = columns[:, :k]
    keys_BK = torch.where(scores_BK == -torch.inf, NO_KEY, keys_C[columns_BK])
    return scores_BK, keys_BK


def _best(scores: torch.Tensor, keys: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first k by (highest score, smallest key)."""
    keys, order = keys.sort(dim=1, stable=True)
    scores, again = scores.gather(1, order).sort(dim=1, descending=True, stable=True)
    return scores[:, :k].contiguous(), keys.gather(1, again)[:, :k].contiguous()
