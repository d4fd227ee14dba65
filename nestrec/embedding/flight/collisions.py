"""Rows that two consecutive batches share (collisions), told to the ranks that use them.

Only the owner of a shard sees which keys two batches have in common, over all sources, so it is found there and told to
the sources: a byte for each asked key, in the order in which the keys came. With it every exchange of a batch falls
into two portions: of exclusive rows, and of shared rows. Each row belongs to one portion of the vectors of a batch
(shared with the batch before?) and to one of its gradients (shared with the batch after?), so its sums keep their order
(order of sums).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.distributed.exchange import all_to_all_rows
from nestrec.distributed.topology import Communicator, Topology
from nestrec.embedding.flight.crossing import crossing_rows
from nestrec.embedding.flight.everywhere import Crossings, spread_rows
from nestrec.embedding.flight.legs import Side, by_micro_batch, gradient_legs, vector_leg
from nestrec.embedding.flight.overlap import matching_places
from nestrec.embedding.flight.routing import Routed
from nestrec.embedding.flight.source_keys import KeyRows
from nestrec.embedding.flight.within_host import Relay, flags_within, within_legs
from nestrec.embedding.flight.working_set import ChosenRows
from nestrec.embedding.table import RowShapes

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Portion:
    """One portion of the exchanges of a batch."""

    routed: Routed
    """Of it, only what crosses in the portion's direction."""
    owned: dict[str, ChosenRows]
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


def find_collisions(older: Routed, newer: Routed, topology: Topology, shapes: RowShapes) -> Collisions:
    """Detection on the owner, one exchange of a byte a key back to the sources (one more inside a host). Collective."""
    in_newer, in_older = {}, {}
    for name, keys in older.owned.items():
        places = matching_places(keys, newer.owned[name])
        in_newer[name] = places >= 0
        in_older[name] = np.zeros(len(newer.owned[name]), np.bool_)
        in_older[name][places[places >= 0]] = True
    of_older, of_newer = _tell_sources([(older, in_newer), (newer, in_older)], topology)
    device, holder = next(iter(older.micro_batches[0].index.values())).device, topology.replicas.rank
    return Collisions(
        gradients=Portions(*(_gradients(older, of_older, shapes, device, holder, is_shared=s) for s in (False, True))),
        vectors=Portions(*(_vectors(newer, of_newer, shapes, device, is_shared=s) for s in (False, True))),
        num_shared=sum(int(flags.sum()) for flags in in_older.values()),
        num_rows=sum(len(flags) for flags in in_older.values()),
    )


def _tell_sources(batches: Sequence[tuple[Routed, dict[str, Flags]]], topology: Topology) -> list[_Shared]:
    """What owners have found, told to those who asked, for both batches. Collective."""
    hosts, found = topology.hosts, [_of_asked(routed, flags) for routed, flags in batches]
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


def _of_asked(routed: Routed, of_owned: dict[str, Flags]) -> Flags:
    tables, places = routed.asked.tables, routed.asked.places
    before = np.concatenate([[0], np.cumsum([len(flags) for flags in of_owned.values()])])
    found: Flags = np.concatenate(list(of_owned.values()))[before[tables] + places]
    return found


def _by_rank(counts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Keys of one batch after the other, each in order of rank, to all keys in order of (rank, batch)."""
    ranks = np.concatenate([np.repeat(np.arange(len(c), dtype=np.uint16), c) for c in counts])
    return np.argsort(ranks, kind="stable")


def _vectors(routed: Routed, shared: _Shared, shapes: RowShapes, device: torch.device, *, is_shared: bool) -> Portion:
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
    routed: Routed, shared: _Shared, shapes: RowShapes, device: torch.device, holder: int, *, is_shared: bool
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
    routed: Routed, shared: _Shared, only: Crossings | None
) -> tuple[tuple[KeyRows, KeyRows], tuple[Flags, Flags]]:
    """Keys, own and asked, that cross in a direction, and what is known of them."""
    if only is None:
        return (routed.own, routed.asked), (shared.own, shared.asked)
    rows = routed.own.only(only.own), routed.asked.only(only.asked)
    return rows, (shared.own[only.own], shared.asked[only.asked])


def _cut(
    sides: Sequence[tuple[Side, Side]],
    rows: tuple[KeyRows, KeyRows],
    flags: tuple[Flags, Flags],
    *,
    is_shared: bool,
    by_last: bool,
) -> list[tuple[Side, Side]]:
    """Of the sides of each micro-batch, own and asked, what is in the portion."""
    chosen = []
    for of_rows, shared in zip(rows, flags, strict=True):
        steps = of_rows.lasts if by_last else of_rows.micro_batches
        order, bounds, _ = by_micro_batch(steps, of_rows.counts, len(sides))
        chosen.append(np.split(shared[order] == is_shared, bounds[1:-1]))
    return [(own.only(chosen[0][p]), asked.only(chosen[1][p])) for p, (own, asked) in enumerate(sides)]


def _cut_relay(
    routed: Routed, shared: _Shared, shapes: RowShapes, device: torch.device, *, is_shared: bool, of_vectors: bool
) -> Relay | None:
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


def _cut_crossing(side: Side, shared: _Shared, is_shared: bool) -> Side:
    before = np.concatenate([[0], np.cumsum([len(flags) for flags in shared.owned.values()])])
    flags = np.concatenate(list(shared.owned.values()))[before[side.tables] + side.places]
    return side.only(flags == is_shared)


def _owned(routed: Routed, shared: _Shared, device: torch.device, is_shared: bool) -> dict[str, ChosenRows]:
    """Of the rows that the batch updates."""
    touched = {name: flags[: routed.num_touched[name]] for name, flags in shared.owned.items()}
    return {name: ChosenRows.of(np.flatnonzero(flags == is_shared), device) for name, flags in touched.items()}
