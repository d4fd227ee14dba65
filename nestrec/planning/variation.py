"""Costs that vary as measured ones do: each time another of the ratios that were seen between a time and its line."""

import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from nestrec.planning.replay import Cost, Costs

Ratios = Mapping[str, NDArray[np.float64]]
"""Operation to measured times over what its line says."""


class Varied:
    """`costs` with chance. Work varies rank by rank; what crosses varies for the whole group at once."""

    def __init__(self, costs: Costs, ratios: Ratios, world: int, seed: int) -> None:
        self._costs, self._ratios, self._world, self._seed = costs, ratios, world, seed

    def of(self, operation: str, step: int, micro_batch: int | None) -> Cost:
        cost = self._costs.of(operation, step, micro_batch)
        ratios = self._ratios.get(operation)
        if ratios is None or not len(ratios):
            return cost
        place = [self._seed, zlib.crc32(operation.encode()), step, -1 if micro_batch is None else micro_batch]
        draw = np.random.default_rng([value & 0xFFFFFFFF for value in place])
        if cost.scope == "rank":
            return Cost(cost.busy_s * draw.choice(ratios, self._world))
        return Cost(cost.busy_s, cost.wire_s * float(draw.choice(ratios)), cost.scope)
