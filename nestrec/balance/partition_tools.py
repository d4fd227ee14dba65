"""Helpers of the balance policies: orders of samples and cuts of weighted lists.

Cutting a list of weights into consecutive runs.

Sorting and grouping shared by the partition functions: the same result on every machine, ties by index.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, nogil=True)
def cut_at_shares(weights: NDArray[np.float64], shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """(B,) run of each item; run r has close to `shares[r]` of the weight, cut where the prefix sum is nearest."""
    total = weights.sum()
    run_of = np.empty(weights.size, dtype=np.int64)
    last = shares.size - 1
    run = 0
    prefix = 0.0
    goal = shares[0] * total
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
    run = 0
    filled = 0.0
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


Assignment = NDArray[np.int64]
"""(B,) rank of each sample."""
Groups = list[NDArray[np.int64]]
"""For each rank the indices of its samples, in increasing order."""

_BITS = 11
_BUCKETS = 1 << _BITS
_FEW = 48
"""Up to so many items are sorted by insertion: clearing the buckets would take longer."""


@njit(cache=True, nogil=True)
def _descending_few(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    order = np.empty(cost.size, dtype=np.int64)
    for i in range(cost.size):
        place = i
        while place > 0 and cost[order[place - 1]] < cost[i]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = i
    return order


@njit(cache=True, nogil=True)
def descending(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices by falling cost, ties by index; costs are not negative.

    A radix sort over the bits of the floats (which order as integers do): it is stable by construction, and quicker
    than a stable comparison sort, which alone would take half of the time a partition may take.
    """
    if cost.size <= _FEW:
        return _descending_few(cost)
    order = np.arange(cost.size)
    keys = ~(cost + 0.0).view(np.uint64)
    other_order = np.empty_like(order)
    other_keys = np.empty_like(keys)
    for shift in range(0, 64, _BITS):
        starts = np.zeros(_BUCKETS + 1, dtype=np.int64)
        for i in range(keys.size):
            starts[((keys[i] >> np.uint64(shift)) & np.uint64(_BUCKETS - 1)) + np.uint64(1)] += 1
        if starts.max() == keys.size:
            continue
        for bucket in range(_BUCKETS):
            starts[bucket + 1] += starts[bucket]
        for i in range(keys.size):
            bucket = (keys[i] >> np.uint64(shift)) & np.uint64(_BUCKETS - 1)
            place = starts[bucket]
            starts[bucket] = place + 1
            other_keys[place] = keys[i]
            other_order[place] = order[i]
        keys, other_keys = other_keys, keys
        order, other_order = other_order, order
    return order


def groups_of(assignment: Assignment, num_ranks: int) -> Groups:
    """The samples of each rank, in increasing index order."""
    kind = np.uint16 if num_ranks <= 1 << 16 else np.int64
    by_rank = np.argsort(assignment.astype(kind), kind="stable")
    ends = np.cumsum(np.bincount(assignment, minlength=num_ranks)).tolist()
    return [by_rank[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def assignment_of(groups: Groups, num_samples: int) -> Assignment:
    """Inverse of `groups_of`."""
    assignment = np.full(num_samples, -1, dtype=np.int64)
    for rank, group in enumerate(groups):
        assignment[group] = rank
    return assignment


def loads_of(cost: NDArray[np.float64], groups: Groups) -> NDArray[np.float64]:
    """(R,) total cost of each rank, added in index order."""
    rank_of = np.repeat(np.arange(len(groups)), [group.size for group in groups])
    return np.bincount(rank_of, weights=cost[np.concatenate(groups)], minlength=len(groups)).astype(np.float64)
