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
class Portion:
    """One portion of the exchanges of a batch."""

    routed: Routed
    """Of it, only what crosses in the portion's direction."""
    rows: list[dict[str, torch.Tensor]]
    """[micro_batch][table] places of its rows among all rows of the exchange, on the source."""
    owned: dict[str, torch.Tensor]
    """Table to the places of its rows in the working set."""


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
    num_older = len(older.micro_batches) * len(older.owned)
    return Collisions(
        gradients=_gradient_portions(older, in_newer, told[:num_older]),
        vectors=_vector_portions(newer, in_older, told[num_older:]),
        num_shared=sum(int(flags.sum()) for flags in in_older.values()),
        num_rows=sum(len(flags) for flags in in_older.values()),
    )


def _legs(routed: Routed, of_owned: dict[str, Flags]) -> list[_Leg]:
    """[micro_batch][table] flattened: the exchanges of vectors, which are in the order of the keys."""
    return [
        (leg, of_owned[name][_working_places(leg)])
        for micro_batch in routed.micro_batches
        for name, leg in micro_batch.tables.items()
    ]


def _working_places(leg: RoutedTable) -> NDArray[np.int32]:
    if leg.working_places is None:
        return np.arange(sum(leg.receive_counts), dtype=np.int32)
    return leg.working_places.cpu().numpy()


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


def _vector_portions(routed: Routed, of_owned: dict[str, Flags], told: Sequence[Flags]) -> Portions:
    device = _device(routed)

    def portion(*, is_shared: bool) -> Portion:
        flags, micro_batches, rows = iter(told), [], []
        for micro_batch in routed.micro_batches:
            cut = {
                name: _cut(leg, next(flags) == is_shared, of_owned[name] == is_shared, device)
                for name, leg in micro_batch.tables.items()
            }
            micro_batches.append(replace(micro_batch, tables={name: leg for name, (leg, _) in cut.items()}))
            rows.append({name: places for name, (_, places) in cut.items()})
        return Portion(
            replace(routed, micro_batches=tuple(micro_batches)), rows, _owned_places(routed, of_owned, is_shared)
        )

    return Portions(portion(is_shared=False), portion(is_shared=True))


def _gradient_portions(routed: Routed, of_owned: dict[str, Flags], told: Sequence[Flags]) -> Portions:
    by_micro_batch = [
        dict(zip(micro_batch.tables, told[i * len(micro_batch.tables) :], strict=False))
        for i, micro_batch in enumerate(routed.micro_batches)
    ]
    # With the window cache a key is asked for once: the answers of all micro-batches, in order, are in the order of the
    # cache.
    cached = {name: np.concatenate([micro_batch[name] for micro_batch in by_micro_batch]) for name in routed.cache_rows}
    device = _device(routed)

    def portion(*, is_shared: bool) -> Portion:
        micro_batches, rows = [], []
        for p, micro_batch in enumerate(routed.micro_batches):
            flags = {
                n: cached[n][micro_batch.leaving[n].cpu().numpy()] if cached else by_micro_batch[p][n]
                for n in micro_batch.gradients
            }
            cut = {
                n: _cut(leg, flags[n] == is_shared, of_owned[n] == is_shared, device)
                for n, leg in micro_batch.gradients.items()
            }
            crossing = {
                n: tuple(_chosen(places, of_owned[n], is_shared) for places in holders)
                for n, holders in micro_batch.crossing.items()
            }
            micro_batches.append(
                replace(micro_batch, gradients={n: leg for n, (leg, _) in cut.items()}, crossing=crossing)
            )
            rows.append({n: places for n, (_, places) in cut.items()})
        return Portion(
            replace(routed, micro_batches=tuple(micro_batches)), rows, _owned_places(routed, of_owned, is_shared)
        )

    return Portions(portion(is_shared=False), portion(is_shared=True))


def _cut(leg: RoutedTable, mine: Flags, of_owned: Flags, device: torch.device) -> tuple[RoutedTable, torch.Tensor]:
    """The flagged piece of an exchange, and its places in the whole on the source."""
    working_places = _working_places(leg)
    asked = of_owned[working_places]
    send, receive = _counts(mine, leg.send_counts), _counts(asked, leg.receive_counts)
    half = None
    if leg.half is not None:
        flags = leg.half.flags
        half = half_rows((flags[0][mine], send), (flags[1][asked], receive), working_places[asked], device)
    cut = RoutedTable(leg.keys[mine], send, receive, to_device(working_places[asked], device), half)
    return cut, to_device(np.flatnonzero(mine), device)


def _device(routed: Routed) -> torch.device:
    return next(iter(routed.micro_batches[0].index.values())).device


def _counts(flags: Flags, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(piece.sum()) for piece in np.split(flags, np.cumsum(sizes)[:-1]))


def _chosen(places: torch.Tensor, of_owned: Flags, is_shared: bool) -> torch.Tensor:
    host = places.cpu().numpy()
    return to_device(host[of_owned[host] == is_shared], places.device)


def _owned_places(routed: Routed, of_owned: dict[str, Flags], is_shared: bool) -> dict[str, torch.Tensor]:
    """Of the rows that the batch updates."""
    device = _device(routed)
    chosen = {name: np.flatnonzero(flags[: routed.num_touched[name]] == is_shared) for name, flags in of_owned.items()}
    return {name: to_device(places, device) for name, places in chosen.items()}
