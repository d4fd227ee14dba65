"""Cost coefficients out of measured compute times, changed only where that explains the times clearly better.

Balanced ranks have nearly equal loads, from which nothing can be learnt; a model that is wrong leaves them unequal, and
that shows by how much. So a new fit replaces the present model only if it leaves noticeably less unexplained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.cost import CostModel, fit_sums
from nestrec.base.errors import UserError

LEAST_GAIN = 0.1
"""A new model must leave at least this part less of the squared error of the present one."""
LEAST_ERROR = 0.01
"""A model whose error is below this part of the mean time is left alone."""
LEAST_MEASUREMENTS = 16
"""Fewer (rank, step) pairs say too little."""


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


def _columns(measurement: Measurement) -> tuple[float, float, float]:
    return measurement.compute_s, measurement.tokens, measurement.tokens_squared


def _unexplained(times: NDArray[np.float64], load: NDArray[np.float64]) -> float:
    """Squared error of the best step + scale * load: only the ratios of a cost model matter."""
    matrix = np.stack([np.ones_like(load), load / load.max()], axis=1)
    found = np.linalg.lstsq(matrix, times, rcond=None)[0]
    return float(((matrix @ found - times) ** 2).sum())
