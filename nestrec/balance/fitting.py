"""Cost coefficients and shares of ranks out of measured compute times.

Coefficients are changed only where that explains the times clearly better, shares where times differ.

Balanced ranks have nearly equal loads, from which nothing can be learnt; a model that is wrong leaves them unequal, and
that shows by how much. So a new fit replaces the present model only if it leaves noticeably less unexplained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.cost import CostModel, fit_sums
from nestrec.balance.power import PowerTuning, equal_shares, slope, tuned
from nestrec.base.errors import UserError

LEAST_GAIN = 0.1
"""A new model must leave at least this part less of the squared error of the present one."""
LEAST_ERROR = 0.01
"""A model whose error is below this part of the mean time is left alone."""
LEAST_MEASUREMENTS = 16
"""Fewer (rank, step) pairs say too little."""
LEAST_STEPS = 8
"""Shares are changed by the times of no fewer steps that were dealt by the present ones."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a rank did in a step."""

    compute_s: float
    """time of its forward and backward passes"""
    tokens: float
    """of its samples"""
    tokens_squared: float
    """sum over its samples of the square of their tokens"""


def refitted(current: CostModel, measured: Sequence[Measurement]) -> CostModel | None:
    """A model that explains the measurements better than `current`, or none. The same on ranks given the same."""
    used = [m for m in measured if m.tokens > 0]
    if len(used) < LEAST_MEASUREMENTS:
        return None
    times, tokens, squared = (np.array(column) for column in zip(*[_columns(m) for m in used], strict=True))
    try:
        candidate = fit_sums(times, tokens, squared)
    except UserError:
        return None
    now = _unexplained(times, current.token * tokens + current.token_squared * squared)
    if now < len(times) * (LEAST_ERROR * times.mean()) ** 2:
        return None
    then = _unexplained(times, candidate.token * tokens + candidate.token_squared * squared)
    return candidate if then < (1.0 - LEAST_GAIN) * now else None


@dataclass(slots=True)
class RankLoads:
    """What ranks did since their shares were last changed, the same on every rank."""

    times_s: NDArray[np.float64]
    """(R,) seconds of computing"""
    tokens: NDArray[np.float64]
    """(R,)"""
    samples: NDArray[np.float64]
    """(R,)"""
    num_steps: int = 0

    @staticmethod
    def nothing(num_ranks: int) -> "RankLoads":
        return RankLoads(np.zeros(num_ranks), np.zeros(num_ranks), np.zeros(num_ranks))

    def add(self, times_s: NDArray[np.float64], tokens: NDArray[np.float64], samples: NDArray[np.float64]) -> None:
        """(R,) of one step more."""
        self.times_s, self.tokens, self.samples = self.times_s + times_s, self.tokens + tokens, self.samples + samples
        self.num_steps += 1

    @property
    def mean_lengths(self) -> NDArray[np.float64]:
        """(R,) tokens of a sample; 0 where a rank had none."""
        lengths: NDArray[np.float64] = self.tokens / np.maximum(self.samples, 1.0)
        return lengths


def retuned(current: PowerTuning | None, cost: CostModel, loads: RankLoads) -> PowerTuning | None:
    """Shares by which the ranks would have taken more nearly the same time, or none where they nearly did."""
    mean = float(loads.times_s.mean())
    if mean <= 0 or loads.times_s.max() - mean < LEAST_ERROR * mean:
        return None
    sizes = loads.mean_lengths
    if current is None:
        current = PowerTuning(alpha=slope(sizes, cost.of(sizes)), shares=equal_shares(len(sizes)))
    return tuned(current, loads.times_s.tolist(), sizes.tolist())


def _columns(measurement: Measurement) -> tuple[float, float, float]:
    return measurement.compute_s, measurement.tokens, measurement.tokens_squared


def _unexplained(times: NDArray[np.float64], load: NDArray[np.float64]) -> float:
    """Squared error of the best step + scale * load: only the ratios of a cost model matter."""
    matrix = np.stack([np.ones_like(load), load / load.max()], axis=1)
    found = np.linalg.lstsq(matrix, times, rcond=None)[0]
    return float(((matrix @ found - times) ** 2).sum())
