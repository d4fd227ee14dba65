"""Key routing (the input dist of TorchRec): sends the keys of a batch to the owners of their rows by all-to-all.

Routing is collective over the shards of a replica group: every rank routes the same number of micro-batches, including
empty ones. With several replica groups, the replicas of a shard join their keys (see replica_key_union). A local step
precedes and follows the exchange, so that a pipeline can run each of them on its own lane. The owner deduplicates the
keys of all ranks again.

Two messages carry all keys of all tables and micro-batches: the number of keys per rank (the splits), and the keys with
their segments (micro-batch and table). Their cost depends on the number of keys and ranks, not on the number of tables.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.cuda import record_stream_use, to_device
from nestrec.base.errors import BatchError
from nestrec.distributed.collectives import all_gather_equal, all_to_all_fixed, all_to_all_rows
from nestrec.distributed.topology import Communicator, Topology
from nestrec.embedding.routing.deduplicated_keys import (
    ERROR_WORDS,
    DeduplicatedKeys,
    FeatureKeys,
    KeyCounts,
    KeyRows,
    count_unique_keys,
    deduplicate,
    encode_key_records,
    field_of,
    own_key_rows,
    requested_key_rows,
    segments_of,
)
from nestrec.embedding.routing.hierarchical_exchange import (
    HierarchicalExchange,
    IntraHostKeys,
    aggregate_host_keys,
    plan_hierarchical_exchange,
)
from nestrec.embedding.routing.replica_key_union import JoinedKeys, ReplicaKeyUnion
from nestrec.embedding.routing.replica_reduction import ReplicaGradientRows, replica_gradient_rows
from nestrec.embedding.routing.replicated_routing import (
    RemoteKeys,
    ReplicatedRouting,
    destinations,
    gradient_broadcast_rows,
    gradient_broadcast_sides,
    route_replicated,
)
from nestrec.embedding.routing.row_exchange import (
    ExchangeSide,
    RowExchange,
    by_value,
    gradient_exchanges,
    vector_exchange,
)
from nestrec.embedding.table_config import RowShapes, TableSpecs
from nestrec.ops.embedding.dedup_host import dedup_segments
from nestrec.ops.embedding.row_copy import Int32, Int64, RowList


@dataclass(frozen=True, slots=True)
class RoutedMicroBatch:
    """Exchange plan of one micro-batch."""

    index: dict[str, torch.Tensor]
    """Feature name to the inverse indices of its keys: an int32 tensor, in the shape of the keys, of indices into the
    unique keys of the micro-batch."""
    num_rows: Int64
    """Number of unique keys of each table."""
    vectors: RowExchange
    """Exchange of the vectors received for this micro-batch: of all its unique keys, or with the window cache of those
    that no earlier micro-batch uses."""
    gradients: dict[torch.dtype, RowExchange]
    """Exchange of the gradients sent after this micro-batch, by dtype."""
    cached_rows: tuple[RowList, dict[torch.dtype, RowList]] | None
    """Window cache rows of its unique keys, table by table: as vectors, and as gradients of each dtype. None without
    the window cache."""
    replica_rows: ReplicaGradientRows
    """Rows whose gradients are reduced over the replicas after this micro-batch, by dtype; empty if there are none."""
    replica_sides: tuple[ExchangeSide, ...] = ()
    """Rows of `replica_rows` of all dtypes, per replica."""


@dataclass(frozen=True, slots=True)
class RoutedKeys:
    """Exchange plan of a batch of one or more micro-batches."""

    micro_batches: tuple[RoutedMicroBatch, ...]
    owned: dict[str, NDArray[np.int64]]
    """Table name to the unique keys of the batch that this shard owns, in the order of the working set."""
    num_cache_rows: Int64 | None
    """Number of window cache rows (unique keys of this rank's batch) of each table; None without the window cache."""
    num_updated: dict[str, int]
    """Table name to the number of leading rows that the batch updates; the remaining rows are only averaged."""
    averaged: dict[str, torch.Tensor]
    """Table name to the indices of the rows that are averaged over the replicas after the update."""
    own: KeyRows
    """Every key that this rank requests from owners, in the order sent."""
    requested: KeyRows
    """Every key requested from this shard, in the order received."""
    gradient_sides: list[tuple[ExchangeSide, ExchangeSide]]
    """Per micro-batch the gradients of all dtypes that are sent after it, own and requested."""
    is_identity: bool
    """Whether the batch is a single micro-batch of a single rank, so that its rows equal those of the working set."""
    hierarchical: HierarchicalExchange | None = None
    """Exchanges inside the host, with hierarchical all-to-all. `own` and the exchanges of the micro-batches then
    describe the host. None without hierarchical all-to-all."""
    replicated: ReplicatedRouting | None = None
    """Keys of `own` and `requested` whose vectors and gradients are exchanged; None without replicated tables."""

    @property
    def index(self) -> dict[str, torch.Tensor]:
        """Inverse indices of a batch with a single micro-batch."""
        assert len(self.micro_batches) == 1, "a batch of several micro-batches has an index for each"
        return self.micro_batches[0].index


@dataclass(frozen=True, slots=True)
class RequestedKeys:
    """Keys that all source ranks request from this shard, in order of (source, segment)."""

    records: NDArray[Any]
    """Received records: key, segment and, if needed, last micro-batch and half-precision flag."""
    counts: KeyCounts
    """Order of the sent keys, and numbers of keys sent and received per rank."""
    owned: list[NDArray[np.int64]]
    """Unique keys of each table."""
    indices: Int32
    """Index of each record among the unique keys of its table."""
    joined: list[JoinedKeys] | None = None
    """Keys of each table joined with those of the other replicas of this shard; None if there are none."""
    intra_host: IntraHostKeys | None = None
    """Keys that ranks of this host request through this rank, with hierarchical all-to-all. The own keys are then those
    of the host."""


def route(
    micro_batches: Sequence[FeatureKeys],
    specs: TableSpecs,
    shapes: RowShapes,
    topology: Topology,
    device: torch.device,
) -> RoutedKeys:
    """Route keys that are only read, for evaluation. Collective.

    Raises:
        BatchError: If any rank has an invalid key; the error is the same on every rank.
    """
    source = deduplicate(micro_batches, specs, topology.num_shards, device, window_cache=False)
    if source.is_replicated is not None:  # read-only: each rank reads its own replica
        owners = np.where(source.is_replicated, np.int32(topology.shard), source.owners)
        source = replace(source, owners=owners, is_replicated=None)
    return build_exchange_plan(source, exchange_keys(source, specs, topology), specs, shapes, device)


def exchange_keys(
    source: DeduplicatedKeys, specs: TableSpecs, topology: Topology, replicas: Communicator | None = None
) -> RequestedKeys:
    """Send the unique keys to the owners of their rows (all-to-all). Collective.

    Args:
        source: Unique keys of this rank.
        specs: Specs of the tables.
        topology: Process groups.
        replicas: Replicas of this shard, to which an error is also reported, so that every replica group raises it.

    Raises:
        BatchError: If any rank has an invalid key; the error is the same on every rank.
    """
    hosts = topology.hosts
    error = [source.error[0] * (topology.rank + 1), *source.error[1:]]
    owners = source.owners
    intra_host = None
    if hosts is not None:
        counts, error = _exchange_counts(owners % hosts.ranks_per_host, error, hosts.keys_within)
        if error[0]:  # error on this host: report it to the other hosts and request no keys
            owners = owners[:0]
        else:
            host_records = _exchange_records(source, counts, hosts.keys_within)
            intra_host = aggregate_host_keys(source, host_records, counts, topology.num_shards, hosts.ranks_per_host)
            source = intra_host.source
            owners = intra_host.source.owners
    counts, error = _exchange_counts(
        owners, error, topology.keys if hosts is None else hosts.keys_between, source.is_replicated
    )
    if replicas is not None:
        error = _first_error(torch.stack(all_gather_equal(replicas, torch.tensor(error))).numpy())
    if error[0]:
        raise _key_range_error(specs, error)
    records = _exchange_records(source, counts, topology.keys if hosts is None else hosts.keys_between)
    owned, indices = _owned_keys(
        records, source.num_tables, is_distinct=len(counts.received) * source.num_micro_batches == 1
    )
    return RequestedKeys(records, counts, owned, indices, intra_host=intra_host)


def _exchange_counts(
    owners: Int32, error: list[int], ranks: Communicator, is_replicated: NDArray[np.bool_] | None = None
) -> tuple[KeyCounts, list[int]]:
    """Exchange the numbers of keys sent to each rank, and the error of any rank. Collective."""
    if is_replicated is None:
        order, sent = by_value(owners, ranks.size)
    else:
        order, sent = destinations(owners, is_replicated, ranks.size)
    message = np.empty((ranks.size, ERROR_WORDS + 1), np.int64)
    message[:, :ERROR_WORDS] = error
    message[:, ERROR_WORDS] = sent
    received = all_to_all_fixed(ranks, torch.from_numpy(message)).numpy()
    return KeyCounts(order, sent, received[:, ERROR_WORDS].copy()), _first_error(received[:, :ERROR_WORDS])


def _exchange_records(source: DeduplicatedKeys, key_counts: KeyCounts, ranks: Communicator) -> NDArray[Any]:
    """Exchange key records; return those requested from this rank, in order of (rank, segment). Collective."""
    records = encode_key_records(source, key_counts.order)
    rows = torch.from_numpy(records.view(np.uint8).reshape(len(records), records.dtype.itemsize))
    received = all_to_all_rows(ranks, rows, key_counts.sent.tolist(), key_counts.received.tolist())
    requested: NDArray[Any] = received.numpy().reshape(-1).view(records.dtype)
    return requested


def _owned_keys(
    records: NDArray[Any], num_tables: int, *, is_distinct: bool
) -> tuple[list[NDArray[np.int64]], NDArray[np.int32]]:
    """Return the unique keys of each table, and the index of each record among them."""
    keys = np.ascontiguousarray(records["key"])
    tables = segments_of(records) % num_tables
    order, counts = by_value(tables, num_tables)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    indices = np.empty(len(records), np.int32)
    if is_distinct:
        indices[order] = np.arange(len(records)) - np.repeat(bounds[:-1], counts)
        return np.split(keys[order], bounds[1:-1]), indices
    result = dedup_segments(keys[order], bounds)
    indices[order] = result.inverse
    return np.split(result.keys, result.bounds[1:-1]), indices


def join_replicas(
    requested: RequestedKeys, replicas: ReplicaKeyUnion, num_micro_batches: int, step: int
) -> RequestedKeys:
    """Join the requested keys with those of the other replicas of this shard. Collective over the replicas."""
    num_tables = len(requested.owned)
    segments = segments_of(requested.records)
    last = field_of(requested.records, "last")
    last_micro_batches = segments // num_tables if last is None else last
    before = np.concatenate([[0], np.cumsum([len(keys) for keys in requested.owned])])
    lasts = np.zeros(before[-1], np.int32)
    np.maximum.at(lasts, before[segments % num_tables] + requested.indices, last_micro_batches.astype(np.int32))
    joined = replicas.join(requested.owned, np.split(lasts, before[1:-1]), num_micro_batches, step)
    return replace(requested, joined=joined)


def build_exchange_plan(  # noqa: PLR0917
    source: DeduplicatedKeys,
    requested: RequestedKeys,
    specs: TableSpecs,
    shapes: RowShapes,
    device: torch.device,
    replica: int = 0,
    rank: int = 0,
) -> RoutedKeys:
    """Build the exchange plan of a batch from the keys requested by this rank and from this rank. Local.

    Args:
        source: Unique keys of this rank.
        requested: Keys requested from this rank.
        specs: Specs of the tables.
        shapes: Shapes of the rows.
        device: Device of the rows.
        replica: Index of this rank among the replicas of its shard.
        rank: Index of this rank among the ranks that exchange vectors.
    """
    num_micro_batches = source.num_micro_batches
    num_tables = source.num_tables
    owned, requested_indices = _working_set_keys(requested, num_tables)
    num_owned = np.array([len(keys) for keys in owned])
    intra_host = requested.intra_host
    num_sources = len(requested.counts.received)
    own = own_key_rows(source if intra_host is None else intra_host.source, requested.counts)
    remote = requested_key_rows(requested.records, requested_indices, requested.counts.received, num_tables)
    replicated = None
    has_windows = source.windows is not None
    if source.is_replicated is not None:
        replicated = route_replicated(source, requested.counts, requested.records, specs, rank)
    vector_keys, gradient_keys = (None, None) if replicated is None else (replicated.vectors, replicated.gradients)
    is_in_order = (
        intra_host is None and replicated is None and not has_windows and (num_sources == 1 or num_tables == 1)
    )
    pairs = _sides(own, remote, num_micro_batches, by_last=False, only=vector_keys)
    gradient_sides = pairs
    if has_windows or replicated is not None:
        gradient_sides = _sides(own, remote, num_micro_batches, by_last=has_windows, only=gradient_keys)
    num_rows = count_unique_keys(source)
    replica_sides = _replica_sides(requested.joined, num_micro_batches, num_tables)
    if replicated is not None:
        replica_sides[-1] = gradient_broadcast_sides(owned, specs, num_sources)
    indices = _indices(source, specs, device)
    vector_exchanges = [vector_exchange(*pair, shapes, device, is_in_order=is_in_order) for pair in pairs]
    same = vector_exchanges if gradient_sides is pairs else [None] * num_micro_batches
    micro_batches = [
        RoutedMicroBatch(
            indices[p],
            num_rows[p],
            vector_exchanges[p],
            gradient_exchanges(*gradient_sides[p], shapes, num_owned, device, is_in_order=is_in_order, vectors=same[p]),
            _cached_rows(source, p, shapes, device),
            _replica_rows(replica_sides[p], shapes, device, None if replicated is not None else replica),
            replica_sides[p],
        )
        for p in range(num_micro_batches)
    ]
    names = specs.names_T
    joined = requested.joined or []
    touched = {n: j.num_updated for n, j in zip(names, joined, strict=bool(joined)) if j.num_updated is not None}
    averaged = {n: j.averaged for n, j in zip(names, joined, strict=bool(joined)) if j.averaged is not None}
    return RoutedKeys(
        micro_batches=tuple(micro_batches),
        owned=dict(zip(names, owned, strict=True)),
        num_cache_rows=None if source.windows is None else np.array([plan.num_rows for plan in source.windows]),
        num_updated={n: len(keys) for n, keys in zip(names, owned, strict=True)} | touched,
        averaged={n: to_device(rows, device) for n, rows in averaged.items()},
        own=own,
        requested=remote,
        gradient_sides=gradient_sides,
        is_identity=is_in_order and num_sources * num_micro_batches == 1 and requested.joined is None,
        hierarchical=None if intra_host is None else plan_hierarchical_exchange(intra_host, shapes, device),
        replicated=replicated,
    )


def key_bytes_sent(requested: RequestedKeys, rank: int) -> int:
    """Return the bytes of keys that this rank sent to other ranks."""
    sent = requested.counts.sent
    return requested.records.dtype.itemsize * int(sent.sum() - sent[rank])


def _sides(
    own: KeyRows, remote: KeyRows, num_micro_batches: int, *, by_last: bool, only: RemoteKeys | None
) -> list[tuple[ExchangeSide, ExchangeSide]]:
    if only is not None:
        own, remote = own.select(only.own), remote.select(only.requested)
    both = (rows.sides(num_micro_batches, by_last=by_last) for rows in (own, remote))
    return list(zip(*both, strict=True))


def _working_set_keys(requested: RequestedKeys, num_tables: int) -> tuple[list[NDArray[np.int64]], Int32]:
    """Return the keys of the working set of each table, and the index of each record among them."""
    if requested.joined is None:
        return requested.owned, requested.indices
    union_indices = [
        np.arange(len(k), dtype=np.int32) if j.union_indices is None else j.union_indices for j, k in _joined(requested)
    ]
    before = np.concatenate([[0], np.cumsum([len(keys) for keys in requested.owned])])
    indices = np.concatenate(union_indices)[before[segments_of(requested.records) % num_tables] + requested.indices]
    return [joined.keys for joined in requested.joined], indices


def _joined(requested: RequestedKeys) -> list[tuple[JoinedKeys, NDArray[np.int64]]]:
    return list(zip(requested.joined or [], requested.owned, strict=True))


def _cached_rows(
    source: DeduplicatedKeys, micro_batch: int, shapes: RowShapes, device: torch.device
) -> tuple[RowList, dict[torch.dtype, RowList]] | None:
    if source.windows is None:
        return None
    indices = [plan.cache_indices[micro_batch] for plan in source.windows]
    tables = np.repeat(np.arange(len(indices), dtype=np.int32), [len(p) for p in indices])
    flat = np.concatenate(indices)
    gradients = {}
    for dtype in shapes.gradient_types:
        chosen = shapes.has_type[dtype][tables]
        gradients[dtype] = RowList.of(tables[chosen], flat[chosen], shapes.dims, device)
    return RowList.of(tables, flat, shapes.words, device), gradients


def _replica_sides(
    joined: list[JoinedKeys] | None, num_micro_batches: int, num_tables: int
) -> list[tuple[ExchangeSide, ...]]:
    """Return per micro-batch and replica the rows whose gradients are reduced over the replicas, table by table."""
    if not joined or joined[0].replica_indices is None:
        return [()] * num_micro_batches
    result = []
    for p in range(num_micro_batches):
        of_tables = [j.replica_indices[p] for j in joined if j.replica_indices is not None]
        sides = []
        for replica in range(len(of_tables[0])):
            indices = [of_table[replica] for of_table in of_tables]
            tables = np.repeat(np.arange(num_tables, dtype=np.int32), [len(rows) for rows in indices])
            sides.append(ExchangeSide(tables, np.concatenate(indices), np.array([len(tables)])))
        result.append(tuple(sides))
    return result


def _replica_rows(
    sides: tuple[ExchangeSide, ...], shapes: RowShapes, device: torch.device, replica: int | None
) -> ReplicaGradientRows:
    """Return the reduction plan of a micro-batch; `replica` is None for rows of replicated tables."""
    if not sides:
        return {}
    return (
        gradient_broadcast_rows(sides, shapes, device)
        if replica is None
        else replica_gradient_rows(sides, shapes, device, replica)
    )


def _first_error(words: NDArray[np.int64]) -> list[int]:
    """Return the error of the first rank that has one, [rank + 1, index of the feature, key], or zeros."""
    result: list[int] = words[np.argmax(words[:, 0] > 0)].tolist()
    return result


def _key_range_error(specs: TableSpecs, error: list[int]) -> BatchError:
    error_rank, number, key = error
    feature = specs.features_F[number]
    table = specs.names_T[specs.table_of_F[number]]
    problem = f"not a valid key of table {table!r}, whose keys are 0 to {specs.num_rows_F[number] - 1}"
    remedy = "increase num_rows, correct the data, or make the table dynamic (num_rows=none)"
    where = f"{problem} (detected on rank {error_rank - 1})"
    return BatchError(where, option=f"feature {feature!r}", value=key, remedy=remedy)


def _indices(source: DeduplicatedKeys, specs: TableSpecs, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Return per micro-batch the feature name to inverse indices of its keys."""
    features = specs.features_F
    shapes = [shape[f] for shape in source.shapes for f in features]
    sizes = [math.prod(shape) for shape in shapes]
    if source.index:
        parts = _indices_with_device_segments(source, specs, sizes, device)
    else:
        parts = list(to_device(source.requested.inverse, device).split(sizes))
    result = iter([part if len(shape) == 1 else part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
    return [{f: next(result) for f in features} for _ in source.shapes]


def _indices_with_device_segments(
    source: DeduplicatedKeys, specs: TableSpecs, sizes: Sequence[int], device: torch.device
) -> list[torch.Tensor]:
    """Return the inverse indices of each feature if some segments were deduplicated on the device."""
    record_stream_use(source.index.values())
    parts = []
    at = 0
    for segment in range(len(source.requested.bounds) - 1):
        own = sizes[at : at + len(specs.features_T[segment % source.num_tables])]
        inverse = source.index.get(segment)
        if inverse is None:
            inverse = to_device(source.requested.inverse_of(segment), device)
        parts += inverse.split(own)
        at += len(own)
    return parts
