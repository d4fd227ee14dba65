"""Keys of tables that every rank holds whole: rows are read where they are asked for, and sums come from one rank.

    keys         told to every rank, so that all of them update the same rows
    vectors      read by the rank that asks, from its own copy
    gradients    to the owner of a row, as those of a sharded table: it adds them in the same order (order of sums)
    sums         from the owners to all others, after the last micro-batch; every copy then makes the same step

So the bits are those of the sharded table, under every schedule. What crosses less are vectors, in every micro-batch;
what crosses more are keys, to all ranks, and the sums, once in a step (nestrec.embedding.placement).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.distributed.collectives import gather_rows_from_all
from nestrec.distributed.topology import Communicator
from nestrec.embedding.hashing import owner_of
from nestrec.embedding.routing.deduplicated_keys import DeduplicatedKeys, KeyCounts, segments_of
from nestrec.embedding.routing.replica_reduction import GradientBroadcast, packed
from nestrec.embedding.routing.row_exchange import ConcatRows, ExchangeSide
from nestrec.embedding.table_config import RowShapes, TableSpecs
from nestrec.ops.embedding.row_copy import Int32, Int64, scatter_spans

Flags = NDArray[np.bool_]


def destinations(owners: Int32, everywhere: Flags, num_ranks: int) -> tuple[Int64, Int64]:
    """Keys in the order in which they are sent, by rank and then as they are, and how many go to each rank."""
    own, others = np.flatnonzero(~everywhere), np.flatnonzero(everywhere)
    keys = np.concatenate([own, np.tile(others, num_ranks)])
    ranks = np.concatenate([owners[own], np.repeat(np.arange(num_ranks, dtype=np.int32), len(others))])
    order = np.lexsort((keys, ranks))
    return keys[order], np.bincount(ranks, minlength=num_ranks).astype(np.int64)


@dataclass(frozen=True, slots=True)
class RemoteKeys:
    """Of the keys that a rank asks for, and of those asked from it: those that cross in one direction."""

    own: Flags
    asked: Flags


@dataclass(frozen=True, slots=True)
class ReplicatedRouting:
    """What crosses of keys that all ranks were told."""

    vectors: RemoteKeys
    """From a rank to itself, of replicated tables."""
    gradients: RemoteKeys
    """To the owner."""


def told_everywhere(
    source: DeduplicatedKeys, counted: KeyCounts, records: NDArray[Any], specs: TableSpecs, rank: int
) -> ReplicatedRouting:
    """Of a batch with keys of replicated tables. records: those asked from this rank."""
    assert source.everywhere is not None
    num_ranks = len(counted.sent)
    ranks = np.arange(num_ranks, dtype=np.int32)
    to, by = np.repeat(ranks, counted.sent), np.repeat(ranks, counted.comes)
    own_sharded = ~source.everywhere[counted.order]
    asked_sharded = ~specs.is_replicated_T[segments_of(records) % specs.num_tables]
    owners = owner_of(np.ascontiguousarray(records["key"]), num_ranks)
    return ReplicatedRouting(
        vectors=RemoteKeys(own_sharded | (to == rank), asked_sharded | (by == rank)),
        gradients=RemoteKeys(own_sharded | (to == source.owners[counted.order]), asked_sharded | (owners == rank)),
    )


def spread_sides(owned: Sequence[NDArray[np.int64]], specs: TableSpecs, num_ranks: int) -> tuple[ExchangeSide, ...]:
    """For each rank the rows of replicated tables whose sums it has. owned: keys of the working set of each table."""
    numbers = np.flatnonzero(specs.is_replicated_T).tolist()
    owners = {t: owner_of(owned[t], num_ranks) for t in numbers}
    sides = []
    for rank in range(num_ranks):
        places = [np.flatnonzero(owners[t] == rank).astype(np.int32) for t in numbers]
        of_table = np.repeat(np.array(numbers, np.int32), [len(rows) for rows in places])
        sides.append(ExchangeSide(of_table, np.concatenate(places), np.array([len(of_table)])))
    return tuple(sides)


def spread_rows(
    sides: tuple[ExchangeSide, ...], shapes: RowShapes, device: torch.device
) -> dict[torch.dtype, GradientBroadcast]:
    """The same by type of the gradients."""
    found = {}
    for dtype in shapes.gradient_types if sides else ():
        chosen = shapes.has_type[dtype]
        found[dtype] = GradientBroadcast(tuple(s.only(chosen[s.tables]).rows(shapes.dims, device)[0] for s in sides))
    return found


def spread_sums(ranks: Communicator, rows: GradientBroadcast, sums: ConcatRows) -> int:
    """Sums of rows from the ranks that have them to all; bytes sent from here. Collective."""
    mine = packed(sums, rows.rows[ranks.rank])
    received = gather_rows_from_all(ranks, mine, [of_rank.num_elements for of_rank in rows.rows])
    for rank, (of_rank, values) in enumerate(zip(rows.rows, received, strict=True)):
        if rank != ranks.rank:
            scatter_spans(values, of_rank, sums.elements, sums.spans)
    return (ranks.size - 1) * mine.numel() * mine.element_size()
