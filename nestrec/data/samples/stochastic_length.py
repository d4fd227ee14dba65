"""Stochastic length of HSTU: long histories are mostly trained on a subsequence.

A history of n events longer than m = N ** (alpha / 2), N the longest length, is cut to m events with probability
1 - N ** alpha / n ** 2, and kept whole otherwise. The subsequence favours recent events. The choice is a pure function
of the sample's key, so every rank, worker and schedule makes the same one.
"""

import numpy as np
from numpy.typing import NDArray

from nestrec.base.random import fold, fold_array


def kept_length(
    num_events: NDArray[np.int64], key: NDArray[np.uint64], *, alpha: float, longest: int
) -> NDArray[np.int64]:
    """Number of events kept of each sample."""
    short = max(2, int(longest ** (alpha / 2)))
    draw = fold_array(fold(0x51), key.view(np.int64)) >> np.uint64(11)
    keep_all = draw.astype(np.float64) * 2.0**-53 < (float(longest) ** alpha) / np.maximum(num_events, 1) ** 2.0
    return np.where((num_events <= short) | keep_all, num_events, short)


def kept_events(num_events: int, num_kept: int, key: int) -> NDArray[np.int64]:
    """Sorted indices of the kept events of one sample, drawn without replacement with weight growing with recency.

    The last two events are always kept: the last is the newest target, the one before it its context.
    """
    if num_kept >= num_events:
        return np.arange(num_events)
    index = np.arange(num_events)
    uniform = (fold_array(fold(key, 0x52), index) >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54
    # Exponential race: the smallest -ln(u) / weight win, which is weighted sampling without replacement.
    race = -np.log(uniform) / (index + 1.0)
    race[-2:] = -1.0
    return np.sort(np.argpartition(race, num_kept - 1)[:num_kept])
