"""Rows that two consecutive batches share (collisions), told to the ranks that use them.

Only the owner of a shard sees which keys two batches have in common, over all sources, so it is found there and told to
the sources: a byte for each asked key, in the order in which the keys came. With it every exchange of a batch falls
into two halves: of exclusive rows, and of shared rows. Each row belongs to one half of the vectors of a batch (shared
with the batch before?) and to one half of its gradients (shared with the batch after?), so its sums keep their order
(order of sums).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.transfer import to_device
from nestrec.distributed.exchange import all_to_all_rows
from nestrec.distributed.topology import Communicator
from nestrec.embedding.flight.half_rows import half_rows
from nestrec.embedding.flight.overlap import matching_places
from nestrec.embedding.flight.routing import Routed, RoutedTable

Flags = NDArray[np.bool_]
_Leg = tuple[RoutedTable, Flags]
"""Keys of one exchange, and for each the answer of its owner, in the order in which they were asked from it."""


@dataclass(frozen=True, slots=True)
class Half:
    """One half of the exchanges of a batch."""

    routed: Routed
    """Of it, only what crosses in the half's direction."""
    rows: list[dict[str, torch.Tensor]]
    """[part][table] places of its rows among all rows of the exchange, on the source."""
    owned: dict[str, torch.Tensor]
    """Table to the places of its rows in the working set."""


@dataclass(frozen=True, slots=True)
class Halves:
    """All exchanges of a batch in one direction."""

    exclusive: Half
    shared: Half


@dataclass(frozen=True, slots=True)
class Collisions:
    """What two consecutive batches have in common."""

    gradients: Halves
    """Of the older batch."""
    vectors: Halves
    """Of the newer batch."""
    num_shared: int
    """Rows of this shard in both."""
    num_rows: int
    """Rows of the newer batch on this shard."""


def find_collisions(older: Routed, newer: Routed, shards: Communicator) -> Collisions:
    """Detection on the owner, one exchange of a byte a key back to the sources. Collective."""
    in_newer, in_older = {}, {}
    for name, keys in older.owned.items():
        places = matching_places(keys, newer.owned[name])
        in_newer[name] = places >= 0
        in_older[name] = np.zeros(len(newer.owned[name]), np.bool_)
        in_older[name][places[places >= 0]] = True
    legs = [*_legs(older, in_newer), *_legs(newer, in_older)]
    told = _tell_sources(legs, shards)
    num_older = len(older.parts) * len(older.owned)
    return Collisions(
        gradients=_gradient_halves(older, in_newer, told[:num_older]),
        vectors=_vector_halves(newer, in_older, told[num_older:]),
        num_shared=sum(int(flags.sum()) for flags in in_older.values()),
        num_rows=sum(len(flags) for flags in in_older.values()),
    )


def _legs(routed: Routed, of_owned: dict[str, Flags]) -> list[_Leg]:
    """[part][table] flattened: the exchanges of vectors, which are in the order of the keys."""
    return [(leg, of_owned[name][_slots(leg)]) for part in routed.parts for name, leg in part.tables.items()]


def _slots(leg: RoutedTable) -> NDArray[np.int32]:
    if leg.slots is None:
        return np.arange(sum(leg.receive_counts), dtype=np.int32)
    return leg.slots.cpu().numpy()


def _tell_sources(legs: Sequence[_Leg], shards: Communicator) -> list[Flags]:
    """For each exchange the answers to this rank's keys, in their order. Collective."""
    answers = [np.split(flags, np.cumsum(leg.receive_counts)[:-1]) for leg, flags in legs]
    message = np.concatenate([answer[r] for r in range(shards.size) for answer in answers])
    sent = [sum(leg.receive_counts[r] for leg, _ in legs) for r in range(shards.size)]
    comes = [sum(leg.send_counts[r] for leg, _ in legs) for r in range(shards.size)]
    received = all_to_all_rows(shards, torch.from_numpy(message), sent, comes).numpy()
    sizes = [leg.send_counts[r] for r in range(shards.size) for leg, _ in legs]
    pieces = np.split(received, np.cumsum(sizes)[:-1])
    return [np.concatenate(pieces[i :: len(legs)]) for i in range(len(legs))]


def _vector_halves(routed: Routed, of_owned: dict[str, Flags], told: Sequence[Flags]) -> Halves:
    device = _device(routed)

    def half(*, is_shared: bool) -> Half:
        flags, parts, rows = iter(told), [], []
        for part in routed.parts:
            cut = {
                name: _cut(leg, next(flags) == is_shared, of_owned[name] == is_shared, device)
                for name, leg in part.tables.items()
            }
            parts.append(replace(part, tables={name: leg for name, (leg, _) in cut.items()}))
            rows.append({name: places for name, (_, places) in cut.items()})
        return Half(replace(routed, parts=tuple(parts)), rows, _owned_places(routed, of_owned, is_shared))

    return Halves(half(is_shared=False), half(is_shared=True))


def _gradient_halves(routed: Routed, of_owned: dict[str, Flags], told: Sequence[Flags]) -> Halves:
    by_part = [
        dict(zip(part.tables, told[i * len(part.tables) :], strict=False)) for i, part in enumerate(routed.parts)
    ]
    # With the window cache a key is asked for once: the answers of all parts, in order, are in the order of the cache.
    cached = {name: np.concatenate([part[name] for part in by_part]) for name in routed.cache_rows}
    device = _device(routed)

    def half(*, is_shared: bool) -> Half:
        parts, rows = [], []
        for p, part in enumerate(routed.parts):
            flags = {n: cached[n][part.leaving[n].cpu().numpy()] if cached else by_part[p][n] for n in part.gradients}
            cut = {
                n: _cut(leg, flags[n] == is_shared, of_owned[n] == is_shared, device)
                for n, leg in part.gradients.items()
            }
            crossing = {
                n: tuple(_chosen(places, of_owned[n], is_shared) for places in holders)
                for n, holders in part.crossing.items()
            }
            parts.append(replace(part, gradients={n: leg for n, (leg, _) in cut.items()}, crossing=crossing))
            rows.append({n: places for n, (_, places) in cut.items()})
        return Half(replace(routed, parts=tuple(parts)), rows, _owned_places(routed, of_owned, is_shared))

    return Halves(half(is_shared=False), half(is_shared=True))


def _cut(leg: RoutedTable, mine: Flags, of_owned: Flags, device: torch.device) -> tuple[RoutedTable, torch.Tensor]:
    """The flagged part of an exchange, and its places in the whole on the source."""
    slots = _slots(leg)
    asked = of_owned[slots]
    send, receive = _counts(mine, leg.send_counts), _counts(asked, leg.receive_counts)
    half = None
    if leg.half is not None:
        flags = leg.half.flags
        half = half_rows((flags[0][mine], send), (flags[1][asked], receive), slots[asked], device)
    cut = RoutedTable(leg.keys[mine], send, receive, to_device(slots[asked], device), half)
    return cut, to_device(np.flatnonzero(mine), device)


def _device(routed: Routed) -> torch.device:
    return next(iter(routed.parts[0].index.values())).device


def _counts(flags: Flags, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(part.sum()) for part in np.split(flags, np.cumsum(sizes)[:-1]))


def _chosen(places: torch.Tensor, of_owned: Flags, is_shared: bool) -> torch.Tensor:
    host = places.cpu().numpy()
    return to_device(host[of_owned[host] == is_shared], places.device)


def _owned_places(routed: Routed, of_owned: dict[str, Flags], is_shared: bool) -> dict[str, torch.Tensor]:
    """Of the rows that the batch updates."""
    device = _device(routed)
    chosen = {name: np.flatnonzero(flags[: routed.num_touched[name]] == is_shared) for name, flags in of_owned.items()}
    return {name: to_device(places, device) for name, places in chosen.items()}
