"""Cost model of a training step: amounts of work per rank, linear costs of a hardware profile, and links.

`RandomizedCosts` adds variation by sampling measured ratios between actual and modeled times.
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
    """Groups of ranks that take part in each collective."""

    shards: Group
    """Ranks of a replica group."""
    replicas: Group
    """Ranks that hold the same shard."""
    everyone: Group
    """All ranks."""

    @staticmethod
    def of(mesh: Mesh) -> "Sizes":
        return Sizes(Group(mesh.num_shards), Group(mesh.num_replicas, mesh.num_shards), Group(mesh.world))


class StepCosts:
    """Costs of the operations of a step, for replays.

    Args:
        loads: Work of each rank.
        profile: Hardware profile.
        links: Link hierarchy.
        mesh: Device mesh.
        store: Store of the rows.
        hands_over: Whether rows that the next batch uses are passed on to it instead of written back.
    """

    def __init__(
        self, loads: Loads, profile: Profile, links: Links, mesh: Mesh, *, store: StoreKind, hands_over: bool
    ) -> None:
        self._loads = loads
        self._profile = profile
        self._links = links
        self._sizes = Sizes.of(mesh)
        self._store = profile.store(store)
        self._hands_over = hands_over
        self._cache: dict[tuple[str, int, int | None], Cost] = {}
        self._operations: dict[str, _Operation] = {
            "deduplicate": lambda p, n: self._work(profile.deduplicate, loads.keys[p]),
            "exchange_keys": self._exchange_keys,
            "build_exchange_plan": lambda p, n: self._work(profile.arrange, loads.requested_keys[p].sum(axis=1)),
            "fetch_rows": lambda p, n: self._work(self._store.fetch, loads.row_bytes[p]),
            "prefetch_rows": lambda p, n: self._work(self._store.fetch, loads.row_bytes[p]),
            "exchange_vectors": self._exchange_vectors,
            "forward_backward": self._forward_backward,
            "exchange_gradients": self._exchange_gradients,
            "add_gradients": lambda p, n: self._work(profile.add_gradients, loads.summed_bytes[p][:, n]),
            "all_reduce_replica_gradients": self._sum_over_replicas,
            "update_rows": lambda p, n: self._work(profile.update_rows, loads.row_bytes[p]),
            "write_back": self._write_back,
            "train.embedding.collisions": self._collisions,
            "train.embedding.intersect": lambda p, n: self._work(profile.intersect, loads.rows[p]),
            "train.embedding.copy_shared_rows": lambda p, n: self._work(profile.copy, loads.shared_bytes[p]),
            "dense_reduce": self._dense_reduce,
            "dense_apply": lambda p, n: self._work(profile.dense_apply, loads.dense_bytes),
        }

    def of(self, operation: str, step: int, micro_batch: int | None) -> Cost:
        name, _, row_group = operation.partition(":")
        if name not in self._operations:
            return Cost()
        key = (operation, self._loads.pattern_index(step), micro_batch)
        if key not in self._cache:
            full_cost = self._operations[name](key[1], micro_batch)
            self._cache[key] = self._cost_of_group(full_cost, key[1], row_group) if row_group else full_cost
        return self._cache[key]

    def _cost_of_group(self, cost: Cost, p: int, row_group: str) -> Cost:
        """Return the part of a cost for the rows that two neighboring batches share, or for the exclusive rows."""
        shared = self._loads.shared_rows[p] / np.maximum(self._loads.rows[p], 1e-9)
        fraction = shared if row_group == "shared" else 1.0 - shared
        return replace(cost, busy_s=cost.busy_s * fraction, wire_s=cost.wire_s * fraction)

    @staticmethod
    def _work(rate: LinearCost, amount: Any) -> Cost:
        return Cost(rate.fixed_s + rate.unit_s * amount)

    def _exchange_keys(self, p: int, n: int | None) -> Cost:
        requested = self._loads.requested_keys[p].sum(axis=1)
        rate = self._profile.exchange_keys
        transfer = self._links.all_to_all(self._sizes.shards, requested * KEY_BYTES)
        replicas = self._links.all_to_all_s(self._sizes.replicas, self._loads.rows[p] * KEY_BYTES)
        cost = self._transfer_cost(rate.fixed_s + rate.unit_s * requested + self._peers_s, transfer, "shards")
        return replace(cost, wire_s=cost.wire_s + replicas)

    @property
    def _peers_s(self) -> float:
        """Host work of an exchange for all ranks of the group, in seconds."""
        return self._profile.peers.of(self._sizes.shards.size)

    def _collisions(self, p: int, n: int | None) -> Cost:
        """Return the cost of sending one byte per key from owners to sources: which rows two batches share."""
        requested = self._loads.requested_keys[p].sum(axis=1)
        rate = self._profile.intersect
        transfer = self._links.all_to_all(self._sizes.shards, requested)
        return self._transfer_cost(rate.fixed_s + rate.unit_s * requested, transfer, "shards")

    def _exchange_vectors(self, p: int, n: int | None) -> Cost:
        served = self._loads.served_bytes[p][:, n]
        received = self._loads.received_bytes[p][:, n]
        return self._exchange(self._profile.exchange_vectors, served, received)

    def _exchange_gradients(self, p: int, n: int | None) -> Cost:
        returned = self._loads.returned_bytes[p][:, n]
        summed = self._loads.summed_bytes[p][:, n]
        return self._exchange(self._profile.exchange_gradients, returned, summed)

    def _exchange(self, rate: LinearCost, sent: Any, received: Any) -> Cost:
        """Return the cost of an all-to-all, which takes as long as the larger of sending and receiving."""
        transfer = self._links.all_to_all(self._sizes.shards, np.maximum(sent, received))
        return self._transfer_cost(rate.fixed_s + rate.unit_s * sent + self._peers_s, transfer, "shards")

    @staticmethod
    def _transfer_cost(busy_s: Any, transfer: TransferTime, scope: Scope) -> Cost:
        return Cost(busy_s, transfer.wire_s, scope, transfer.latency_s, transfer.burst_s)

    def _forward_backward(self, p: int, n: int | None) -> Cost:
        rates = self._profile.compute
        linear = self._loads.linear_flops[p][:, n]
        attention = self._loads.attention_flops[p][:, n]
        return Cost(rates.fixed_s + rates.flop_s * linear + rates.attention_flop_s * attention)

    def _sum_over_replicas(self, p: int, n: int | None) -> Cost:
        """Return the cost of summing gradients over replicas: each replica sends its sums to all others."""
        replicas = self._sizes.replicas
        if replicas.size == 1:
            return Cost()
        sent = replicas.size * self._loads.completed_bytes[p][:, n]
        work = self._profile.add_gradients.fixed_s + self._profile.add_gradients.unit_s * sent
        return self._transfer_cost(work, self._links.all_to_all(replicas, sent), "replicas")

    def _write_back(self, p: int, n: int | None) -> Cost:
        passed_on = self._loads.shared_bytes[p] if self._hands_over else 0.0
        return self._work(self._store.write_back, self._loads.row_bytes[p] - passed_on)

    def _dense_reduce(self, p: int, n: int | None) -> Cost:
        size = self._loads.dense_bytes
        return self._transfer_cost(
            self._profile.dense_reduce.of(size), self._links.all_reduce(self._sizes.everyone, size), "all"
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """Measured times divided by modeled times, by amount of work."""

    amounts: NDArray[np.float64]
    """Amounts of the measurements, increasing."""
    ratios: NDArray[np.float64]
    """Measured over modeled time of each measurement."""

    @staticmethod
    def of(amounts: NDArray[np.float64], ratios: NDArray[np.float64]) -> "Spread":
        order = np.argsort(amounts, kind="stable")
        return Spread(amounts[order], ratios[order])

    def draw(self, amount: float, draw: np.random.Generator, size: int) -> NDArray[np.float64]:
        """Sample ratios from the quarter of the measurements with the nearest amounts."""
        width = max(1, len(self.ratios) // 4)
        first = int(np.searchsorted(self.amounts, amount)) - width // 2
        first = min(max(0, first), len(self.ratios) - width)
        return draw.choice(self.ratios[first : first + width], size)


Spreads = Mapping[str, Spread]
"""Spreads by operation."""


class RandomizedCosts:
    """Costs with random variation. Work varies per rank; transfers vary for the whole group at once.

    Args:
        costs: Costs without variation.
        spreads: Measured ratios by operation.
        world: Number of ranks.
        wire_speed: Factor from seconds on the link to amounts of the spreads of transfers.
        seed: Seed of the random numbers.
    """

    def __init__(self, costs: Costs, spreads: Spreads, world: int, *, wire_speed: float, seed: int) -> None:

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
        seed = [self._seed, zlib.crc32(operation.encode()), step, 0 if micro_batch is None else micro_batch + 1]
        draw = np.random.default_rng(seed)
        if cost.scope == "rank":
            return Cost(cost.busy_s * spread.draw(0.0, draw, self._world))
        amount = float(np.max(cost.wire_s)) * self._wire_speed
        return replace(cost, wire_s=cost.wire_s * float(spread.draw(amount, draw, 1)[0]))


class ScaledCosts:
    """Costs whose work takes `factor` times as long; transfers are unchanged."""

    def __init__(self, costs: Costs, factor: float) -> None:
        self._costs = costs
        self._factor = factor

    def of(self, operation: str, step: int, micro_batch: int | None) -> Cost:
        cost = self._costs.of(operation, step, micro_batch)
        return replace(cost, busy_s=cost.busy_s * self._factor)
