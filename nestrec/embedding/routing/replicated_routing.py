"""Routing of replicated tables, of which every rank stores all rows.

    keys         are broadcast to all ranks, so that every replica updates the same rows
    vectors      are read by the requesting rank from its own replica
    gradients    are sent to the owner of the row, which sums them in the same order as in a sharded table
    sums         are broadcast from the owners to all ranks after the last micro-batch, so that every replica makes the
                 same optimizer step

Results are bitwise identical to a sharded table under every schedule. Compared with a sharded table, no vectors are
transferred, but keys are sent to all ranks, and sums once per step (see nestrec.embedding.table_config).
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
from nestrec.embedding.routing.replica_reduction import GradientBroadcast, pack_rows
from nestrec.embedding.routing.row_exchange import ConcatRows, ExchangeSide
from nestrec.embedding.table_config import RowShapes, TableSpecs
from nestrec.ops.embedding.row_copy import Int32, Int64, scatter_spans

Flags = NDArray[np.bool_]


def destinations(owners: Int32, is_replicated: Flags, num_ranks: int) -> tuple[Int64, Int64]:
    """Return the order in which keys are sent, by rank and then by position, and the number of keys per rank."""
    own, others = np.flatnonzero(~is_replicated), np.flatnonzero(is_replicated)
    keys = np.concatenate([own, np.tile(others, num_ranks)])
    ranks = np.concatenate([owners[own], np.repeat(np.arange(num_ranks, dtype=np.int32), len(others))])
    order = np.lexsort((keys, ranks))
    return keys[order], np.bincount(ranks, minlength=num_ranks).astype(np.int64)


@dataclass(frozen=True, slots=True)
class RemoteKeys:
    """Flags of the own and requested keys of a rank that are exchanged in one direction."""

    own: Flags
    requested: Flags


@dataclass(frozen=True, slots=True)
class ReplicatedRouting:
    """Exchange plan for the keys of replicated tables, which are broadcast to all ranks."""

    vectors: RemoteKeys
    """Keys whose vectors are exchanged; those of replicated tables only from a rank to itself."""
    gradients: RemoteKeys
    """Keys whose gradients are sent to the owner."""


def route_replicated(
    source: DeduplicatedKeys, counts: KeyCounts, records: NDArray[Any], specs: TableSpecs, rank: int
) -> ReplicatedRouting:
    """Build the exchange plan of a batch with keys of replicated tables; `records` are requested from this rank."""
    assert source.is_replicated is not None
    num_ranks = len(counts.sent)
    ranks = np.arange(num_ranks, dtype=np.int32)
    to, by = np.repeat(ranks, counts.sent), np.repeat(ranks, counts.received)
    own_sharded = ~source.is_replicated[counts.order]
    requested_sharded = ~specs.is_replicated_T[segments_of(records) % specs.num_tables]
    owners = owner_of(np.ascontiguousarray(records["key"]), num_ranks)
    return ReplicatedRouting(
        vectors=RemoteKeys(own_sharded | (to == rank), requested_sharded | (by == rank)),
        gradients=RemoteKeys(own_sharded | (to == source.owners[counts.order]), requested_sharded | (owners == rank)),
    )


def gradient_broadcast_sides(
    owned: Sequence[NDArray[np.int64]], specs: TableSpecs, num_ranks: int
) -> tuple[ExchangeSide, ...]:
    """Return per rank the rows of replicated tables whose sums it broadcasts.

    Args:
        owned: Per table the keys of the working set.
        specs: Specs of the tables.
        num_ranks: Number of ranks.
    """
    numbers = np.flatnonzero(specs.is_replicated_T).tolist()
    owners = {t: owner_of(owned[t], num_ranks) for t in numbers}
    sides = []
    for rank in range(num_ranks):
        indices = [np.flatnonzero(owners[t] == rank).astype(np.int32) for t in numbers]
        tables = np.repeat(np.array(numbers, np.int32), [len(rows) for rows in indices])
        sides.append(ExchangeSide(tables, np.concatenate(indices), np.array([len(tables)])))
    return tuple(sides)


def gradient_broadcast_rows(
    sides: tuple[ExchangeSide, ...], shapes: RowShapes, device: torch.device
) -> dict[torch.dtype, GradientBroadcast]:
    """Return the result of `gradient_broadcast_sides` by dtype of the gradients."""
    result = {}
    for dtype in shapes.gradient_types if sides else ():
        is_of_dtype = shapes.has_type[dtype]
        result[dtype] = GradientBroadcast(
            tuple(s.select(is_of_dtype[s.tables]).row_list(shapes.dims, device)[0] for s in sides)
        )
    return result


def broadcast_gradient_sums(ranks: Communicator, rows: GradientBroadcast, sums: ConcatRows) -> int:
    """Broadcast gradient sums from the owners of rows to all ranks; return the bytes sent by this rank. Collective."""
    own_sums = pack_rows(sums, rows.rows[ranks.rank])
    received = gather_rows_from_all(ranks, own_sums, [rank_rows.num_elements for rank_rows in rows.rows])
    for rank, (rank_rows, values) in enumerate(zip(rows.rows, received, strict=True)):
        if rank != ranks.rank:
            scatter_spans(values, rank_rows, sums.elements, sums.spans)
    return (ranks.size - 1) * own_sums.numel() * own_sums.element_size()
