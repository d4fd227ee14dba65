"""What the operations of a step cost: amounts of a rank, lines of a profile, and the links that they cross.

Costs that vary as measured ones do: each time another of the ratios that were seen between a time and its line.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.planning.hardware_profile import Group, LinearCost, Links, Profile, StoreKind, TransferTime
from nestrec.planning.simulator.program_replay import Cost, Costs, Mesh, Scope
from nestrec.planning.workload import KEY_BYTES, Loads

_Operation = Callable[[int, int | None], Cost]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Who exchanges with whom."""

    shards: Group
    replicas: Group
    everyone: Group

    @staticmethod
    def of(mesh: Mesh) -> "Sizes":
        return Sizes(Group(mesh.num_shards), Group(mesh.num_replicas, mesh.num_shards), Group(mesh.world))


class StepCosts:
    """The `Costs` of replays. hands_over: rows that the next batch holds are not written back."""

    def __init__(
        self, loads: Loads, profile: Profile, links: Links, mesh: Mesh, *, store: StoreKind, hands_over: bool
    ) -> None:
        self._loads = loads
        self._profile = profile
        self._links = links
        self._sizes = Sizes.of(mesh)
        self._store = profile.store(store)
        self._hands_over = hands_over
        self._known: dict[tuple[str, int, int | None], Cost] = {}
        self._operations: dict[str, _Operation] = {
            "deduplicate": lambda p, n: self._work(profile.deduplicate, loads.keys[p]),
            "exchange_keys": self._exchange_keys,
            "arrange": lambda p, n: self._work(profile.arrange, loads.asked[p].sum(axis=1)),
            "fetch": lambda p, n: self._work(self._store.fetch, loads.row_bytes[p]),
            "read_ahead": lambda p, n: self._work(self._store.fetch, loads.row_bytes[p]),
            "exchange_vectors": self._exchange_vectors,
            "forward_backward": self._forward_backward,
            "exchange_gradients": self._exchange_gradients,
            "add_gradients": lambda p, n: self._work(profile.add_gradients, loads.summed_bytes[p][:, n]),
            "sum_over_holders": self._sum_over_holders,
            "update_rows": lambda p, n: self._work(profile.update_rows, loads.row_bytes[p]),
            "write_back": self._write_back,
            "train.embedding.collisions": self._collisions,
            "train.embedding.intersect": lambda p, n: self._work(profile.intersect, loads.rows[p]),
            "train.embedding.copy": lambda p, n: self._work(profile.copy, loads.shared_bytes[p]),
            "dense_reduce": self._dense_reduce,
            "dense_apply": lambda p, n: self._work(profile.dense_apply, loads.dense_bytes),
        }

    def of(self, operation: str, step: int, micro_batch: int | None) -> Cost:
        name, _, portion = operation.partition(":")
        if name not in self._operations:
            return Cost()
        place = (operation, self._loads.place(step), micro_batch)
        if place not in self._known:
            whole = self._operations[name](place[1], micro_batch)
            self._known[place] = self._portion_of(whole, place[1], portion) if portion else whole
        return self._known[place]

    def _portion_of(self, cost: Cost, p: int, portion: str) -> Cost:
        """Of the rows that the neighbouring batch shares, or of the others."""
        shared = self._loads.shared_rows[p] / np.maximum(self._loads.rows[p], 1e-9)
        share = shared if portion == "shared" else 1.0 - shared
        return replace(cost, busy_s=cost.busy_s * share, wire_s=cost.wire_s * share)

    @staticmethod
    def _work(rate: LinearCost, amount: Any) -> Cost:
        return Cost(rate.fixed_s + rate.unit_s * amount)

    def _exchange_keys(self, p: int, n: int | None) -> Cost:
        asked = self._loads.asked[p].sum(axis=1)
        rate = self._profile.exchange_keys
        crossing = self._links.all_to_all(self._sizes.shards, asked * KEY_BYTES)
        holders = self._links.all_to_all_s(self._sizes.replicas, self._loads.rows[p] * KEY_BYTES)
        cost = self._crossing(rate.fixed_s + rate.unit_s * asked + self._peers_s, crossing, "shards")
        return replace(cost, wire_s=cost.wire_s + holders)

    @property
    def _peers_s(self) -> float:
        """What the host does for each of the ranks that it exchanges with."""
        return self._profile.peers.of(self._sizes.shards.size)

    def _collisions(self, p: int, n: int | None) -> Cost:
        """Owners tell sources with a byte a key which rows two batches share."""
        asked = self._loads.asked[p].sum(axis=1)
        rate = self._profile.intersect
        crossing = self._links.all_to_all(self._sizes.shards, asked)
        return self._crossing(rate.fixed_s + rate.unit_s * asked, crossing, "shards")

    def _exchange_vectors(self, p: int, n: int | None) -> Cost:
        served = self._loads.served_bytes[p][:, n]
        received = self._loads.received_bytes[p][:, n]
        return self._exchange(self._profile.exchange_vectors, served, received)

    def _exchange_gradients(self, p: int, n: int | None) -> Cost:
        returned = self._loads.returned_bytes[p][:, n]
        summed = self._loads.summed_bytes[p][:, n]
        return self._exchange(self._profile.exchange_gradients, returned, summed)

    def _exchange(self, rate: LinearCost, sent: Any, received: Any) -> Cost:
        """A rank is through when the larger of what it sends and what it receives is."""
        crossing = self._links.all_to_all(self._sizes.shards, np.maximum(sent, received))
        return self._crossing(rate.fixed_s + rate.unit_s * sent + self._peers_s, crossing, "shards")

    @staticmethod
    def _crossing(busy_s: Any, crossing: TransferTime, scope: Scope) -> Cost:
        return Cost(busy_s, crossing.wire_s, scope, crossing.latency_s, crossing.burst_s)

    def _forward_backward(self, p: int, n: int | None) -> Cost:
        rates = self._profile.compute
        linear = self._loads.linear_flops[p][:, n]
        attention = self._loads.attention_flops[p][:, n]
        return Cost(rates.fixed_s + rates.flop_s * linear + rates.attention_flop_s * attention)

    def _sum_over_holders(self, p: int, n: int | None) -> Cost:
        """Each holder sends the whole to every other one."""
        holders = self._sizes.replicas
        if holders.size == 1:
            return Cost()
        sent = holders.size * self._loads.completed_bytes[p][:, n]
        work = self._profile.add_gradients.fixed_s + self._profile.add_gradients.unit_s * sent
        return self._crossing(work, self._links.all_to_all(holders, sent), "replicas")

    def _write_back(self, p: int, n: int | None) -> Cost:
        kept = self._loads.shared_bytes[p] if self._hands_over else 0.0
        return self._work(self._store.write_back, self._loads.row_bytes[p] - kept)

    def _dense_reduce(self, p: int, n: int | None) -> Cost:
        size = self._loads.dense_bytes
        return self._crossing(
            self._profile.dense_reduce.of(size), self._links.all_reduce(self._sizes.everyone, size), "all"
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """Measured times over what their line says, by the amount that they were measured for."""

    amounts: NDArray[np.float64]
    """increasing"""
    ratios: NDArray[np.float64]

    @staticmethod
    def of(amounts: NDArray[np.float64], ratios: NDArray[np.float64]) -> "Spread":
        order = np.argsort(amounts, kind="stable")
        return Spread(amounts[order], ratios[order])

    def draw(self, amount: float, draw: np.random.Generator, size: int) -> NDArray[np.float64]:
        """Ratios out of the quarter of the measurements whose amounts are nearest."""
        width = max(1, len(self.ratios) // 4)
        first = int(np.searchsorted(self.amounts, amount)) - width // 2
        first = min(max(0, first), len(self.ratios) - width)
        return draw.choice(self.ratios[first : first + width], size)


Spreads = Mapping[str, Spread]
"""By operation."""


class RandomizedCosts:
    """`costs` with chance. Work varies rank by rank; what crosses varies for the whole group at once."""

    def __init__(self, costs: Costs, spreads: Spreads, world: int, *, wire_speed: float, seed: int) -> None:
        """wire_speed: amount of the spreads of what crosses, for each second of the link."""
        self._costs = costs
        self._spreads = spreads
        self._world = world
        self._wire_speed = wire_speed
        self._seed = seed

    def of(self, operation: str, step: int, micro_batch: int | None) -> Cost:
        cost = self._costs.of(operation, step, micro_batch)
        spread = self._spreads.get(operation)
        if spread is None:
            return cost
        place = [self._seed, zlib.crc32(operation.encode()), step, 0 if micro_batch is None else micro_batch + 1]
        draw = np.random.default_rng(place)
        if cost.scope == "rank":
            return Cost(cost.busy_s * spread.draw(0.0, draw, self._world))
        amount = float(np.max(cost.wire_s)) * self._wire_speed
        return replace(cost, wire_s=cost.wire_s * float(spread.draw(amount, draw, 1)[0]))


class ScaledCosts:
    """`costs` whose work takes `factor` times as long."""

    def __init__(self, costs: Costs, factor: float) -> None:
        self._costs = costs
        self._factor = factor

    def of(self, operation: str, step: int, micro_batch: int | None) -> Cost:
        cost = self._costs.of(operation, step, micro_batch)
        return replace(cost, busy_s=cost.busy_s * self._factor)
