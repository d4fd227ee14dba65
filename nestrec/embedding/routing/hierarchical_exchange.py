"""Hierarchical all-to-all: rows are sent between hosts once for all ranks of a host.

    rank            role
    requesting      requests the rows of shard s from rank s % L of its own host, which has L ranks (the relaying rank)
    relaying        requests the unique keys of all ranks of its host from shard s; distributes the received vectors to
                    the requesting ranks; sums their gradients in order of rank
    owner           receives requests from one source per host, in order of host

Vectors and gradients therefore take two exchanges each, one of them inside the host. Gradients are summed in order of
rank on a host, then in order of host. This order is the same in every schedule, so the results of all schedules are
bitwise identical to `serial`. Without hosts, gradients are summed in order of rank, which agrees up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.embedding.routing.deduplicated_keys import (
    ERROR_WORDS,
    DeduplicatedKeys,
    KeyCounts,
    KeyRows,
    count_unique_keys,
    field_of,
    own_key_rows,
    plan_window_cache,
    requested_key_rows,
    segments_of,
)
from nestrec.embedding.routing.row_exchange import (
    ConcatRows,
    ExchangeSide,
    RowExchange,
    allocate_gradients,
    allocate_vectors,
    by_value,
    gradient_exchanges,
    split_by_piece,
    vector_exchange,
)
from nestrec.embedding.table_config import RowShapes, TableConfig
from nestrec.ops.embedding.dedup_host import dedup_segments
from nestrec.ops.embedding.row_copy import Int32, Int64, add_spans


@dataclass(frozen=True, slots=True)
class IntraHostKeys:
    """Keys of a batch that are exchanged inside a host."""

    source: DeduplicatedKeys
    """Keys that this rank requests from other hosts on behalf of all ranks of its host."""
    own: KeyRows
    """Every key that this rank requests, in the order sent."""
    requested: KeyRows
    """Every key that ranks of this host request through this rank, in the order received; indices refer to the rows of
    `source`."""


@dataclass(frozen=True, slots=True)
class IntraHostExchange:
    """Exchanges inside a host with one micro-batch."""

    vectors: RowExchange
    gradients: dict[torch.dtype, RowExchange]


@dataclass(slots=True)
class _RelayBuffers:
    """Buffers of the relaying rank, allocated on first use."""

    vectors: ConcatRows | None = None
    sums: dict[torch.dtype, ConcatRows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HierarchicalExchange:
    """Hierarchical exchange of a batch: the exchanges inside the host and the buffers of the relaying rank."""

    keys: IntraHostKeys
    micro_batches: tuple[IntraHostExchange, ...]
    gradient_sides: list[tuple[ExchangeSide, ExchangeSide]]
    """Per micro-batch the gradients of all dtypes that are sent after it, own and requested."""
    num_rows: NDArray[np.int64]
    """(micro-batch, table) number of rows on the relaying rank; with the window cache the same in all micro-batches,
    because a row keeps its index."""
    _buffers: _RelayBuffers = field(default_factory=_RelayBuffers)

    @property
    def has_window_cache(self) -> bool:
        """Whether rows are retained from micro-batch to micro-batch."""
        return self.keys.source.windows is not None

    def portion(self, micro_batches: tuple[IntraHostExchange, ...]) -> "HierarchicalExchange":
        """Return an exchange of a portion of the rows that uses the same buffers."""
        return replace(self, micro_batches=micro_batches)

    def vectors(self, micro_batch: int, shapes: RowShapes, device: torch.device) -> ConcatRows:
        """Return the buffer for the vectors of a micro-batch."""
        vectors = self._buffers.vectors if self.has_window_cache else None
        if vectors is None:
            vectors = self._buffers.vectors = allocate_vectors(self.num_rows[micro_batch], shapes, device)
        return vectors

    def add(
        self, micro_batch: int, dtype: torch.dtype, pieces: Sequence[torch.Tensor], shapes: RowShapes
    ) -> ConcatRows:
        """Add the gradients received from the ranks of this host, in order of rank; return the sums."""
        row_exchange = self.micro_batches[micro_batch].gradients[dtype]
        sums = self._buffers.sums.get(dtype) if self.has_window_cache else None
        if sums is None:
            sums = allocate_gradients(dtype, self.num_rows[micro_batch], shapes, pieces[0].device)
            self._buffers.sums[dtype] = sums
        for piece, rows in split_by_piece(pieces, row_exchange.requested_rows, row_exchange.requested.counts):
            add_spans(piece, rows, sums.elements, sums.spans, row_exchange.groups if len(pieces) == 1 else None)
        return sums


def check_full_precision(tables: Sequence[TableConfig]) -> None:
    """Check that no table sends rows in half precision.

    A row that one rank of a host requests in half precision and another in full precision would have the same
    precision for both.

    Raises:
        UserError: If a table has half-precision features.
    """
    for table in tables:
        if table.half_precision_features:
            raise UserError(
                f"not supported for table {table.name!r}, which has features in half precision",
                option="parallel.hierarchical_all_to_all",
                value=True,
                remedy="disable it, or remove task.negatives.lookup_dtype",
            )


def aggregate_host_keys(
    source: DeduplicatedKeys, records: NDArray[Any], counts: KeyCounts, num_shards: int, ranks_of_host: int
) -> IntraHostKeys:
    """Aggregate the keys that the ranks of a host request through this rank. Local.

    Args:
        source: Keys of this rank's batch.
        records: Records received in the exchange inside the host.
        counts: Splits of the exchange inside the host.
        num_shards: Number of shards.
        ranks_of_host: Number of ranks per host.
    """
    num_tables = source.num_tables
    num_micro_batches = source.num_micro_batches
    last = field_of(records, "last")
    segments = segments_of(records)
    keys = np.ascontiguousarray(records["key"])
    if last is not None:  # a key is used from its first to its last use by any rank
        keys, segments = np.tile(keys, 2), np.concatenate([segments, _used_last(last, segments, num_tables)])
    order, segment_counts = by_value(segments.astype(np.int32), num_tables * num_micro_batches)
    bounds = np.concatenate([[0], np.cumsum(segment_counts)])
    indices = np.empty(len(keys), np.int32)
    if last is None:
        distinct = dedup_segments(keys[order], bounds, num_shards)
        plans = None
        indices[order] = distinct.inverse
    else:
        distinct, plans = plan_window_cache(keys[order], bounds, num_tables, num_shards)
        cache_indices = [
            plans[s % num_tables].cache_indices[s // num_tables][distinct.inverse_of(s)] for s in range(len(bounds) - 1)
        ]
        indices[order] = np.concatenate(cache_indices)
    owners = distinct.owners(num_shards) // np.int32(ranks_of_host)
    no_shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(num_micro_batches)]
    between = DeduplicatedKeys(no_shapes, num_tables, distinct, owners, {}, plans, None, [0] * ERROR_WORDS)
    requested = requested_key_rows(records, indices[: len(records)], counts.received, num_tables)
    return IntraHostKeys(between, own_key_rows(source, counts), requested)


def _used_last(last: NDArray[np.int16], segments: Int32, num_tables: int) -> Int32:
    """Return the last segment that uses each key."""
    return last.astype(np.int32) * num_tables + segments % num_tables


def plan_hierarchical_exchange(keys: IntraHostKeys, shapes: RowShapes, device: torch.device) -> HierarchicalExchange:
    """Build the exchanges inside the host for each micro-batch. Local."""
    num_micro_batches = keys.source.num_micro_batches
    windows = keys.source.windows
    num_rows = count_unique_keys(keys.source)
    if windows is not None:
        num_rows = np.tile(np.array([plan.num_rows for plan in windows], np.int64), (num_micro_batches, 1))
    vector_sides = _sides(keys, by_last=False)
    gradient_sides = vector_sides if windows is None else _sides(keys, by_last=True)
    exchanges = tuple(
        intra_host_exchange(vector_sides[p], gradient_sides[p], num_rows[p], shapes, device)
        for p in range(num_micro_batches)
    )
    return HierarchicalExchange(keys, exchanges, gradient_sides, num_rows)


def _sides(keys: IntraHostKeys, *, by_last: bool) -> list[tuple[ExchangeSide, ExchangeSide]]:
    both = (rows.sides(keys.source.num_micro_batches, by_last=by_last) for rows in (keys.own, keys.requested))
    return list(zip(*both, strict=True))


def intra_host_exchange(
    vector_sides: tuple[ExchangeSide, ExchangeSide],
    gradient_sides: tuple[ExchangeSide, ExchangeSide],
    num_rows: Int64,
    shapes: RowShapes,
    device: torch.device,
) -> IntraHostExchange:
    """Return the exchanges of a micro-batch inside the host.

    Args:
        vector_sides: Own and requested rows whose vectors are exchanged.
        gradient_sides: Own and requested rows whose gradients are exchanged.
        num_rows: Number of rows of each table on the relaying rank.
        shapes: Shapes of the rows.
        device: Device of the rows.
    """
    vectors = vector_exchange(*vector_sides, shapes, device, is_in_order=False)
    return IntraHostExchange(vectors, gradient_exchanges(*gradient_sides, shapes, num_rows, device, is_in_order=False))


def intra_host_flags(exchange: HierarchicalExchange, between: KeyRows, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the flag of each key requested through this rank.

    Args:
        exchange: Hierarchical exchange of the batch.
        between: Keys that this rank requests from other hosts.
        flags: Flags of `between`.
    """
    requested = exchange.keys.requested
    num_tables = exchange.num_rows.shape[1]
    first = np.concatenate([[0], np.cumsum(exchange.num_rows.reshape(-1))])

    def number(rows: KeyRows) -> Int64:
        part = 0 if exchange.has_window_cache else rows.micro_batches.astype(np.int64)
        row_numbers: Int64 = first[part * num_tables + rows.tables] + rows.indices
        return row_numbers

    known = np.zeros(first[-1], np.bool_)
    known[number(between)] = flags
    return known[number(requested)]
