"""Cutting a list of weights into consecutive runs."""

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, nogil=True)
def cut_at_shares(weights: NDArray[np.float64], shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """(B,) run of each item; run r has close to `shares[r]` of the weight, cut where the prefix sum is nearest."""
    total = weights.sum()
    run_of = np.empty(weights.size, dtype=np.int64)
    last = shares.size - 1
    run, prefix, goal = 0, 0.0, shares[0] * total
    for i in range(weights.size):
        while run < last and prefix + 0.5 * weights[i] > goal:
            run += 1
            goal += shares[run] * total
        run_of[i] = run
        prefix += weights[i]
    return run_of


@njit(cache=True, nogil=True)
def cut_at_threshold(weights: NDArray[np.float64], threshold: float) -> NDArray[np.int64]:
    """(B,) run of each item, where a run is filled until the next item would exceed the threshold."""
    run_of = np.empty(weights.size, dtype=np.int64)
    run, filled = 0, 0.0
    for i in range(weights.size):
        if filled > 0.0 and filled + weights[i] > threshold:
            run += 1
            filled = 0.0
        run_of[i] = run
        filled += weights[i]
    return run_of


@njit(cache=True, nogil=True)
def smallest_threshold(weights: NDArray[np.float64], num_runs: int) -> float:
    """The smallest threshold, to a billionth, with which `cut_at_threshold` makes at most `num_runs` runs."""
    if weights.size == 0:
        return 0.0
    low = max(weights.max(), weights.sum() / num_runs) * (1.0 - 1e-9)
    high = weights.sum() * (1.0 + 1e-9)
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        if cut_at_threshold(weights, middle)[-1] < num_runs:
            high = middle
        else:
            low = middle
    return float(high)
