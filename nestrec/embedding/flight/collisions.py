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
from nestrec.distributed.topology import Communicator
from nestrec.embedding.flight.legs import Side, by_micro_batch, gradient_legs, vector_leg
from nestrec.embedding.flight.overlap import matching_places
from nestrec.embedding.flight.routing import Routed, crossing_rows
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
    """Of the keys that this rank asks for, as it asks."""


def find_collisions(older: Routed, newer: Routed, shards: Communicator, shapes: RowShapes) -> Collisions:
    """Detection on the owner, one exchange of a byte a key back to the sources. Collective."""
    in_newer, in_older = {}, {}
    for name, keys in older.owned.items():
        places = matching_places(keys, newer.owned[name])
        in_newer[name] = places >= 0
        in_older[name] = np.zeros(len(newer.owned[name]), np.bool_)
        in_older[name][places[places >= 0]] = True
    of_older, of_newer = _tell_sources([(older, in_newer), (newer, in_older)], shards)
    device = next(iter(older.micro_batches[0].index.values())).device
    return Collisions(
        gradients=Portions(*(_gradients(older, of_older, shapes, device, is_shared=s) for s in (False, True))),
        vectors=Portions(*(_vectors(newer, of_newer, shapes, device, is_shared=s) for s in (False, True))),
        num_shared=sum(int(flags.sum()) for flags in in_older.values()),
        num_rows=sum(len(flags) for flags in in_older.values()),
    )


def _tell_sources(batches: Sequence[tuple[Routed, dict[str, Flags]]], shards: Communicator) -> list[_Shared]:
    """What owners have found, told to those who asked, for both batches in one message. Collective."""
    asked = [_of_asked(routed, flags) for routed, flags in batches]
    sent: NDArray[np.int64] = np.sum([routed.asked.counts for routed, _ in batches], axis=0)
    comes: NDArray[np.int64] = np.sum([routed.own.counts for routed, _ in batches], axis=0)
    order = _by_rank([routed.asked.counts for routed, _ in batches])
    message = np.concatenate(asked)[order]
    received = all_to_all_rows(shards, torch.from_numpy(message), sent.tolist(), comes.tolist()).numpy()
    own = np.empty(len(received), np.bool_)
    own[_by_rank([routed.own.counts for routed, _ in batches])] = received
    of_batches = np.split(own, [int(batches[0][0].own.counts.sum())])
    return [_Shared(flags, a, o) for (_, flags), a, o in zip(batches, asked, of_batches, strict=True)]


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
    own, asked = _by_leg(routed, shared, is_shared=is_shared, by_last=False)
    micro_batches = []
    for p, micro_batch in enumerate(routed.micro_batches):
        leg = micro_batch.vectors
        cut = leg.own.only(own[p]), leg.asked.only(asked[p])
        micro_batches.append(replace(micro_batch, vectors=vector_leg(*cut, shapes, device, is_in_order=False)))
    return Portion(replace(routed, micro_batches=tuple(micro_batches)), _owned(routed, shared, device, is_shared))


def _gradients(routed: Routed, shared: _Shared, shapes: RowShapes, device: torch.device, *, is_shared: bool) -> Portion:
    own, asked = _by_leg(routed, shared, is_shared=is_shared, by_last=routed.cache_rows is not None)
    num_owned = np.array([len(keys) for keys in routed.owned.values()])
    micro_batches = []
    for p, micro_batch in enumerate(routed.micro_batches):
        mine, theirs = routed.gradient_sides[p]
        cut = mine.only(own[p]), theirs.only(asked[p])
        legs = gradient_legs(*cut, shapes, num_owned, device, is_in_order=False)
        sides = tuple(_cut_crossing(side, shared, is_shared) for side in micro_batch.crossing_sides)
        crossing = crossing_rows(sides, shapes, device)
        micro_batches.append(replace(micro_batch, gradients=legs, crossing=crossing, crossing_sides=sides))
    return Portion(replace(routed, micro_batches=tuple(micro_batches)), _owned(routed, shared, device, is_shared))


def _by_leg(routed: Routed, shared: _Shared, *, is_shared: bool, by_last: bool) -> tuple[list[Flags], list[Flags]]:
    """For each micro-batch which of its rows, own and asked, are in the portion."""
    found = []
    for rows, flags in ((routed.own, shared.own), (routed.asked, shared.asked)):
        steps = rows.lasts if by_last else rows.micro_batches
        order, bounds, _ = by_micro_batch(steps, rows.counts, len(routed.micro_batches))
        found.append(np.split(flags[order] == is_shared, bounds[1:-1]))
    return found[0], found[1]


def _cut_crossing(side: Side, shared: _Shared, is_shared: bool) -> Side:
    before = np.concatenate([[0], np.cumsum([len(flags) for flags in shared.owned.values()])])
    flags = np.concatenate(list(shared.owned.values()))[before[side.tables] + side.places]
    return side.only(flags == is_shared)


def _owned(routed: Routed, shared: _Shared, device: torch.device, is_shared: bool) -> dict[str, ChosenRows]:
    """Of the rows that the batch updates."""
    touched = {name: flags[: routed.num_touched[name]] for name, flags in shared.owned.items()}
    return {name: ChosenRows.of(np.flatnonzero(flags == is_shared), device) for name, flags in touched.items()}
