"""All-reduce of sparse row gradients over the replicas of a shard, directly or by reduce-scatter and all-gather.

    direct       each replica sends its gradients to all others (all-gather), and all sum them in order of replica
    scattered    row p is assigned to replica p % R of R, which receives the gradients of the others, sums them in order
                 of replica (reduce-scatter) and sends the sum to all others (all-gather)

Both sum in the same order, so their results are bitwise identical. Every replica knows from the keys how many bytes
each method would send, and the cheaper one is used: n rows that all replicas use cost R (R - 1) n directly and
2 (R - 1) n scattered. With two replicas, or for rows that only one replica uses, the direct method never costs more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nestrec.distributed.collectives import all_to_all_rows, gather_rows_from_all
from nestrec.distributed.topology import Communicator
from nestrec.embedding.routing.row_exchange import ConcatRows, ExchangeSide
from nestrec.embedding.table_config import RowShapes
from nestrec.ops.embedding.row_copy import Int64, RowList, add_spans, gather_spans, scatter_spans

_FEWEST_HOLDERS = 3


@dataclass(frozen=True, slots=True)
class DirectReduction:
    """Plan of a direct all-reduce: each replica sends its rows to all others."""

    rows: tuple[RowList, ...]

    def num_own(self, replica: int) -> int:
        return len(self.rows[replica])


@dataclass(frozen=True, slots=True)
class ScatteredReduction:
    """Plan of an all-reduce by reduce-scatter and all-gather, from the point of view of one replica."""

    sent: RowList
    """Own rows in order of the replica that sums them."""
    sent_sizes: list[int]
    """Number of elements sent to each replica."""
    added: tuple[RowList, ...]
    """Per replica its rows that this replica sums."""
    sums: tuple[RowList, ...]
    """Per replica the rows whose sums it sends to all others."""

    def num_own(self, replica: int) -> int:
        return len(self.sent)


ReplicaRows = DirectReduction | ScatteredReduction
"""Rows whose gradients are all-reduced over the replicas of a shard."""


@dataclass(frozen=True, slots=True)
class GradientBroadcast:
    """Plan of the broadcast of gradient sums of replicated tables: per shard the rows whose sums it sends to all."""

    rows: tuple[RowList, ...]

    def num_own(self, shard: int) -> int:
        return len(self.rows[shard])


ReplicaGradientRows = dict[torch.dtype, ReplicaRows] | dict[torch.dtype, GradientBroadcast]
"""Plans by dtype of the gradients: an all-reduce over the replicas of a shard, or a broadcast for replicated tables."""


def replica_gradient_rows(
    sides: tuple[ExchangeSide, ...], shapes: RowShapes, device: torch.device, replica: int
) -> ReplicaGradientRows:
    """Choose the cheaper all-reduce plan for each gradient dtype; `replica` is the index of this replica."""
    result: dict[torch.dtype, ReplicaRows] = {}
    for dtype in shapes.gradient_types if sides else ():
        chosen = shapes.has_type[dtype]
        own = [side.select(chosen[side.tables]) for side in sides]
        distinct = _distinct(own) if len(own) >= _FEWEST_HOLDERS else []
        if distinct and _scattered_is_less(own, distinct, shapes.dims):
            result[dtype] = _scattered(own, distinct, shapes.dims, device, replica)
        else:
            result[dtype] = DirectReduction(tuple(side.row_list(shapes.dims, device)[0] for side in own))
    return result


def _distinct(sides: Sequence[ExchangeSide]) -> list[ExchangeSide]:
    """Return per replica the unique rows that it sums."""
    numbers = np.unique(np.concatenate([(s.tables.astype(np.int64) << 32) | s.indices for s in sides]))
    indices = (numbers & 0xFFFFFFFF).astype(np.int32)
    all_rows = ExchangeSide((numbers >> 32).astype(np.int32), indices, np.array([len(indices)]))
    return [all_rows.select(indices % len(sides) == r) for r in range(len(sides))]


def _scattered_is_less(sides: Sequence[ExchangeSide], distinct: Sequence[ExchangeSide], widths: Int64) -> bool:
    num_holders = len(sides)
    direct = (num_holders - 1) * sum(int(widths[side.tables].sum()) for side in sides)
    to_others = sum(int(widths[s.tables[s.indices % num_holders != r]].sum()) for r, s in enumerate(sides))
    to_broadcast = (num_holders - 1) * sum(int(widths[side.tables].sum()) for side in distinct)
    return to_others + to_broadcast < direct


def _scattered(
    sides: Sequence[ExchangeSide], distinct: Sequence[ExchangeSide], widths: Int64, device: torch.device, replica: int
) -> ScatteredReduction:
    own = sides[replica]
    num_holders = len(sides)
    reducers = own.indices % num_holders
    order = np.argsort(reducers, kind="stable")
    counts = np.bincount(reducers, minlength=num_holders)
    sent, sizes = ExchangeSide(own.tables[order], own.indices[order], counts).row_list(widths, device)
    added = tuple(side.select(side.indices % num_holders == replica).row_list(widths, device)[0] for side in sides)
    sums = tuple(side.row_list(widths, device)[0] for side in distinct)
    return ScatteredReduction(sent, sizes.tolist(), added, sums)


def reduce_replica_gradients(replicas: Communicator, rows: ReplicaRows, sums: ConcatRows, totals: ConcatRows) -> int:
    """Add the sums of every replica to the totals of all, in order of replica; return the bytes sent. Collective."""
    if isinstance(rows, ScatteredReduction):
        return _sum_scattered(replicas, rows, sums, totals)
    own = pack_rows(sums, rows.rows[replicas.rank])
    received = gather_rows_from_all(replicas, own, [replica_rows.num_elements for replica_rows in rows.rows])
    for replica_rows, values in zip(rows.rows, received, strict=True):
        add_spans(values, replica_rows, totals.elements, totals.spans)  # a replica has each row once
    return (replicas.size - 1) * own.numel() * own.element_size()


def _sum_scattered(replicas: Communicator, rows: ScatteredReduction, sums: ConcatRows, totals: ConcatRows) -> int:
    sizes = [replica_rows.num_elements for replica_rows in rows.added]
    received = all_to_all_rows(replicas, pack_rows(sums, rows.sent), rows.sent_sizes, sizes)
    for replica_rows, values in zip(rows.added, received.split(sizes), strict=True):
        add_spans(values, replica_rows, totals.elements, totals.spans)
    own = pack_rows(totals, rows.sums[replicas.rank])
    all_totals = gather_rows_from_all(replicas, own, [replica_rows.num_elements for replica_rows in rows.sums])
    for replica, (replica_rows, values) in enumerate(zip(rows.sums, all_totals, strict=True)):
        if replica != replicas.rank:
            scatter_spans(values, replica_rows, totals.elements, totals.spans)
    sent = sum(rows.sent_sizes) - rows.sent_sizes[replicas.rank] + (replicas.size - 1) * own.numel()
    return sent * own.element_size()


def pack_rows(table_rows: ConcatRows, rows: RowList) -> torch.Tensor:
    """Return selected rows as one contiguous tensor."""
    result = table_rows.elements.new_empty(rows.num_elements)
    gather_spans(table_rows.elements, table_rows.spans, rows, result)
    return result
