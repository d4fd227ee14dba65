"""Rows that consecutive batches share: collision detection, shared-row copy, and state of prefetched rows.

Collisions. Only the owner of a shard sees which keys two consecutive batches have in common over all source ranks. It
detects them and sends one byte per requested key back to the sources, in the order in which the keys were received.
Every exchange of a batch is then split into two portions: exclusive rows and shared rows. Each row belongs to one
portion of the vectors of a batch (shared with the previous batch or not) and to one portion of its gradients (shared
with the next batch or not), so the order of the summands of each gradient sum does not change.

Shared-row copy. If two batches in flight share rows, those rows are copied from the older working set to the newer one.
The set of rows depends only on keys, so it is computed while the older batch still trains. Between the update of the
older batch and the first read of the newer one, only one copy of complete rows remains, weight and optimizer state
together.

Prefetched rows. Schedules with staleness (`stale`, `semi_async`) read the rows of the next batches before the update of
the current batch. Checkpoints save these rows, because a resumed run that read them again would get newer values than
an uninterrupted run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.cuda import to_device
from nestrec.base.random import mix64_jit
from nestrec.base.thread_team import parallel_for
from nestrec.distributed.collectives import all_to_all_rows
from nestrec.distributed.topology import Communicator, Topology
from nestrec.embedding.routing.deduplicated_keys import KeyRows
from nestrec.embedding.routing.hierarchical_exchange import HierarchicalExchange, intra_host_exchange, intra_host_flags
from nestrec.embedding.routing.key_routing import RoutedKeys
from nestrec.embedding.routing.replica_reduction import replica_gradient_rows
from nestrec.embedding.routing.replicated_routing import RemoteKeys, gradient_broadcast_rows
from nestrec.embedding.routing.row_exchange import ExchangeSide, by_micro_batch, gradient_exchanges, vector_exchange
from nestrec.embedding.routing.working_set import RowSelection, WorkingSet
from nestrec.embedding.table_config import RowShapes
from nestrec.embedding.table_shard import FetchedRows
from nestrec.ops.embedding.row_copy import move_rows


@dataclass(frozen=True, slots=True)
class TableOverlap:
    """Rows of one table that two batches share."""

    older: torch.Tensor
    """Row indices in the older working set."""
    newer: torch.Tensor
    """Row indices of the same keys in the newer working set."""
    unshared_slots: NDArray[np.int64]
    """Slots of the rows of the older batch; -1 for shared rows."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Rows of all tables that two batches share."""

    tables: dict[str, TableOverlap]

    def num_rows_of(self, table: str) -> int:
        return len(self.tables[table].older)

    @property
    def num_rows(self) -> int:
        return sum(len(table.older) for table in self.tables.values())


def overlap_of(older: WorkingSet, newer: WorkingSet) -> Overlap:
    """Return the rows in both working sets.

    A row that was deleted and is created again by the newer batch is not shared, although its key is in both.
    """
    pairs = {name: (older.tables[name].fetched, table.fetched) for name, table in newer.tables.items()}
    return Overlap({name: _table_overlap(a, b) for name, (a, b) in pairs.items()})


def copy_shared_rows(older: WorkingSet, newer: WorkingSet, shared: Overlap) -> int:
    """Copy the shared rows that the older batch has updated to the newer working set; return their number."""
    for name, table in shared.tables.items():
        if len(table.older):
            source = older.tables[name]
            target = newer.tables[name].fetched.rows
            _copy_rows(source.fetched.rows, table.older, target, table.newer)
    return shared.num_rows


def num_common_rows(older: RoutedKeys, newer: WorkingSet) -> int:
    """Return the number of keys of this shard that are in both batches."""
    keys = {name: table.fetched.keys for name, table in newer.tables.items()}
    return sum(int((matching_indices(owned, keys[name]) >= 0).sum()) for name, owned in older.owned.items())


def matching_indices(
    keys: NDArray[np.int64], others: NDArray[np.int64], is_excluded: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """Return the index of each key in `others`, -1 if it is missing or excluded. Both lists must have unique keys."""
    indices = np.empty(len(keys), np.int64)
    _join(keys, others, np.zeros(len(others), np.bool_) if is_excluded is None else is_excluded, indices)
    return indices


def _table_overlap(older: FetchedRows, newer: FetchedRows) -> TableOverlap:
    indices = matching_indices(older.keys, newer.keys, newer.is_new)
    shared = np.flatnonzero(indices >= 0)
    device = newer.rows.device
    slots = np.where(indices >= 0, -1, older.slots)
    return TableOverlap(to_device(shared, device), to_device(indices[shared], device), slots)


def _copy_rows(source: torch.Tensor, older: torch.Tensor, target: torch.Tensor, newer: torch.Tensor) -> None:
    if source.device.type != "cpu":
        move_rows(source, target, older, newer)
        return
    arrays = source.numpy(), older.numpy(), target.numpy(), newer.numpy()
    parallel_for(len(older), len(older), lambda a, b: _copy(*arrays, a, b))


@njit(cache=True, nogil=True)
def _copy(source, older, target, newer, first, end):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for i in range(first, end):
        for j in range(source.shape[1]):
            target[newer[i], j] = source[older[i], j]


@njit(cache=True, nogil=True)
def _join(keys, others, is_excluded, indices):  # type: ignore[no-untyped-def]
    """Set indices[i] = j if keys[i] == others[j] and j is not excluded, else -1. Both lists must have unique keys."""
    size = 16
    while size < 2 * len(others):
        size *= 2
    mask = np.int64(size - 1)
    table = np.full(size, -1, np.int64)
    for j in range(len(others)):
        if not is_excluded[j]:
            position = np.int64(mix64_jit(np.uint64(others[j])) >> np.uint64(4)) & mask
            while table[position] >= 0:
                position = (position + 1) & mask
            table[position] = j
    for i in range(len(keys)):
        position = np.int64(mix64_jit(np.uint64(keys[i])) >> np.uint64(4)) & mask
        while table[position] >= 0 and others[table[position]] != keys[i]:
            position = (position + 1) & mask
        indices[i] = table[position]


Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Portion:
    """A portion of the exchanges of a batch in one direction."""

    routed: RoutedKeys
    """Exchange plan of the batch, restricted to the rows of the portion in its direction."""
    owned: dict[str, RowSelection]
    """Table name to the rows of the portion in the working set."""


@dataclass(frozen=True, slots=True)
class Portions:
    """All exchanges of a batch in one direction, in two portions."""

    exclusive: Portion
    shared: Portion


@dataclass(frozen=True, slots=True)
class Collisions:
    """Collisions of two consecutive batches, with the exchange plans that follow from them."""

    gradients: Portions
    """Gradient exchanges of the older batch."""
    vectors: Portions
    """Vector exchanges of the newer batch."""
    num_shared: int
    """Number of rows of this shard in both batches."""
    num_rows: int
    """Number of rows of the newer batch on this shard."""


@dataclass(frozen=True, slots=True)
class _SharedFlags:
    """Flags of the rows of a batch that the neighboring batch uses."""

    owned: dict[str, Flags]
    """Table name to flags of the rows of the working set."""
    requested: Flags
    """Flags of the keys requested from this shard, in the order received."""
    own: Flags
    """Flags of the keys that this rank requests from owners, in the order sent."""
    intra_host: tuple[Flags, Flags] | None = None
    """Own and requested flags of the intra-host exchange, with hierarchical all-to-all."""


def find_collisions(older: RoutedKeys, newer: RoutedKeys, topology: Topology, shapes: RowShapes) -> Collisions:
    """Find the rows that two consecutive batches share. Collective.

    The owner detects them and returns one byte per key to the sources (with one more exchange inside a host).
    """
    in_newer, in_older = {}, {}
    for name, keys in older.owned.items():
        indices = matching_indices(keys, newer.owned[name])
        in_newer[name] = indices >= 0
        in_older[name] = np.zeros(len(newer.owned[name]), np.bool_)
        in_older[name][indices[indices >= 0]] = True
    of_older, of_newer = _send_flags_to_sources([(older, in_newer), (newer, in_older)], topology)
    device = next(iter(older.micro_batches[0].index.values())).device
    replica = topology.replicas.rank
    return Collisions(
        gradients=Portions(*(_gradients(older, of_older, shapes, device, replica, is_shared=s) for s in (False, True))),
        vectors=Portions(*(_vectors(newer, of_newer, shapes, device, is_shared=s) for s in (False, True))),
        num_shared=sum(int(flags.sum()) for flags in in_older.values()),
        num_rows=sum(len(flags) for flags in in_older.values()),
    )


def _send_flags_to_sources(
    batches: Sequence[tuple[RoutedKeys, dict[str, Flags]]], topology: Topology
) -> list[_SharedFlags]:
    """Send the flags detected by the owners to the requesting ranks, for both batches. Collective."""
    hosts = topology.hosts
    matches = [_flags_of_requested(routed, flags) for routed, flags in batches]
    rows = [(routed.own, routed.requested) for routed, _ in batches]
    own = _send_flags(rows, matches, topology.keys if hosts is None else hosts.keys_between)
    shared = [_SharedFlags(flags, a, o) for (_, flags), a, o in zip(batches, matches, own, strict=True)]
    if hosts is None:
        return shared
    relays = [routed.hierarchical for routed, _ in batches if routed.hierarchical is not None]
    inside = [intra_host_flags(r, routed.own, o) for r, (routed, _), o in zip(relays, batches, own, strict=True)]
    flags_per_batch = _send_flags([(r.keys.own, r.keys.requested) for r in relays], inside, hosts.keys_within)
    return [
        replace(s, intra_host=(own_flags, requested))
        for s, own_flags, requested in zip(shared, flags_per_batch, inside, strict=True)
    ]


def _send_flags(rows: Sequence[tuple[KeyRows, KeyRows]], matches: Sequence[Flags], ranks: Communicator) -> list[Flags]:
    """Send the flags of requested keys to the requesting ranks, in one message. Collective.

    Args:
        rows: Own and requested keys of each batch.
        matches: Flags of the requested keys of each batch.
        ranks: Ranks that exchange the flags.

    Returns:
        Flags of the own keys of both batches.
    """
    sent: NDArray[np.int64] = np.sum([requested.counts for _, requested in rows], axis=0)
    num_received: NDArray[np.int64] = np.sum([own.counts for own, _ in rows], axis=0)
    message = np.concatenate(matches)[_by_rank([requested.counts for _, requested in rows])]
    received = all_to_all_rows(ranks, torch.from_numpy(message), sent.tolist(), num_received.tolist()).numpy()
    own = np.empty(len(received), np.bool_)
    own[_by_rank([own.counts for own, _ in rows])] = received
    return np.split(own, [int(rows[0][0].counts.sum())])


def _flags_of_requested(routed: RoutedKeys, of_owned: dict[str, Flags]) -> Flags:
    tables = routed.requested.tables
    indices = routed.requested.indices
    before = np.concatenate([[0], np.cumsum([len(flags) for flags in of_owned.values()])])
    matches: Flags = np.concatenate(list(of_owned.values()))[before[tables] + indices]
    return matches


def _by_rank(counts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the order that sorts the concatenated keys of the batches, each ordered by rank, by (rank, batch)."""
    ranks = np.concatenate([np.repeat(np.arange(len(c), dtype=np.uint16), c) for c in counts])
    return np.argsort(ranks, kind="stable")


def _vectors(
    routed: RoutedKeys, shared: _SharedFlags, shapes: RowShapes, device: torch.device, *, is_shared: bool
) -> Portion:
    sides = [(micro_batch.vectors.own, micro_batch.vectors.requested) for micro_batch in routed.micro_batches]
    both = _exchanged_rows(routed, shared, None if routed.replicated is None else routed.replicated.vectors)
    selected_sides = _select_sides(sides, *both, is_shared=is_shared, by_last=False)
    micro_batches = [
        replace(micro_batch, vectors=vector_exchange(*selected_sides[p], shapes, device, is_in_order=False))
        for p, micro_batch in enumerate(routed.micro_batches)
    ]
    hierarchical = _select_intra_host(routed, shared, shapes, device, is_shared=is_shared, of_vectors=True)
    portion = replace(routed, micro_batches=tuple(micro_batches), hierarchical=hierarchical)
    return Portion(portion, _owned_rows(routed, shared, device, is_shared))


def _gradients(
    routed: RoutedKeys, shared: _SharedFlags, shapes: RowShapes, device: torch.device, replica: int, *, is_shared: bool
) -> Portion:
    by_last = routed.num_cache_rows is not None
    both = _exchanged_rows(routed, shared, None if routed.replicated is None else routed.replicated.gradients)
    selected_sides = _select_sides(routed.gradient_sides, *both, is_shared=is_shared, by_last=by_last)
    num_owned = np.array([len(keys) for keys in routed.owned.values()])
    micro_batches = []
    for p, micro_batch in enumerate(routed.micro_batches):
        exchanges = gradient_exchanges(*selected_sides[p], shapes, num_owned, device, is_in_order=False)
        sides = tuple(_select_replica_side(side, shared, is_shared) for side in micro_batch.replica_sides)
        spread = gradient_broadcast_rows(sides, shapes, device) if routed.replicated is not None else None
        replica_rows = replica_gradient_rows(sides, shapes, device, replica) if spread is None else spread
        micro_batches.append(replace(micro_batch, gradients=exchanges, replica_rows=replica_rows, replica_sides=sides))
    hierarchical = _select_intra_host(routed, shared, shapes, device, is_shared=is_shared, of_vectors=False)
    portion = replace(routed, micro_batches=tuple(micro_batches), hierarchical=hierarchical)
    return Portion(portion, _owned_rows(routed, shared, device, is_shared))


def _exchanged_rows(
    routed: RoutedKeys, shared: _SharedFlags, only: RemoteKeys | None
) -> tuple[tuple[KeyRows, KeyRows], tuple[Flags, Flags]]:
    """Return the keys, own and requested, that are exchanged in a direction, and their flags."""
    if only is None:
        return (routed.own, routed.requested), (shared.own, shared.requested)
    rows = routed.own.select(only.own), routed.requested.select(only.requested)
    return rows, (shared.own[only.own], shared.requested[only.requested])


def _select_sides(
    sides: Sequence[tuple[ExchangeSide, ExchangeSide]],
    rows: tuple[KeyRows, KeyRows],
    flags: tuple[Flags, Flags],
    *,
    is_shared: bool,
    by_last: bool,
) -> list[tuple[ExchangeSide, ExchangeSide]]:
    """Return the part of each micro-batch's sides, own and requested, that belongs to the portion."""
    chosen = []
    for of_rows, shared in zip(rows, flags, strict=True):
        steps = of_rows.lasts if by_last else of_rows.micro_batches
        order, bounds, _ = by_micro_batch(steps, of_rows.counts, len(sides))
        chosen.append(np.split(shared[order] == is_shared, bounds[1:-1]))
    return [(own.select(chosen[0][p]), requested.select(chosen[1][p])) for p, (own, requested) in enumerate(sides)]


def _select_intra_host(
    routed: RoutedKeys,
    shared: _SharedFlags,
    shapes: RowShapes,
    device: torch.device,
    *,
    is_shared: bool,
    of_vectors: bool,
) -> HierarchicalExchange | None:
    """Return the intra-host exchange of the portion; the rows of the relaying rank stay those of the batch."""
    hierarchical = routed.hierarchical
    if hierarchical is None or shared.intra_host is None:
        return None
    by_last = hierarchical.has_window_cache and not of_vectors
    sides = (
        [(exchanges.vectors.own, exchanges.vectors.requested) for exchanges in hierarchical.micro_batches]
        if of_vectors
        else None
    )
    rows = hierarchical.keys.own, hierarchical.keys.requested
    selected_sides = _select_sides(
        sides or hierarchical.gradient_sides, rows, shared.intra_host, is_shared=is_shared, by_last=by_last
    )
    exchanges = tuple(
        intra_host_exchange(pair, pair, hierarchical.num_rows[p], shapes, device)
        for p, pair in enumerate(selected_sides)
    )
    return hierarchical.portion(exchanges)


def _select_replica_side(side: ExchangeSide, shared: _SharedFlags, is_shared: bool) -> ExchangeSide:
    before = np.concatenate([[0], np.cumsum([len(flags) for flags in shared.owned.values()])])
    flags = np.concatenate(list(shared.owned.values()))[before[side.tables] + side.indices]
    return side.select(flags == is_shared)


def _owned_rows(
    routed: RoutedKeys, shared: _SharedFlags, device: torch.device, is_shared: bool
) -> dict[str, RowSelection]:
    """Select the rows of the portion among those that the batch updates."""
    touched = {name: flags[: routed.num_updated[name]] for name, flags in shared.owned.items()}
    return {name: RowSelection.of(np.flatnonzero(flags == is_shared), device) for name, flags in touched.items()}


Vectors = tuple[NDArray[np.int64], torch.Tensor]
"""(n,) keys and their (n, dim) embedding vectors."""


class PrefetchedRows:
    """Prefetched rows by the step of the batch that will use them.

    Not thread-safe: use it from the lane that reads rows, or while no lane is busy.
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, WorkingSet] = {}
        self._restored: dict[int, dict[str, Vectors]] = {}

    def record_read(self, working: WorkingSet) -> None:
        """Record rows that were just read; rows restored from a checkpoint replace the values read now."""
        for name, (keys, vectors) in self._restored.pop(working.step, {}).items():
            table = working.tables[name]
            order = np.argsort(keys)
            indices = np.searchsorted(keys, table.fetched.keys, sorter=order).clip(max=len(keys) - 1)
            matches = np.flatnonzero(keys[order[indices]] == table.fetched.keys) if len(keys) else indices[:0]
            weight = table.layout.view(table.fetched.rows, "weight")
            weight[torch.from_numpy(matches)] = vectors[torch.from_numpy(order[indices[matches]])].to(weight.device)
        self._in_flight[working.step] = working

    def release(self, step: int) -> None:
        """Release the rows of the batch of this step."""
        self._in_flight.pop(step, None)

    def clear(self) -> None:
        """Discard all rows; later batches read them from the stores."""
        self._in_flight.clear()
        self._restored.clear()

    def pending(self) -> dict[int, dict[str, Vectors]]:
        """Return the prefetched vectors in host memory, by step and table name, for a checkpoint."""
        return {
            step: {
                name: (table.fetched.keys, table.layout.view(table.fetched.rows, "weight").cpu().contiguous())
                for name, table in working.tables.items()
            }
            for step, working in self._in_flight.items()
        }

    def restore(self, step: int, read: Mapping[str, Vectors]) -> None:
        """Restore the result of `pending` of a step for its next read; keys may be missing or superfluous."""
        self._restored[step] = dict(read)
