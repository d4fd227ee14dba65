"""Helpers of the balance policies: sorting, grouping, and cutting weighted lists into consecutive runs.

All results are the same on every machine; ties are broken by index.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, nogil=True)
def cut_at_shares(weights: NDArray[np.float64], shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the (B,) run of each item; run r has close to `shares[r]` of the total weight.

    Each cut is at the item whose prefix sum is nearest to the target.
    """
    total = weights.sum()
    run_of = np.empty(weights.size, dtype=np.int64)
    last = shares.size - 1
    run = 0
    prefix = 0.0
    target = shares[0] * total
    for i in range(weights.size):
        while run < last and prefix + 0.5 * weights[i] > target:
            run += 1
            target += shares[run] * total
        run_of[i] = run
        prefix += weights[i]
    return run_of


@njit(cache=True, nogil=True)
def cut_at_threshold(weights: NDArray[np.float64], threshold: float) -> NDArray[np.int64]:
    """Return the (B,) run of each item; a run is filled until the next item would exceed the threshold."""
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
    """Return the smallest threshold for which `cut_at_threshold` makes at most `num_runs` runs, to a relative 1e-9."""
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
"""Indices of the samples of each rank, in increasing order."""

_BITS = 11
_BUCKETS = 1 << _BITS
_INSERTION_SORT_SIZE = 48
"""Up to this size insertion sort is faster than clearing the buckets of the radix sort."""


@njit(cache=True, nogil=True)
def _descending_insertion(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    order = np.empty(cost.size, dtype=np.int64)
    for i in range(cost.size):
        position = i
        while position > 0 and cost[order[position - 1]] < cost[i]:
            order[position] = order[position - 1]
            position -= 1
        order[position] = i
    return order


@njit(cache=True, nogil=True)
def descending(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the indices sorted by decreasing cost, ties by index; costs must not be negative.

    This is a radix sort over the bits of the floats, whose order is that of integers. It is stable by construction and
    faster than a stable comparison sort, which alone would take half of the time limit of a partition.
    """
    if cost.size <= _INSERTION_SORT_SIZE:
        return _descending_insertion(cost)
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
            position = starts[bucket]
            starts[bucket] = position + 1
            other_keys[position] = keys[i]
            other_order[position] = order[i]
        keys, other_keys = other_keys, keys
        order, other_order = other_order, order
    return order


def groups_of(assignment: Assignment, num_ranks: int) -> Groups:
    """Return the samples of each rank, in increasing index order."""
    dtype = np.uint16 if num_ranks <= 1 << 16 else np.int64
    by_rank = np.argsort(assignment.astype(dtype), kind="stable")
    ends = np.cumsum(np.bincount(assignment, minlength=num_ranks)).tolist()
    return [by_rank[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def assignment_of(groups: Groups, num_samples: int) -> Assignment:
    """Return the rank of each sample: the inverse of `groups_of`."""
    assignment = np.full(num_samples, -1, dtype=np.int64)
    for rank, group in enumerate(groups):
        assignment[group] = rank
    return assignment


def loads_of(cost: NDArray[np.float64], groups: Groups) -> NDArray[np.float64]:
    """Return the (R,) total cost of each rank, added in index order."""
    rank_of = np.repeat(np.arange(len(groups)), [group.size for group in groups])
    return np.bincount(rank_of, weights=cost[np.concatenate(groups)], minlength=len(groups)).astype(np.float64)
