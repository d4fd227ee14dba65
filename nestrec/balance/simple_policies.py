"""Balance policies: fixed, zigzag, token threshold, power, greedy and Karmarkar-Karp.

`fixed`: equal counts, contiguous in the global batch. The baseline, which ignores lengths.

`greedy`: assigns samples by decreasing cost, each to the rank with the lowest load (TurboGR, long sequences). TurboGR
counts tokens, which is the special case of a cost model with tokens only.

`karmarkar_karp`: largest differencing method with equal counts. The sorted samples are divided into groups of one
sample per rank. The two groups with the largest load differences are merged, the heaviest part of one with the lightest
of the other, until one group is left, whose parts are the ranks.

`power`: sorted by length and cut into runs of nearly equal weight L^alpha (FreeScale, variable batch size). The
published value of alpha is not known. By default it is derived from the cost model (the slope of log cost over log
length). Both alpha and the runs can be tuned from measured times, as FreeScale's AutoTune adjusts the local batch: all
ranks use the same `PowerTuning`, which changes only at a logged step. A cost a * L + b * L^2 is not a power of L, so
without tuning the loads of ranks with long and short samples differ.

`token_threshold`: cuts the global batch, in its own order, into runs of nearly equal tokens (TurboGR, short sequences).
TurboGR's loader fills a rank up to a token threshold. Here the threshold is the smallest for which the ranks hold the
whole global batch, so that no sample moves to another step.

`zigzag`: sorted by length and assigned in zigzag order (FreeScale, fixed batch size). With n ranks, rank i gets the
positions i, 2n-1-i, 2n+i, 4n-1-i, ... of the sorted list.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.balance.partition_tools import (
    Groups,
    cut_at_shares,
    cut_at_threshold,
    descending,
    groups_of,
    smallest_threshold,
)
from nestrec.base.config import config
from nestrec.data.batch_order import contiguous_bounds


def fixed(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Partition by `fixed`. Sample counts differ by at most one; the first ranks have the larger counts."""
    bounds = contiguous_bounds(cost.size, num_ranks)
    return [np.arange(start, end) for start, end in itertools.pairwise(bounds)]


def greedy(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Partition by `greedy`. Sample counts differ."""
    return groups_of(longest_first(cost, descending(cost), num_ranks), num_ranks)


@njit(cache=True, nogil=True)
def longest_first(cost: NDArray[np.float64], order: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Return the (B,) rank of each sample; among equally loaded ranks the lowest rank gets the sample."""
    load = np.zeros(num_ranks, dtype=np.float64)
    heap = np.arange(num_ranks)
    assignment = np.empty(cost.size, dtype=np.int64)
    for sample in order:
        rank = heap[0]
        assignment[sample] = rank
        load[rank] += cost[sample]
        _sink_top(heap, load)
    return assignment


@njit(cache=True, nogil=True, inline="always")
def _sink_top(heap: NDArray[np.int64], load: NDArray[np.float64]) -> None:
    """Restore the heap of ranks, ordered by (load, rank), after the load of its top has increased."""
    rank = heap[0]
    position = 0
    size = heap.size
    while True:
        child = 2 * position + 1
        if child >= size:
            break
        right = child + 1
        if right < size and _is_before(heap[right], heap[child], load):
            child = right
        if not _is_before(heap[child], rank, load):
            break
        heap[position] = heap[child]
        position = child
    heap[position] = rank


@njit(cache=True, nogil=True, inline="always")
def _is_before(a: int, b: int, load: NDArray[np.float64]) -> bool:
    return bool(load[a] < load[b] or (load[a] == load[b] and a < b))


def karmarkar_karp(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Partition by `karmarkar_karp`. Sample counts differ by at most one."""
    return groups_of(largest_differencing(cost, descending(cost), num_ranks), num_ranks)


@njit(cache=True, nogil=True)
def largest_differencing(cost: NDArray[np.float64], order: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Return the (B,) rank of each sample.

    Part p of group g is a linked list of samples; the parts of a group are sorted by decreasing load.
    """
    num_groups = max(1, -(-cost.size // num_ranks))
    load = np.zeros((num_groups, num_ranks), dtype=np.float64)
    first = np.full((num_groups, num_ranks), -1, dtype=np.int64)
    last = np.full((num_groups, num_ranks), -1, dtype=np.int64)
    following = np.full(cost.size, -1, dtype=np.int64)
    for i in range(cost.size):
        group = i // num_ranks
        part = i % num_ranks
        load[group, part] = cost[order[i]]
        first[group, part] = last[group, part] = order[i]
    heap = [(load[g, num_ranks - 1] - load[g, 0], g) for g in range(num_groups)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, a = heapq.heappop(heap)
        _, b = heapq.heappop(heap)
        _join(a, b, load, first, last, following)
        heapq.heappush(heap, (load[a, num_ranks - 1] - load[a, 0], a))
    return _parts(heap[0][1], first, following)


@njit(cache=True, nogil=True)
def _join(  # noqa: PLR0917
    a: int,
    b: int,
    load: NDArray[np.float64],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    following: NDArray[np.int64],
) -> None:
    """Merge group b into group a, the heaviest parts of one with the lightest of the other."""
    num_ranks = load.shape[1]
    joined = load[a] + load[b, ::-1]
    for part in range(num_ranks):
        other = num_ranks - 1 - part
        if first[a, part] < 0:
            first[a, part], last[a, part] = first[b, other], last[b, other]
        elif first[b, other] >= 0:
            following[last[a, part]] = first[b, other]
            last[a, part] = last[b, other]
    order = descending(joined)
    load[a], first[a], last[a] = joined[order], first[a][order], last[a][order]


@njit(cache=True, nogil=True)
def _parts(group: int, first: NDArray[np.int64], following: NDArray[np.int64]) -> NDArray[np.int64]:
    assignment = np.empty(following.size, dtype=np.int64)
    for part in range(first.shape[1]):
        sample = first[group, part]
        while sample >= 0:
            assignment[sample] = part
            sample = following[sample]
    return assignment


_SHRINKAGE = 0.1
"""Shrinkage of the slope that tunes alpha: if lengths differ by a factor of about 1.4, the slope counts half."""


@config
class PowerTuning:
    """Learned exponent and shares of the `power` policy."""

    alpha: float
    """Exponent: the weight of a sample is its length to this power."""
    shares: tuple[float, ...]
    """Fraction of the total weight that each rank gets; the fractions sum to 1."""


def power(
    cost: NDArray[np.float64],
    num_ranks: int,
    *,
    lengths: NDArray[Any] | None = None,
    tuning: PowerTuning | None = None,
) -> Groups:
    """Partition by `power`. Sample counts differ: rank 0 gets few long samples, the last rank many short ones."""
    sizes = cost if lengths is None else lengths.astype(np.float64)
    tuning = tuning or PowerTuning(alpha=slope(sizes, cost), shares=equal_shares(num_ranks))
    assert len(tuning.shares) == num_ranks
    order = descending(sizes)
    assignment = np.empty(cost.size, dtype=np.int64)
    assignment[order] = cut_at_shares(sizes[order] ** tuning.alpha, np.array(tuning.shares))
    return groups_of(assignment, num_ranks)


def equal_shares(num_ranks: int) -> tuple[float, ...]:
    """Return equal shares for all ranks."""
    return (1.0 / num_ranks,) * num_ranks


def tune_power(
    tuning: PowerTuning, times_s: Sequence[float], mean_lengths: Sequence[float], *, gain: float = 0.5
) -> PowerTuning:
    """Return the tuning for the next steps, from the time and mean sample length of each rank with the current tuning.

    If the ranks with longer samples take longer, alpha is too small by the slope of log time over log length. The part
    of the times that this slope does not explain moves shares from slow to fast ranks. If the lengths hardly differ,
    alpha has no effect and the slope would be noise; it is shrunk, and the shares compensate. Ranks without samples (no
    time or length) keep their share.

    Args:
        tuning: Current tuning.
        times_s: Compute time of each rank, in seconds.
        mean_lengths: Mean number of tokens per sample of each rank.
        gain: Fraction of the correction to apply; values below 1 damp noise.
    """
    times, sizes = np.asarray(times_s, dtype=np.float64), np.asarray(mean_lengths, dtype=np.float64)
    used = (times > 0) & (sizes > 0)
    if used.sum() < 2:
        return tuning
    alpha_error = slope(sizes[used], times[used], shrinkage=_SHRINKAGE)
    residual = np.log(times[used]) - alpha_error * np.log(sizes[used])
    shares = np.array(tuning.shares)
    shares[used] *= np.exp(-gain * (residual - residual.mean()))
    shares /= shares.sum()
    return PowerTuning(alpha=max(0.0, tuning.alpha + gain * alpha_error), shares=tuple(shares.tolist()))


def slope(x: NDArray[np.float64], y: NDArray[np.float64], *, shrinkage: float = 0.0) -> float:
    """Return the least-squares slope of log y over log x for the positive pairs; 0 if x does not vary.

    Args:
        x: Independent variable.
        y: Dependent variable.
        shrinkage: Variance of log x at which the slope is halved.
    """
    used = (x > 0) & (y > 0)
    if not used.any():
        return 0.0
    log_x, log_y = np.log(x[used]), np.log(y[used])
    log_x, log_y = log_x - log_x.mean(), log_y - log_y.mean()
    spread = float(log_x @ log_x)
    return float(log_x @ log_y) / (spread + shrinkage * log_x.size) if spread > 1e-12 * log_x.size else 0.0


def token_threshold(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Partition by `token_threshold`. Sample counts differ.

    Uses tokens as published, or costs if no lengths are given.
    """
    weights = cost if lengths is None else lengths.astype(np.float64)
    return groups_of(cut_at_threshold(weights, smallest_threshold(weights, num_ranks)), num_ranks)


def zigzag(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Partition by `zigzag`. Sample counts differ by at most one.

    Sorts by length as published, or by cost if no lengths are given.
    """
    order = descending(cost if lengths is None else lengths.astype(np.float64))
    position = np.arange(cost.size) % (2 * num_ranks)
    assignment = np.empty(cost.size, dtype=np.int64)
    assignment[order] = np.minimum(position, 2 * num_ranks - 1 - position)
    return groups_of(assignment, num_ranks)
