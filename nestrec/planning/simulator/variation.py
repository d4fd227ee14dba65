"""Costs that vary as measured ones do: each time another of the ratios that were seen between a time and its line."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nestrec.planning.simulator.replay import Cost, Costs


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


class Varied:
    """`costs` with chance. Work varies rank by rank; what crosses varies for the whole group at once."""

    def __init__(self, costs: Costs, spreads: Spreads, world: int, *, wire_speed: float, seed: int) -> None:
        """wire_speed: amount of the spreads of what crosses, for each second of the link."""
        self._costs, self._spreads, self._world = costs, spreads, world
        self._wire_speed, self._seed = wire_speed, seed

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


class Slowed:
    """`costs` whose work takes `factor` times as long."""

    def __init__(self, costs: Costs, factor: float) -> None:
        self._costs, self._factor = costs, factor

    def of(self, operation: str, step: int, micro_batch: int | None) -> Cost:
        cost = self._costs.of(operation, step, micro_batch)
        return replace(cost, busy_s=cost.busy_s * self._factor)
