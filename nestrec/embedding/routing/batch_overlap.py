"""Rows that consecutive batches share: found, copied, and tracked while read ahead.

Rows that two consecutive batches share (collisions), told to the ranks that use them.

Only the owner of a shard sees which keys two batches have in common, over all sources, so it is found there and told to
the sources: a byte for each asked key, in the order in which the keys came. With it every exchange of a batch falls
into two portions: of exclusive rows, and of shared rows. Each row belongs to one portion of the vectors of a batch
(shared with the batch before?) and to one of its gradients (shared with the batch after?), so its sums keep their order
(order of sums).

Rows that two batches in flight share, and their copy from the older working set to the newer one (shared-row copy).

Which rows they are depends on keys alone, so it is found while the older batch still trains; what remains between its
update and the first read of the newer batch is one copy of whole rows, weight and state together.

Rows that batches have read before their step: kept over a stop, so that a run goes on with what it had read.

Schedules that use rows late (`stale`, `semi_async`) read those of the next batches before this one's update. A run that
stops here and reads them anew later would use other values than one that went on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.cuda import to_device
from nestrec.base.random import mix64_jit
from nestrec.base.thread_team import for_parts
from nestrec.distributed.collectives import all_to_all_rows
from nestrec.distributed.topology import Communicator, Topology
from nestrec.embedding.routing.deduplicated_keys import KeyRows
from nestrec.embedding.routing.hierarchical_exchange import HierarchicalExchange, flags_within, within_legs
from nestrec.embedding.routing.key_routing import RoutedKeys
from nestrec.embedding.routing.replica_reduction import crossing_rows
from nestrec.embedding.routing.replicated_routing import RemoteKeys, spread_rows
from nestrec.embedding.routing.row_exchange import ExchangeSide, by_micro_batch, gradient_legs, vector_leg
from nestrec.embedding.routing.working_set import RowSelection, WorkingSet
from nestrec.embedding.table_config import RowShapes
from nestrec.embedding.table_shard import FetchedRows
from nestrec.ops.embedding.row_copy import move_rows


@dataclass(frozen=True, slots=True)
class TableOverlap:
    """Shared rows of one table."""

    older: torch.Tensor
    """Places in the older working set."""
    newer: torch.Tensor
    """Places of the same keys in the newer one."""
    unshared_slots: NDArray[np.int64]
    """Slots of the older batch's rows, -1 for the shared ones."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Shared rows of two batches, over all tables."""

    tables: dict[str, TableOverlap]

    def num_rows_of(self, table: str) -> int:
        return len(self.tables[table].older)

    @property
    def num_rows(self) -> int:
        return sum(len(table.older) for table in self.tables.values())


def overlap_of(older: WorkingSet, newer: WorkingSet) -> Overlap:
    """The rows in both; a row that began anew with the newer batch is not shared, though its key is in both."""
    pairs = {name: (older.tables[name].fetched, table.fetched) for name, table in newer.tables.items()}
    return Overlap({name: _table_overlap(a, b) for name, (a, b) in pairs.items()})


def copy_shared(older: WorkingSet, newer: WorkingSet, shared: Overlap) -> int:
    """Give the newer working set the rows that the older batch has updated; how many they are."""
    for name, table in shared.tables.items():
        if len(table.older):
            source = older.tables[name]
            target = newer.tables[name].fetched.rows
            _copy_rows(source.fetched.rows, table.older, target, table.newer)
    return shared.num_rows


def num_common_rows(older: RoutedKeys, newer: WorkingSet) -> int:
    """Keys of this shard in both."""
    keys = {name: table.fetched.keys for name, table in newer.tables.items()}
    return sum(int((matching_places(owned, keys[name]) >= 0).sum()) for name, owned in older.owned.items())


def matching_places(
    keys: NDArray[np.int64], others: NDArray[np.int64], is_excluded: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """For each key its place among the others, -1 where it is not there or is excluded. Keys of a list are distinct."""
    places = np.empty(len(keys), np.int64)
    _join(keys, others, np.zeros(len(others), np.bool_) if is_excluded is None else is_excluded, places)
    return places


def _table_overlap(older: FetchedRows, newer: FetchedRows) -> TableOverlap:
    places = matching_places(older.keys, newer.keys, newer.is_new)
    shared = np.flatnonzero(places >= 0)
    device = newer.rows.device
    slots = np.where(places >= 0, -1, older.slots)
    return TableOverlap(to_device(shared, device), to_device(places[shared], device), slots)


def _copy_rows(source: torch.Tensor, older: torch.Tensor, target: torch.Tensor, newer: torch.Tensor) -> None:
    if source.device.type != "cpu":
        move_rows(source, target, older, newer)
        return
    arrays = source.numpy(), older.numpy(), target.numpy(), newer.numpy()
    for_parts(len(older), len(older), lambda a, b: _copy(*arrays, a, b))


@njit(cache=True, nogil=True)
def _copy(source, older, target, newer, first, end):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for i in range(first, end):
        for j in range(source.shape[1]):
            target[newer[i], j] = source[older[i], j]


@njit(cache=True, nogil=True)
def _join(keys, others, is_excluded, places):  # type: ignore[no-untyped-def]
    """places[i] = j where keys[i] == others[j] and j is not excluded, else -1. Keys of a list are distinct."""
    size = 16
    while size < 2 * len(others):
        size *= 2
    mask = np.int64(size - 1)
    table = np.full(size, -1, np.int64)
    for j in range(len(others)):
        if not is_excluded[j]:
            place = np.int64(mix64_jit(np.uint64(others[j])) >> np.uint64(4)) & mask
            while table[place] >= 0:
                place = (place + 1) & mask
            table[place] = j
    for i in range(len(keys)):
        place = np.int64(mix64_jit(np.uint64(keys[i])) >> np.uint64(4)) & mask
        while table[place] >= 0 and others[table[place]] != keys[i]:
            place = (place + 1) & mask
        places[i] = table[place]


Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Portion:
    """One portion of the exchanges of a batch."""

    routed: RoutedKeys
    """Of it, only what crosses in the portion's direction."""
    owned: dict[str, RowSelection]
    """Table to its rows in the working set."""


@dataclass(frozen=True, slots=True)
class Portions:
    """All exchanges of a batch in one direction."""

    exclusive: Portion
    shared: Portion


@dataclass(frozen=True, slots=True)
class Collisions:
    """What two consecutive batches have in common."""

    gradients: Portions
    """Of the older batch."""
    vectors: Portions
    """Of the newer batch."""
    num_shared: int
    """Rows of this shard in both."""
    num_rows: int
    """Rows of the newer batch on this shard."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """Which rows of a batch the neighbouring one uses."""

    owned: dict[str, Flags]
    """Table to the rows of the working set."""
    asked: Flags
    """Of the keys asked from this shard, as they came."""
    own: Flags
    """Of the keys that this rank asks of owners, as it asks."""
    within: tuple[Flags, Flags] | None = None
    """Where exchanges go by hosts: the same inside the host, own and asked."""


def find_collisions(older: RoutedKeys, newer: RoutedKeys, topology: Topology, shapes: RowShapes) -> Collisions:
    """Detection on the owner, one exchange of a byte a key back to the sources (one more inside a host). Collective."""
    in_newer, in_older = {}, {}
    for name, keys in older.owned.items():
        places = matching_places(keys, newer.owned[name])
        in_newer[name] = places >= 0
        in_older[name] = np.zeros(len(newer.owned[name]), np.bool_)
        in_older[name][places[places >= 0]] = True
    of_older, of_newer = _tell_sources([(older, in_newer), (newer, in_older)], topology)
    device = next(iter(older.micro_batches[0].index.values())).device
    holder = topology.replicas.rank
    return Collisions(
        gradients=Portions(*(_gradients(older, of_older, shapes, device, holder, is_shared=s) for s in (False, True))),
        vectors=Portions(*(_vectors(newer, of_newer, shapes, device, is_shared=s) for s in (False, True))),
        num_shared=sum(int(flags.sum()) for flags in in_older.values()),
        num_rows=sum(len(flags) for flags in in_older.values()),
    )


def _tell_sources(batches: Sequence[tuple[RoutedKeys, dict[str, Flags]]], topology: Topology) -> list[_Shared]:
    """What owners have found, told to those who asked, for both batches. Collective."""
    hosts = topology.hosts
    found = [_of_asked(routed, flags) for routed, flags in batches]
    rows = [(routed.own, routed.asked) for routed, _ in batches]
    own = _tell(rows, found, topology.keys if hosts is None else hosts.keys_between)
    shared = [_Shared(flags, a, o) for (_, flags), a, o in zip(batches, found, own, strict=True)]
    if hosts is None:
        return shared
    relays = [routed.relay for routed, _ in batches if routed.relay is not None]
    inside = [flags_within(r, routed.own, o) for r, (routed, _), o in zip(relays, batches, own, strict=True)]
    told = _tell([(r.keys.own, r.keys.asked) for r in relays], inside, hosts.keys_within)
    return [replace(s, within=(mine, asked)) for s, mine, asked in zip(shared, told, inside, strict=True)]


def _tell(rows: Sequence[tuple[KeyRows, KeyRows]], found: Sequence[Flags], ranks: Communicator) -> list[Flags]:
    """What is known of asked keys, told to who asked, in one message. rows: own and asked of each batch. Collective."""
    sent: NDArray[np.int64] = np.sum([asked.counts for _, asked in rows], axis=0)
    comes: NDArray[np.int64] = np.sum([own.counts for own, _ in rows], axis=0)
    message = np.concatenate(found)[_by_rank([asked.counts for _, asked in rows])]
    received = all_to_all_rows(ranks, torch.from_numpy(message), sent.tolist(), comes.tolist()).numpy()
    own = np.empty(len(received), np.bool_)
    own[_by_rank([own.counts for own, _ in rows])] = received
    return np.split(own, [int(rows[0][0].counts.sum())])


def _of_asked(routed: RoutedKeys, of_owned: dict[str, Flags]) -> Flags:
    tables = routed.asked.tables
    places = routed.asked.places
    before = np.concatenate([[0], np.cumsum([len(flags) for flags in of_owned.values()])])
    found: Flags = np.concatenate(list(of_owned.values()))[before[tables] + places]
    return found


def _by_rank(counts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Keys of one batch after the other, each in order of rank, to all keys in order of (rank, batch)."""
    ranks = np.concatenate([np.repeat(np.arange(len(c), dtype=np.uint16), c) for c in counts])
    return np.argsort(ranks, kind="stable")


def _vectors(
    routed: RoutedKeys, shared: _Shared, shapes: RowShapes, device: torch.device, *, is_shared: bool
) -> Portion:
    sides = [(micro_batch.vectors.own, micro_batch.vectors.asked) for micro_batch in routed.micro_batches]
    both = _crossing(routed, shared, None if routed.everywhere is None else routed.everywhere.vectors)
    cut = _cut(sides, *both, is_shared=is_shared, by_last=False)
    micro_batches = [
        replace(micro_batch, vectors=vector_leg(*cut[p], shapes, device, is_in_order=False))
        for p, micro_batch in enumerate(routed.micro_batches)
    ]
    relay = _cut_relay(routed, shared, shapes, device, is_shared=is_shared, of_vectors=True)
    portion = replace(routed, micro_batches=tuple(micro_batches), relay=relay)
    return Portion(portion, _owned(routed, shared, device, is_shared))


def _gradients(
    routed: RoutedKeys, shared: _Shared, shapes: RowShapes, device: torch.device, holder: int, *, is_shared: bool
) -> Portion:
    by_last = routed.cache_rows is not None
    both = _crossing(routed, shared, None if routed.everywhere is None else routed.everywhere.gradients)
    cut = _cut(routed.gradient_sides, *both, is_shared=is_shared, by_last=by_last)
    num_owned = np.array([len(keys) for keys in routed.owned.values()])
    micro_batches = []
    for p, micro_batch in enumerate(routed.micro_batches):
        legs = gradient_legs(*cut[p], shapes, num_owned, device, is_in_order=False)
        sides = tuple(_cut_crossing(side, shared, is_shared) for side in micro_batch.crossing_sides)
        spread = spread_rows(sides, shapes, device) if routed.everywhere is not None else None
        crossing = crossing_rows(sides, shapes, device, holder) if spread is None else spread
        micro_batches.append(replace(micro_batch, gradients=legs, crossing=crossing, crossing_sides=sides))
    relay = _cut_relay(routed, shared, shapes, device, is_shared=is_shared, of_vectors=False)
    portion = replace(routed, micro_batches=tuple(micro_batches), relay=relay)
    return Portion(portion, _owned(routed, shared, device, is_shared))


def _crossing(
    routed: RoutedKeys, shared: _Shared, only: RemoteKeys | None
) -> tuple[tuple[KeyRows, KeyRows], tuple[Flags, Flags]]:
    """Keys, own and asked, that cross in a direction, and what is known of them."""
    if only is None:
        return (routed.own, routed.asked), (shared.own, shared.asked)
    rows = routed.own.only(only.own), routed.asked.only(only.asked)
    return rows, (shared.own[only.own], shared.asked[only.asked])


def _cut(
    sides: Sequence[tuple[ExchangeSide, ExchangeSide]],
    rows: tuple[KeyRows, KeyRows],
    flags: tuple[Flags, Flags],
    *,
    is_shared: bool,
    by_last: bool,
) -> list[tuple[ExchangeSide, ExchangeSide]]:
    """Of the sides of each micro-batch, own and asked, what is in the portion."""
    chosen = []
    for of_rows, shared in zip(rows, flags, strict=True):
        steps = of_rows.lasts if by_last else of_rows.micro_batches
        order, bounds, _ = by_micro_batch(steps, of_rows.counts, len(sides))
        chosen.append(np.split(shared[order] == is_shared, bounds[1:-1]))
    return [(own.only(chosen[0][p]), asked.only(chosen[1][p])) for p, (own, asked) in enumerate(sides)]


def _cut_relay(
    routed: RoutedKeys, shared: _Shared, shapes: RowShapes, device: torch.device, *, is_shared: bool, of_vectors: bool
) -> HierarchicalExchange | None:
    """What crosses inside the host in the portion; rows between stay those of the batch."""
    relay = routed.relay
    if relay is None or shared.within is None:
        return None
    by_last = relay.is_kept and not of_vectors
    sides = [(legs.vectors.own, legs.vectors.asked) for legs in relay.micro_batches] if of_vectors else None
    rows = relay.keys.own, relay.keys.asked
    cut = _cut(sides or relay.gradient_sides, rows, shared.within, is_shared=is_shared, by_last=by_last)
    legs = tuple(within_legs(pair, pair, relay.num_rows[p], shapes, device) for p, pair in enumerate(cut))
    return relay.portion(legs)


def _cut_crossing(side: ExchangeSide, shared: _Shared, is_shared: bool) -> ExchangeSide:
    before = np.concatenate([[0], np.cumsum([len(flags) for flags in shared.owned.values()])])
    flags = np.concatenate(list(shared.owned.values()))[before[side.tables] + side.places]
    return side.only(flags == is_shared)


def _owned(routed: RoutedKeys, shared: _Shared, device: torch.device, is_shared: bool) -> dict[str, RowSelection]:
    """Of the rows that the batch updates."""
    touched = {name: flags[: routed.num_touched[name]] for name, flags in shared.owned.items()}
    return {name: RowSelection.of(np.flatnonzero(flags == is_shared), device) for name, flags in touched.items()}


Vectors = tuple[NDArray[np.int64], torch.Tensor]
"""(n,) keys and their (n, dim) vectors."""


class PrefetchedRows:
    """By step of the batch that will use them. Used by the lane that reads rows, or while no lane is busy."""

    def __init__(self) -> None:
        self._in_flight: dict[int, WorkingSet] = {}
        self._kept: dict[int, dict[str, Vectors]] = {}

    def began(self, working: WorkingSet) -> None:
        """Rows were just read; where they had been read before a stop, they are as they were then."""
        for name, (keys, vectors) in self._kept.pop(working.step, {}).items():
            table = working.tables[name]
            order = np.argsort(keys)
            places = np.searchsorted(keys, table.fetched.keys, sorter=order).clip(max=len(keys) - 1)
            found = np.flatnonzero(keys[order[places]] == table.fetched.keys) if len(keys) else places[:0]
            weight = table.layout.view(table.fetched.rows, "weight")
            weight[torch.from_numpy(found)] = vectors[torch.from_numpy(order[places[found]])].to(weight.device)
        self._in_flight[working.step] = working

    def ended(self, step: int) -> None:
        """The batch of this step needs them no more."""
        self._in_flight.pop(step, None)

    def forget(self) -> None:
        """Every batch from now on reads anew."""
        self._in_flight.clear()
        self._kept.clear()

    def pending(self) -> dict[int, dict[str, Vectors]]:
        """Step to table to what was read for it, in host memory."""
        return {
            step: {
                name: (table.fetched.keys, table.layout.view(table.fetched.rows, "weight").cpu().contiguous())
                for name, table in working.tables.items()
            }
            for step, working in self._in_flight.items()
        }

    def keep(self, step: int, read: Mapping[str, Vectors]) -> None:
        """What `pending` gave before a stop, for the next read of that step; keys may lack, or be others' too."""
        self._kept[step] = dict(read)
