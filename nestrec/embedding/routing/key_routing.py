"""Where the keys of a batch go: asked from their owners by one exchange, distinct again at the owner.

Collective over the shards of a replica group: every rank routes the same number of micro-batches, empty ones
included. With replica groups, holders of the same shard join their keys (replica_keys). The exchange stands between two
local halves, so that a pipeline can run each on its own lane.

Two messages carry all keys of all tables and micro-batches: how many keys go to each rank, and the keys, each with its
segment (micro-batch and table). Both cost what the keys and the ranks cost, not their number times that of tables.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.cuda import to_device, used_here
from nestrec.base.errors import BatchError
from nestrec.distributed.collectives import all_gather_equal, all_to_all_fixed, all_to_all_rows
from nestrec.distributed.topology import Communicator, Topology
from nestrec.embedding.routing.deduplicated_keys import (
    ERROR_WORDS,
    DeduplicatedKeys,
    FeatureKeys,
    KeyCounts,
    KeyRows,
    asked_rows,
    deduplicate,
    field_of,
    key_records,
    num_rows_of,
    own_rows,
    segments_of,
)
from nestrec.embedding.routing.hierarchical_exchange import HierarchicalExchange, IntraHostKeys, on_behalf, relay
from nestrec.embedding.routing.replica_key_union import JoinedKeys, ReplicaKeyUnion
from nestrec.embedding.routing.replica_reduction import Crossing, crossing_rows
from nestrec.embedding.routing.replicated_routing import (
    RemoteKeys,
    ReplicatedRouting,
    destinations,
    spread_rows,
    spread_sides,
    told_everywhere,
)
from nestrec.embedding.routing.row_exchange import ExchangeSide, RowExchange, by_value, gradient_legs, vector_leg
from nestrec.embedding.table_config import RowShapes, TableSpecs
from nestrec.ops.embedding.dedup_host import dedup_segments
from nestrec.ops.embedding.row_copy import Int32, Int64, RowList


@dataclass(frozen=True, slots=True)
class RoutedMicroBatch:
    """A micro-batch."""

    index: dict[str, torch.Tensor]
    """Feature to int32 tensor of the keys' shape: places among the distinct keys of the micro-batch."""
    num_rows: Int64
    """Distinct keys of each table."""
    vectors: RowExchange
    """Vectors that come for this micro-batch: those of all its distinct keys, or of the new ones with the window
    cache."""
    gradients: dict[torch.dtype, RowExchange]
    """Gradients that leave after this micro-batch."""
    used: tuple[RowList, dict[torch.dtype, RowList]] | None
    """Window cache: its distinct keys, table by table, at their places in the cache: as vectors, and as gradients of
    each type."""
    crossing: Crossing
    """What crosses between holders after this micro-batch. Empty where gradients are not summed over holders."""
    crossing_sides: tuple[ExchangeSide, ...] = ()
    """The same before it is sorted by type."""


@dataclass(frozen=True, slots=True)
class RoutedKeys:
    """The keys of a batch, in one or more micro-batches."""

    micro_batches: tuple[RoutedMicroBatch, ...]
    owned: dict[str, NDArray[np.int64]]
    """Table to the distinct keys of the whole batch that this shard owns: the order of the working set."""
    cache_rows: Int64 | None
    """Distinct keys of this rank's batch in each table, where the window cache is on."""
    num_touched: dict[str, int]
    """Table to the number of its first rows that the batch updates; the others are there to be averaged."""
    averaged: dict[str, torch.Tensor]
    """Table to the places of the rows that are averaged over holders after the update; else empty."""
    own: KeyRows
    """Every key that this rank asks of owners, in the order in which it asks."""
    asked: KeyRows
    """Every key asked from this shard, in the order in which they came."""
    gradient_sides: list[tuple[ExchangeSide, ExchangeSide]]
    """For each micro-batch the gradients that leave after it, own and asked, of all types."""
    is_plain: bool
    """Nothing but one micro-batch of this rank: its rows are those of the working set, in the same order."""
    relay: HierarchicalExchange | None = None
    """Where exchanges go by hosts: what crosses inside. `own` and the legs of micro-batches are then of the host."""
    everywhere: ReplicatedRouting | None = None
    """Where tables are replicated: which keys of `own` and `asked` cross as vectors, and which as gradients."""

    @property
    def index(self) -> dict[str, torch.Tensor]:
        """`index` of a batch in one micro-batch."""
        assert len(self.micro_batches) == 1, "a batch of several micro-batches has an index for each"
        return self.micro_batches[0].index


@dataclass(frozen=True, slots=True)
class RequestedKeys:
    """What all sources ask from this shard, in order of (source, segment)."""

    records: NDArray[Any]
    """As they travel: key, segment and, where they are needed, last micro-batch and whether the row crosses half."""
    counted: KeyCounts
    """Own keys as they were sent, and keys of each source."""
    owned: list[NDArray[np.int64]]
    """For each table its distinct keys."""
    places: Int32
    """Of each record among the distinct keys of its table."""
    joined: list[JoinedKeys] | None = None
    """For each table, where other ranks hold copies of this shard."""
    within: IntraHostKeys | None = None
    """Where exchanges go by hosts: what ranks of this host ask this one to ask for. The own keys are then those of the
    host."""


def route(
    micro_batches: Sequence[FeatureKeys],
    specs: TableSpecs,
    shapes: RowShapes,
    topology: Topology,
    device: torch.device,
) -> RoutedKeys:
    """Route keys that are only read. A mistake in any rank's keys raises the same UserError on every rank."""
    source = deduplicate(micro_batches, specs, topology.num_shards, device, window_cache=False)
    if source.everywhere is not None:  # nobody else need know
        owners = np.where(source.everywhere, np.int32(topology.shard), source.owners)
        source = replace(source, owners=owners, everywhere=None)
    return arrange(source, exchange_keys(source, specs, topology), specs, shapes, device)


def exchange_keys(
    source: DeduplicatedKeys, specs: TableSpecs, topology: Topology, holders: Communicator | None = None
) -> RequestedKeys:
    """Ask the owners. Collective; raises on every rank of the group what any rank's keys have wrong.

    holders: those whom the mistake is told besides, so that every group knows of it.
    """
    hosts = topology.hosts
    mistake = [source.error[0] * (topology.rank + 1), *source.error[1:]]
    owners = source.owners
    within = None
    if hosts is not None:
        told, mistake = _count(owners % hosts.ranks, mistake, hosts.keys_within)
        if mistake[0]:  # of this host: the others are told, and nobody asks for anything
            owners = owners[:0]
        else:
            told_here = _told(source, told, hosts.keys_within)
            within = on_behalf(source, told_here, told, topology.num_shards, hosts.ranks)
            source = within.source
            owners = within.source.owners
    told, mistake = _count(owners, mistake, topology.keys if hosts is None else hosts.keys_between, source.everywhere)
    if holders is not None:
        mistake = _first_mistake(torch.stack(all_gather_equal(holders, torch.tensor(mistake))).numpy())
    if mistake[0]:
        raise _out_of_range(specs, mistake)
    records = _told(source, told, topology.keys if hosts is None else hosts.keys_between)
    owned, places = _owned_keys(records, source.num_tables, is_distinct=len(told.comes) * source.num_micro_batches == 1)
    return RequestedKeys(records, told, owned, places, within=within)


def _count(
    owners: Int32, mistake: list[int], ranks: Communicator, everywhere: NDArray[np.bool_] | None = None
) -> tuple[KeyCounts, list[int]]:
    """How many keys go to, and come from, each rank; the mistake that any of them reports. Collective."""
    if everywhere is None:
        order, sent = by_value(owners, ranks.size)
    else:
        order, sent = destinations(owners, everywhere, ranks.size)
    message = np.empty((ranks.size, ERROR_WORDS + 1), np.int64)
    message[:, :ERROR_WORDS] = mistake
    message[:, ERROR_WORDS] = sent
    received = all_to_all_fixed(ranks, torch.from_numpy(message)).numpy()
    return KeyCounts(order, sent, received[:, ERROR_WORDS].copy()), _first_mistake(received[:, :ERROR_WORDS])


def _told(source: DeduplicatedKeys, counted: KeyCounts, ranks: Communicator) -> NDArray[Any]:
    """What others ask this rank for, in order of (rank, segment). Collective."""
    records = key_records(source, counted.order)
    rows = torch.from_numpy(records.view(np.uint8).reshape(len(records), records.dtype.itemsize))
    received = all_to_all_rows(ranks, rows, counted.sent.tolist(), counted.comes.tolist())
    told: NDArray[Any] = received.numpy().reshape(-1).view(records.dtype)
    return told


def _owned_keys(
    records: NDArray[Any], num_tables: int, *, is_distinct: bool
) -> tuple[list[NDArray[np.int64]], NDArray[np.int32]]:
    """For each table its distinct keys, and the place of each record among them."""
    keys = np.ascontiguousarray(records["key"])
    tables = segments_of(records) % num_tables
    order, counts = by_value(tables, num_tables)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    places = np.empty(len(records), np.int32)
    if is_distinct:
        places[order] = np.arange(len(records)) - np.repeat(bounds[:-1], counts)
        return np.split(keys[order], bounds[1:-1]), places
    found = dedup_segments(keys[order], bounds)
    places[order] = found.inverse
    return np.split(found.keys, found.bounds[1:-1]), places


def join_holders(asked: RequestedKeys, replicas: ReplicaKeyUnion, num_micro_batches: int, step: int) -> RequestedKeys:
    """The same, with the keys that other holders of this shard bring. Collective over the holders."""
    num_tables = len(asked.owned)
    segments = segments_of(asked.records)
    last = field_of(asked.records, "last")
    brought_in = segments // num_tables if last is None else last
    before = np.concatenate([[0], np.cumsum([len(keys) for keys in asked.owned])])
    lasts = np.zeros(before[-1], np.int32)
    np.maximum.at(lasts, before[segments % num_tables] + asked.places, brought_in.astype(np.int32))
    joined = replicas.join(asked.owned, np.split(lasts, before[1:-1]), num_micro_batches, step)
    return replace(asked, joined=joined)


def arrange(  # noqa: PLR0917
    source: DeduplicatedKeys,
    asked: RequestedKeys,
    specs: TableSpecs,
    shapes: RowShapes,
    device: torch.device,
    holder: int = 0,
    rank: int = 0,
) -> RoutedKeys:
    """Put together what is asked by this rank and from this rank. holder: which of its shard's it is. rank: of those
    that are asked. Local."""
    num_micro_batches = source.num_micro_batches
    num_tables = source.num_tables
    owned, places = _working_places(asked, num_tables)
    num_owned = np.array([len(keys) for keys in owned])
    within = asked.within
    num_sources = len(asked.counted.comes)
    own = own_rows(source if within is None else within.source, asked.counted)
    theirs = asked_rows(asked.records, places, asked.counted.comes, num_tables)
    everywhere = None
    has_windows = source.windows is not None
    if source.everywhere is not None:
        everywhere = told_everywhere(source, asked.counted, asked.records, specs, rank)
    comes, goes = (None, None) if everywhere is None else (everywhere.vectors, everywhere.gradients)
    is_in_order = within is None and everywhere is None and not has_windows and (num_sources == 1 or num_tables == 1)
    pairs = _sides(own, theirs, num_micro_batches, by_last=False, only=comes)
    going = pairs
    if has_windows or everywhere is not None:
        going = _sides(own, theirs, num_micro_batches, by_last=has_windows, only=goes)
    num_rows = num_rows_of(source)
    crossing = _crossing(asked.joined, num_micro_batches, num_tables)
    if everywhere is not None:
        crossing[-1] = spread_sides(owned, specs, num_sources)
    indices = _indices(source, specs, device)
    coming = [vector_leg(*pair, shapes, device, is_in_order=is_in_order) for pair in pairs]
    same = coming if going is pairs else [None] * num_micro_batches
    micro_batches = [
        RoutedMicroBatch(
            indices[p],
            num_rows[p],
            coming[p],
            gradient_legs(*going[p], shapes, num_owned, device, is_in_order=is_in_order, vectors=same[p]),
            _used(source, p, shapes, device),
            _crossing_rows(crossing[p], shapes, device, None if everywhere is not None else holder),
            crossing[p],
        )
        for p in range(num_micro_batches)
    ]
    names = specs.names_T
    joined = asked.joined or []
    touched = {n: j.num_touched for n, j in zip(names, joined, strict=bool(joined)) if j.num_touched is not None}
    averaged = {n: j.averaged for n, j in zip(names, joined, strict=bool(joined)) if j.averaged is not None}
    return RoutedKeys(
        micro_batches=tuple(micro_batches),
        owned=dict(zip(names, owned, strict=True)),
        cache_rows=None if source.windows is None else np.array([plan.num_rows for plan in source.windows]),
        num_touched={n: len(keys) for n, keys in zip(names, owned, strict=True)} | touched,
        averaged={n: to_device(rows, device) for n, rows in averaged.items()},
        own=own,
        asked=theirs,
        gradient_sides=going,
        is_plain=is_in_order and num_sources * num_micro_batches == 1 and asked.joined is None,
        relay=None if within is None else relay(within, shapes, device),
        everywhere=everywhere,
    )


def key_bytes_sent(asked: RequestedKeys, rank: int) -> int:
    """Bytes of keys that left this rank for others."""
    sent = asked.counted.sent
    return asked.records.dtype.itemsize * int(sent.sum() - sent[rank])


def _sides(
    own: KeyRows, theirs: KeyRows, num_micro_batches: int, *, by_last: bool, only: RemoteKeys | None
) -> list[tuple[ExchangeSide, ExchangeSide]]:
    if only is not None:
        own, theirs = own.only(only.own), theirs.only(only.asked)
    both = (rows.sides(num_micro_batches, by_last=by_last) for rows in (own, theirs))
    return list(zip(*both, strict=True))


def _working_places(asked: RequestedKeys, num_tables: int) -> tuple[list[NDArray[np.int64]], Int32]:
    """The keys of the working set of each table, and the place of each record among them."""
    if asked.joined is None:
        return asked.owned, asked.places
    moved = [np.arange(len(k), dtype=np.int32) if j.moved is None else j.moved for j, k in _joined(asked)]
    before = np.concatenate([[0], np.cumsum([len(keys) for keys in asked.owned])])
    places = np.concatenate(moved)[before[segments_of(asked.records) % num_tables] + asked.places]
    return [joined.keys for joined in asked.joined], places


def _joined(asked: RequestedKeys) -> list[tuple[JoinedKeys, NDArray[np.int64]]]:
    return list(zip(asked.joined or [], asked.owned, strict=True))


def _used(
    source: DeduplicatedKeys, micro_batch: int, shapes: RowShapes, device: torch.device
) -> tuple[RowList, dict[torch.dtype, RowList]] | None:
    if source.windows is None:
        return None
    places = [plan.places[micro_batch] for plan in source.windows]
    tables = np.repeat(np.arange(len(places), dtype=np.int32), [len(p) for p in places])
    flat = np.concatenate(places)
    gradients = {}
    for dtype in shapes.gradient_types:
        chosen = shapes.has_type[dtype][tables]
        gradients[dtype] = RowList.of(tables[chosen], flat[chosen], shapes.dims, device)
    return RowList.of(tables, flat, shapes.words, device), gradients


def _crossing(
    joined: list[JoinedKeys] | None, num_micro_batches: int, num_tables: int
) -> list[tuple[ExchangeSide, ...]]:
    """For each micro-batch and holder the rows whose gradient then crosses, table by table."""
    if not joined or joined[0].crossing is None:
        return [()] * num_micro_batches
    found = []
    for p in range(num_micro_batches):
        of_tables = [j.crossing[p] for j in joined if j.crossing is not None]
        sides = []
        for holder in range(len(of_tables[0])):
            places = [of_table[holder] for of_table in of_tables]
            tables = np.repeat(np.arange(num_tables, dtype=np.int32), [len(rows) for rows in places])
            sides.append(ExchangeSide(tables, np.concatenate(places), np.array([len(tables)])))
        found.append(tuple(sides))
    return found


def _crossing_rows(
    sides: tuple[ExchangeSide, ...], shapes: RowShapes, device: torch.device, holder: int | None
) -> Crossing:
    """holder: of a shard that others hold too; none: the rows are those of replicated tables."""
    if not sides:
        return {}
    return spread_rows(sides, shapes, device) if holder is None else crossing_rows(sides, shapes, device, holder)


def _first_mistake(words: NDArray[np.int64]) -> list[int]:
    """[rank + 1, number of the feature, key] as told by the first who has one, or zeros."""
    found: list[int] = words[np.argmax(words[:, 0] > 0)].tolist()
    return found


def _out_of_range(specs: TableSpecs, mistake: list[int]) -> BatchError:
    found_on, number, key = mistake
    feature = specs.features_F[number]
    table = specs.names_T[specs.table_of_F[number]]
    problem = f"is not a key of table {table!r}, which holds 0 to {specs.num_rows_F[number] - 1}"
    remedy = "enlarge num_rows, correct the data, or make the table dynamic (num_rows=none)"
    where = f"{problem} (found on rank {found_on - 1})"
    return BatchError(where, option=f"feature {feature!r}", value=key, remedy=remedy)


def _indices(source: DeduplicatedKeys, specs: TableSpecs, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """For each micro-batch, feature to the places of its keys."""
    features = specs.features_F
    shapes = [shape[f] for shape in source.shapes for f in features]
    sizes = [math.prod(shape) for shape in shapes]
    if source.index:
        parts = _mixed_indices(source, specs, sizes, device)
    else:
        parts = list(to_device(source.asked.inverse, device).split(sizes))
    found = iter([part if len(shape) == 1 else part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
    return [{f: next(found) for f in features} for _ in source.shapes]


def _mixed_indices(
    source: DeduplicatedKeys, specs: TableSpecs, sizes: Sequence[int], device: torch.device
) -> list[torch.Tensor]:
    """Where some segments were deduplicated on the device."""
    used_here(source.index.values())
    parts = []
    at = 0
    for segment in range(len(source.asked.bounds) - 1):
        own = sizes[at : at + len(specs.features_T[segment % source.num_tables])]
        inverse = source.index.get(segment)
        if inverse is None:
            inverse = to_device(source.asked.inverse_of(segment), device)
        parts += inverse.split(own)
        at += len(own)
    return parts
