"""Where the keys of a batch go: asked from their owners by one exchange, distinct again at the owner.

Collective over the shards of a replica group: every rank routes the same number of micro-batches, empty ones
included. With replica groups, holders of the same shard join their keys (replica_keys). The exchange stands between two
local halves, so that a pipeline can run each on its own lane.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import BatchError
from nestrec.base.transfer import to_device, used_here
from nestrec.distributed.exchange import all_gather_equal, all_to_all_fixed, all_to_all_rows
from nestrec.distributed.topology import Communicator, Topology
from nestrec.embedding.flight.half_rows import Flags, HalfRows, half_rows
from nestrec.embedding.flight.replica_keys import Owned, ReplicaKeys, last_micro_batch_of
from nestrec.embedding.flight.source_keys import ERROR_WORDS, FeatureKeys, SourceKeys, SourceMicroBatch, deduplicate
from nestrec.embedding.table import TableConfig
from nestrec.ops.rows.dedup_host import Deduplicated, dedup


@dataclass(frozen=True, slots=True)
class RoutedTable:
    """Rows of one table that cross in one exchange."""

    keys: NDArray[np.int64]
    """Distinct keys of this rank that take part, grouped by owner: the order of the rows on this side."""
    send_counts: tuple[int, ...]
    """Keys asked from each shard."""
    receive_counts: tuple[int, ...]
    """Keys that each shard asks from this one."""
    working_places: torch.Tensor | None
    """Place in the working set of each key asked from this shard, in order of source; none: 0, 1, 2, ..."""
    half: HalfRows | None = None
    """Which vectors cross in half precision; none: no one does."""


@dataclass(frozen=True, slots=True)
class RoutedMicroBatch:
    """A micro-batch."""

    index: dict[str, torch.Tensor]
    """Feature to int32 tensor of the keys' shape: places among the distinct keys of the micro-batch."""
    tables: dict[str, RoutedTable]
    """Vectors that come for this micro-batch: those of all its distinct keys, or of the new ones with the window
    cache."""
    gradients: dict[str, RoutedTable]
    """Gradients that leave after this micro-batch."""
    places: dict[str, torch.Tensor]
    """Window cache: table to the place in the cache of each distinct key of the micro-batch. Empty without the
    cache."""
    leaving: dict[str, torch.Tensor]
    """Window cache: table to the places in the cache of the gradients that leave."""
    crossing: dict[str, tuple[torch.Tensor, ...]]
    """Table to the places, for each holder of this shard, of the rows whose gradient crosses to the others after this
    micro-batch. Empty where gradients are not summed over holders."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The keys of a batch, in one or more micro-batches."""

    micro_batches: tuple[RoutedMicroBatch, ...]
    owned: dict[str, NDArray[np.int64]]
    """Table to the distinct keys of the whole batch that this shard owns: the order of the working set."""
    cache_rows: dict[str, int]
    """Table to the distinct keys of this rank's batch, where the window cache is on; else empty."""
    num_touched: dict[str, int]
    """Table to the number of its first rows that the batch updates; the others are there to be averaged."""
    averaged: dict[str, torch.Tensor]
    """Table to the places of the rows that are averaged over holders after the update; else empty."""

    @property
    def index(self) -> dict[str, torch.Tensor]:
        """`index` of a batch in one micro-batch."""
        assert len(self.micro_batches) == 1, "a batch of several micro-batches has an index for each"
        return self.micro_batches[0].index


@dataclass(frozen=True, slots=True)
class AskedKeys:
    """What all sources ask from this shard."""

    counts: NDArray[np.int64]
    """(source, micro-batch, table) numbers of keys."""
    keys: list[list[NDArray[np.int64]]]
    """[micro_batch][table] keys, in order of source."""
    last_micro_batch: list[list[NDArray[np.int16]]] | None
    """The same shape: the micro-batch that uses the key last, where the window cache is on."""
    half: list[list[Flags]] | None = None
    """The same shape: which rows cross in half precision, where a table has such features."""
    joined: list[Owned] | None = None
    """For each table, where other ranks hold copies of this shard."""

    def owned(self, table: int) -> Owned:
        """Deduplicated over micro-batches and sources."""
        return self.joined[table] if self.joined else _owner_dedup([p[table] for p in self.keys], len(self.counts))


def route(
    micro_batches: Sequence[FeatureKeys], tables: Sequence[TableConfig], topology: Topology, device: torch.device
) -> Routed:
    """Route keys that are only read. A mistake in any rank's keys raises the same UserError on every rank."""
    source = deduplicate(micro_batches, tables, topology.num_shards, device, window_cache=False)
    return arrange(source, exchange_keys(source, tables, topology), tables, device)


def exchange_keys(
    source: SourceKeys, tables: Sequence[TableConfig], topology: Topology, holders: Communicator | None = None
) -> AskedKeys:
    """Ask the owners. Collective; raises on every rank of the group what any rank's keys have wrong.

    holders: those whom the mistake is told besides, so that every group knows of it.
    """
    counts, mistake = _exchange_counts(source, topology)
    if holders is not None:
        mistake = _first_mistake(torch.stack(all_gather_equal(holders, torch.tensor(mistake))).numpy())
    if mistake[0]:
        raise _out_of_range(tables, mistake)
    asked = [[d.keys for d in micro_batch.tables] for micro_batch in source.micro_batches]
    keys, last = _exchange_pieces(source.micro_batches, asked, counts, topology.keys), None
    if source.windows is not None:
        micro_batches = [
            [plan.last_micro_batch[p] for plan in source.windows] for p in range(len(source.micro_batches))
        ]
        last = _exchange_pieces(source.micro_batches, micro_batches, counts, topology.keys)
    half = None if source.half is None else _exchange_pieces(source.micro_batches, source.half, counts, topology.keys)
    return AskedKeys(counts, keys, last, half)


def join_holders(asked: AskedKeys, replicas: ReplicaKeys, num_tables: int, step: int) -> AskedKeys:
    """The same, with the keys that other holders of this shard bring. Collective over the holders."""
    owned = [asked.owned(t) for t in range(num_tables)]
    last_micro_batches = []
    for t, table in enumerate(owned):
        sent_in = None if asked.last_micro_batch is None else [micro_batch[t] for micro_batch in asked.last_micro_batch]
        last_micro_batches.append(last_micro_batch_of(table.explicit_places(), len(table.keys), sent_in))
    return replace(asked, joined=replicas.join(owned, last_micro_batches, len(asked.keys), step))


def arrange(source: SourceKeys, asked: AskedKeys, tables: Sequence[TableConfig], device: torch.device) -> Routed:
    """Put together what is asked by this rank and from this rank. Local."""
    mine = {table.name: asked.owned(t) for t, table in enumerate(tables)}
    coming: list[dict[str, RoutedTable]] = [{} for _ in source.micro_batches]
    going: list[dict[str, RoutedTable]] = [{} for _ in source.micro_batches]
    for t, table in enumerate(tables):
        working_places = mine[table.name].working_places
        for p, micro_batch in enumerate(source.micro_batches):
            place = None if working_places is None else to_device(working_places[p], device)
            send, receive = tuple(micro_batch.tables[t].counts.tolist()), tuple(asked.counts[:, p, t].tolist())
            half = None
            if table.half_features and source.half is not None and asked.half is not None:
                own = None if working_places is None else working_places[p]
                half = half_rows((source.half[p][t], send), (asked.half[p][t], receive), own, device)
            coming[p][table.name] = RoutedTable(micro_batch.tables[t].keys, send, receive, place, half)
        for p, leg in enumerate(_gradient_legs(source, asked, working_places, t, device)):
            going[p][table.name] = leg or coming[p][table.name]
    crossing = [_crossing(mine, p, device) for p in range(len(source.micro_batches))]
    micro_batches = [
        RoutedMicroBatch(
            _indices(micro_batch, tables, device),
            coming[p],
            going[p],
            *_cache_places(source, tables, p, device),
            crossing[p],
        )
        for p, micro_batch in enumerate(source.micro_batches)
    ]
    windows = source.windows or []
    return Routed(
        micro_batches=tuple(micro_batches),
        owned={name: table.keys for name, table in mine.items()},
        cache_rows={t.name: w.num_rows for t, w in zip(tables, windows, strict=bool(windows))},
        num_touched={name: _or_all(table.num_touched, table.keys) for name, table in mine.items()},
        averaged={n: to_device(table.averaged, device) for n, table in mine.items() if table.averaged is not None},
    )


def _or_all(number: int | None, keys: NDArray[np.int64]) -> int:
    return len(keys) if number is None else number


def _crossing(mine: Mapping[str, Owned], micro_batch: int, device: torch.device) -> dict[str, tuple[torch.Tensor, ...]]:
    return {
        name: tuple(to_device(places, device) for places in table.crossing[micro_batch])
        for name, table in mine.items()
        if table.crossing is not None
    }


def key_bytes_sent(routed: Routed, rank: int) -> int:
    """Bytes of keys that left this rank for others."""
    tables = [table for micro_batch in routed.micro_batches for table in micro_batch.tables.values()]
    return 8 * sum(sum(t.send_counts) - t.send_counts[rank] for t in tables)


def _exchange_counts(source: SourceKeys, topology: Topology) -> tuple[NDArray[np.int64], list[int]]:
    """(source, micro-batch, table) numbers of keys that this shard is asked for; the mistake that any source
    reports."""
    counts, communicator = (
        np.stack([[d.counts for d in micro_batch.tables] for micro_batch in source.micro_batches]),
        topology.keys,
    )
    message = np.empty((communicator.size, ERROR_WORDS + counts.shape[0] * counts.shape[1]), np.int64)
    message[:, :ERROR_WORDS] = source.error
    message[:, 0] *= topology.rank + 1
    message[:, ERROR_WORDS:] = counts.transpose(2, 0, 1).reshape(communicator.size, -1)
    received = all_to_all_fixed(communicator, torch.from_numpy(message)).numpy()
    mistake = _first_mistake(received[:, :ERROR_WORDS])
    return received[:, ERROR_WORDS:].reshape(communicator.size, *counts.shape[:2]), mistake


def _first_mistake(words: NDArray[np.int64]) -> list[int]:
    """[rank + 1, number of the feature, key] as told by the first who has one, or zeros."""
    found: list[int] = words[np.argmax(words[:, 0] > 0)].tolist()
    return found


def _out_of_range(tables: Sequence[TableConfig], mistake: list[int]) -> BatchError:
    found_on, number, key = mistake
    feature, table = [(f, t) for t in tables for f in t.feature_names][number]
    problem = f"is not a key of table {table.name!r}, which holds 0 to {(table.num_rows or 0) - 1}"
    remedy = "enlarge num_rows, correct the data, or make the table dynamic (num_rows=none)"
    where = f"{problem} (found on rank {found_on - 1})"
    return BatchError(where, field=f"feature {feature!r}", value=key, remedy=remedy)


def _exchange_pieces(
    micro_batches: Sequence[SourceMicroBatch],
    values: list[list[NDArray[Any]]],
    counts: NDArray[np.int64],
    communicator: Communicator,
) -> list[list[NDArray[Any]]]:
    """[micro_batch][table] values of the keys asked for to those of the keys asked from this shard, in order of
    source."""
    if communicator.size == 1:
        return values
    owners = [d.counts for micro_batch in micro_batches for d in micro_batch.tables]
    starts = [np.concatenate([[0], np.cumsum(c)]) for c in owners]
    flat = [v for micro_batch in values for v in micro_batch]
    pieces = [v[s[r] : s[r + 1]] for r in range(communicator.size) for v, s in zip(flat, starts, strict=True)]
    send_counts, receive_counts = np.sum(owners, axis=0).tolist(), counts.sum(axis=(1, 2)).tolist()
    sent = torch.from_numpy(np.concatenate(pieces))
    received = all_to_all_rows(communicator, sent, send_counts, receive_counts).numpy()
    split = np.split(received, np.cumsum(counts.reshape(-1))[:-1])
    num_tables = counts.shape[2]
    steps = range(0, len(split), len(micro_batches) * num_tables)
    return [
        [np.concatenate([split[start + p * num_tables + t] for start in steps]) for t in range(num_tables)]
        for p in range(len(micro_batches))
    ]


def _owner_dedup(asked: list[NDArray[np.int64]], num_sources: int) -> Owned:
    """Distinct keys over all micro-batches and sources."""
    if len(asked) == 1 and num_sources == 1:
        return Owned(asked[0], None)
    found = dedup(np.concatenate(asked))
    return Owned(found.keys, np.split(found.inverse, np.cumsum([len(a) for a in asked])[:-1]))


def _gradient_legs(
    source: SourceKeys, asked: AskedKeys, working_places: list[NDArray[np.int32]] | None, t: int, device: torch.device
) -> list[RoutedTable | None]:
    """For each micro-batch the gradients that leave after it; none: those of the vectors that came for it."""
    num_micro_batches, num_sources = len(source.micro_batches), asked.counts.shape[0]
    if source.windows is None or asked.last_micro_batch is None or working_places is None:
        return [None] * num_micro_batches
    plan, keys = source.windows[t], np.concatenate([micro_batch.tables[t].keys for micro_batch in source.micro_batches])
    place_of = _by_source(working_places, asked.counts[:, :, t])
    last_of = _by_source([micro_batch[t] for micro_batch in asked.last_micro_batch], asked.counts[:, :, t])
    legs: list[RoutedTable | None] = []
    for p in range(num_micro_batches):
        gone = [place_of[r][last_of[r] == p] for r in range(num_sources)]
        place = to_device(np.concatenate(gone), device)
        send, receive = tuple(plan.leaving_counts[p].tolist()), tuple(len(g) for g in gone)
        legs.append(RoutedTable(keys[plan.leaving[p]], send, receive, place))
    return legs


def _by_source(of_micro_batches: list[NDArray[Any]], counts: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Values of each micro-batch in order of source to values of each source in order of micro-batch; counts: (source,
    micro-batch)."""
    pieces = [np.split(values, np.cumsum(counts[:-1, p])) for p, values in enumerate(of_micro_batches)]
    return [np.concatenate([micro_batch[r] for micro_batch in pieces]) for r in range(len(counts))]


def _cache_places(
    source: SourceKeys, tables: Sequence[TableConfig], micro_batch: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    if source.windows is None:
        return {}, {}
    plans = {table.name: plan for table, plan in zip(tables, source.windows, strict=True)}
    places = {name: to_device(plan.places[micro_batch], device) for name, plan in plans.items()}
    return places, {name: to_device(plan.leaving[micro_batch], device) for name, plan in plans.items()}


def _indices(source: SourceMicroBatch, tables: Sequence[TableConfig], device: torch.device) -> dict[str, torch.Tensor]:
    indices = {}
    for table, found in zip(tables, source.tables, strict=True):
        inverse, start = _inverse(found, device), 0
        for feature in table.feature_names:
            shape = source.shapes[feature]
            size = int(np.prod(shape, dtype=np.int64))
            indices[feature] = inverse[start : start + size].view(shape)
            start += size
    return indices


def _inverse(found: Deduplicated, device: torch.device) -> torch.Tensor:
    if found.index is None:
        return to_device(found.inverse, device)
    used_here([found.index])
    return found.index
