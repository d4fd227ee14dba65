"""Where the keys of a batch go: asked from their owners by one exchange, distinct again at the owner.

Collective over the shards of a replica group: every rank routes the same number of micro-batches (parts), empty ones
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
from nestrec.embedding.flight.replica_keys import Owned, ReplicaKeys, last_part_of
from nestrec.embedding.flight.source_keys import ERROR_WORDS, FeatureKeys, SourceKeys, SourcePart, deduplicate
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
    slots: torch.Tensor | None
    """Place in the working set of each key asked from this shard, in order of source; none: 0, 1, 2, ..."""
    half: HalfRows | None = None
    """Which vectors cross in half precision; none: no one does."""


@dataclass(frozen=True, slots=True)
class RoutedPart:
    """A micro-batch."""

    index: dict[str, torch.Tensor]
    """Feature to int32 tensor of the keys' shape: places among the distinct keys of the part."""
    tables: dict[str, RoutedTable]
    """Vectors that come for this part: those of all its distinct keys, or of the new ones with the window cache."""
    gradients: dict[str, RoutedTable]
    """Gradients that leave after this part."""
    places: dict[str, torch.Tensor]
    """Window cache: table to the place in the cache of each distinct key of the part. Empty without the cache."""
    leaving: dict[str, torch.Tensor]
    """Window cache: table to the places in the cache of the gradients that leave."""
    crossing: dict[str, tuple[torch.Tensor, ...]]
    """Table to the places, for each holder of this shard, of the rows whose gradient crosses to the others after this
    part. Empty where gradients are not summed over holders."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The keys of a batch, in one or more parts."""

    parts: tuple[RoutedPart, ...]
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
        """`index` of a batch in one part."""
        assert len(self.parts) == 1, "a batch of several parts has an index for each"
        return self.parts[0].index


@dataclass(frozen=True, slots=True)
class AskedKeys:
    """What all sources ask from this shard."""

    counts: NDArray[np.int64]
    """(source, part, table) numbers of keys."""
    keys: list[list[NDArray[np.int64]]]
    """[part][table] keys, in order of source."""
    last_part: list[list[NDArray[np.int16]]] | None
    """The same shape: the part that uses the key last, where the window cache is on."""
    half: list[list[Flags]] | None = None
    """The same shape: which rows cross in half precision, where a table has such features."""
    joined: list[Owned] | None = None
    """For each table, where other ranks hold copies of this shard."""

    def owned(self, table: int) -> Owned:
        """Deduplicated over parts and sources."""
        return self.joined[table] if self.joined else _owner_dedup([p[table] for p in self.keys], len(self.counts))


def route(
    parts: Sequence[FeatureKeys], tables: Sequence[TableConfig], topology: Topology, device: torch.device
) -> Routed:
    """Route keys that are only read. A mistake in any rank's keys raises the same UserError on every rank."""
    source = deduplicate(parts, tables, topology.num_shards, device, window_cache=False)
    return assemble(source, exchange_keys(source, tables, topology), tables, device)


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
    asked = [[d.keys for d in part.tables] for part in source.parts]
    keys, last = _exchange_pieces(source.parts, asked, counts, topology.keys), None
    if source.windows is not None:
        parts = [[plan.last_part[p] for plan in source.windows] for p in range(len(source.parts))]
        last = _exchange_pieces(source.parts, parts, counts, topology.keys)
    half = None if source.half is None else _exchange_pieces(source.parts, source.half, counts, topology.keys)
    return AskedKeys(counts, keys, last, half)


def join_holders(asked: AskedKeys, replicas: ReplicaKeys, num_tables: int, step: int) -> AskedKeys:
    """The same, with the keys that other holders of this shard bring. Collective over the holders."""
    owned = [asked.owned(t) for t in range(num_tables)]
    last_parts = []
    for t, table in enumerate(owned):
        sent_in = None if asked.last_part is None else [part[t] for part in asked.last_part]
        last_parts.append(last_part_of(table.explicit_slots(), len(table.keys), sent_in))
    return replace(asked, joined=replicas.join(owned, last_parts, len(asked.keys), step))


def assemble(source: SourceKeys, asked: AskedKeys, tables: Sequence[TableConfig], device: torch.device) -> Routed:
    """Put together what is asked by this rank and from this rank. Local."""
    mine = {table.name: asked.owned(t) for t, table in enumerate(tables)}
    coming: list[dict[str, RoutedTable]] = [{} for _ in source.parts]
    going: list[dict[str, RoutedTable]] = [{} for _ in source.parts]
    for t, table in enumerate(tables):
        slots = mine[table.name].slots
        for p, part in enumerate(source.parts):
            place = None if slots is None else to_device(slots[p], device)
            send, receive = tuple(part.tables[t].counts.tolist()), tuple(asked.counts[:, p, t].tolist())
            half = None
            if table.half_features and source.half is not None and asked.half is not None:
                own = None if slots is None else slots[p]
                half = half_rows((source.half[p][t], send), (asked.half[p][t], receive), own, device)
            coming[p][table.name] = RoutedTable(part.tables[t].keys, send, receive, place, half)
        for p, leg in enumerate(_gradient_legs(source, asked, slots, t, device)):
            going[p][table.name] = leg or coming[p][table.name]
    crossing = [_crossing(mine, p, device) for p in range(len(source.parts))]
    parts = [
        RoutedPart(
            _indices(part, tables, device), coming[p], going[p], *_cache_places(source, tables, p, device), crossing[p]
        )
        for p, part in enumerate(source.parts)
    ]
    windows = source.windows or []
    return Routed(
        parts=tuple(parts),
        owned={name: table.keys for name, table in mine.items()},
        cache_rows={t.name: w.num_rows for t, w in zip(tables, windows, strict=bool(windows))},
        num_touched={name: _or_all(table.num_touched, table.keys) for name, table in mine.items()},
        averaged={n: to_device(table.averaged, device) for n, table in mine.items() if table.averaged is not None},
    )


def _or_all(number: int | None, keys: NDArray[np.int64]) -> int:
    return len(keys) if number is None else number


def _crossing(mine: Mapping[str, Owned], part: int, device: torch.device) -> dict[str, tuple[torch.Tensor, ...]]:
    return {
        name: tuple(to_device(places, device) for places in table.crossing[part])
        for name, table in mine.items()
        if table.crossing is not None
    }


def key_bytes_sent(routed: Routed, rank: int) -> int:
    """Bytes of keys that left this rank for others."""
    tables = [table for part in routed.parts for table in part.tables.values()]
    return 8 * sum(sum(t.send_counts) - t.send_counts[rank] for t in tables)


def _exchange_counts(source: SourceKeys, topology: Topology) -> tuple[NDArray[np.int64], list[int]]:
    """(source, part, table) numbers of keys that this shard is asked for; the mistake that any source reports."""
    counts, communicator = np.stack([[d.counts for d in part.tables] for part in source.parts]), topology.keys
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
    parts: Sequence[SourcePart], values: list[list[NDArray[Any]]], counts: NDArray[np.int64], communicator: Communicator
) -> list[list[NDArray[Any]]]:
    """[part][table] values of the keys asked for to those of the keys asked from this shard, in order of source."""
    if communicator.size == 1:
        return values
    owners = [d.counts for part in parts for d in part.tables]
    starts = [np.concatenate([[0], np.cumsum(c)]) for c in owners]
    flat = [v for part in values for v in part]
    pieces = [v[s[r] : s[r + 1]] for r in range(communicator.size) for v, s in zip(flat, starts, strict=True)]
    send_counts, receive_counts = np.sum(owners, axis=0).tolist(), counts.sum(axis=(1, 2)).tolist()
    sent = torch.from_numpy(np.concatenate(pieces))
    received = all_to_all_rows(communicator, sent, send_counts, receive_counts).numpy()
    split = np.split(received, np.cumsum(counts.reshape(-1))[:-1])
    num_tables = counts.shape[2]
    steps = range(0, len(split), len(parts) * num_tables)
    return [
        [np.concatenate([split[start + p * num_tables + t] for start in steps]) for t in range(num_tables)]
        for p in range(len(parts))
    ]


def _owner_dedup(asked: list[NDArray[np.int64]], num_sources: int) -> Owned:
    """Distinct keys over all parts and sources."""
    if len(asked) == 1 and num_sources == 1:
        return Owned(asked[0], None)
    found = dedup(np.concatenate(asked))
    return Owned(found.keys, np.split(found.inverse, np.cumsum([len(a) for a in asked])[:-1]))


def _gradient_legs(
    source: SourceKeys, asked: AskedKeys, slots: list[NDArray[np.int32]] | None, t: int, device: torch.device
) -> list[RoutedTable | None]:
    """For each part the gradients that leave after it; none: those of the vectors that came for it."""
    num_parts, num_sources = len(source.parts), asked.counts.shape[0]
    if source.windows is None or asked.last_part is None or slots is None:
        return [None] * num_parts
    plan, keys = source.windows[t], np.concatenate([part.tables[t].keys for part in source.parts])
    slot_of = _by_source(slots, asked.counts[:, :, t])
    last_of = _by_source([part[t] for part in asked.last_part], asked.counts[:, :, t])
    legs: list[RoutedTable | None] = []
    for p in range(num_parts):
        gone = [slot_of[r][last_of[r] == p] for r in range(num_sources)]
        place = to_device(np.concatenate(gone), device)
        send, receive = tuple(plan.leaving_counts[p].tolist()), tuple(len(g) for g in gone)
        legs.append(RoutedTable(keys[plan.leaving[p]], send, receive, place))
    return legs


def _by_source(of_parts: list[NDArray[Any]], counts: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Values of each part in order of source to values of each source in order of part; counts: (source, part)."""
    pieces = [np.split(values, np.cumsum(counts[:-1, p])) for p, values in enumerate(of_parts)]
    return [np.concatenate([part[r] for part in pieces]) for r in range(len(counts))]


def _cache_places(
    source: SourceKeys, tables: Sequence[TableConfig], part: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    if source.windows is None:
        return {}, {}
    plans = {table.name: plan for table, plan in zip(tables, source.windows, strict=True)}
    places = {name: to_device(plan.places[part], device) for name, plan in plans.items()}
    return places, {name: to_device(plan.leaving[part], device) for name, plan in plans.items()}


def _indices(source: SourcePart, tables: Sequence[TableConfig], device: torch.device) -> dict[str, torch.Tensor]:
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
