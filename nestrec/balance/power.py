"""`power`: sorted by length and cut into runs of near equal weight L^alpha (FreeScale, variable batch size).

The published value of alpha is not known. Here it follows from the cost model (the slope of log cost against log
length) unless given, and both alpha and the runs can be tuned from measured times, as FreeScale's AutoTune nudges the
local batch: a `PowerTuning` is agreed by all ranks and changed only at a logged step. A cost a * L + b * L^2 is no
power of L, so without tuning long and short ranks differ.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.cuts import cut_at_shares
from nestrec.balance.ordering import Groups, descending, groups_of
from nestrec.base.config import config

_SHRINKAGE = 0.1
"""of the slope by which alpha is tuned: that of lengths that differ by a factor of 1.4 or so counts half"""


@config
class PowerTuning:
    """What the tuning has learnt."""

    alpha: float
    """weight of a sample is its length to this power"""
    shares: tuple[float, ...]
    """part of the weight that each rank takes; they sum to 1"""


def power(
    cost: NDArray[np.float64],
    num_ranks: int,
    *,
    lengths: NDArray[Any] | None = None,
    tuning: PowerTuning | None = None,
) -> Groups:
    """Counts differ: rank 0 takes the few longest samples, the last rank the many short ones."""
    sizes = cost if lengths is None else lengths.astype(np.float64)
    tuning = tuning or PowerTuning(alpha=slope(sizes, cost), shares=equal_shares(num_ranks))
    assert len(tuning.shares) == num_ranks
    order = descending(sizes)
    assignment = np.empty(cost.size, dtype=np.int64)
    assignment[order] = cut_at_shares(sizes[order] ** tuning.alpha, np.array(tuning.shares))
    return groups_of(assignment, num_ranks)


def equal_shares(num_ranks: int) -> tuple[float, ...]:
    return (1.0 / num_ranks,) * num_ranks


def tuned(
    tuning: PowerTuning, times_s: Sequence[float], mean_lengths: Sequence[float], *, gain: float = 0.5
) -> PowerTuning:
    """The tuning for the next steps, from the time and the mean sample length of each rank under this one.

    Where the ranks with longer samples take longer, alpha is too small, and the slope of log time against log length
    says by how much; what it leaves unexplained moves shares from the slow ranks to the quick ones. Where lengths
    hardly differ, alpha can do nothing and a slope would be noise: it is shrunk, and shares do the work. `gain` below 1
    damps noise. Ranks without samples (no time or length) keep their share.
    """
    times, sizes = np.asarray(times_s, dtype=np.float64), np.asarray(mean_lengths, dtype=np.float64)
    used = (times > 0) & (sizes > 0)
    if used.sum() < 2:
        return tuning
    too_small_by = slope(sizes[used], times[used], shrinkage=_SHRINKAGE)
    residual = np.log(times[used]) - too_small_by * np.log(sizes[used])
    shares = np.array(tuning.shares)
    shares[used] *= np.exp(-gain * (residual - residual.mean()))
    shares /= shares.sum()
    return PowerTuning(alpha=max(0.0, tuning.alpha + gain * too_small_by), shares=tuple(shares.tolist()))


def slope(x: NDArray[np.float64], y: NDArray[np.float64], *, shrinkage: float = 0.0) -> float:
    """Least-squares slope of log y against log x over the positive pairs; 0 where x does not vary.

    shrinkage: variance of log x at which the slope is halved.
    """
    used = (x > 0) & (y > 0)
    if not used.any():
        return 0.0
    log_x, log_y = np.log(x[used]), np.log(y[used])
    log_x, log_y = log_x - log_x.mean(), log_y - log_y.mean()
    spread = float(log_x @ log_x)
    return float(log_x @ log_y) / (spread + shrinkage * log_x.size) if spread > 1e-12 * log_x.size else 0.0
