"""Balance policies: fixed, zigzag, token threshold, power, greedy and Karmarkar-Karp.

`fixed`: equal counts, contiguous in the global batch. The baseline that knows nothing of lengths.

`greedy`: the costliest sample first, each to the rank with the least load (TurboGR, long sequences).

TurboGR counts tokens; that is the special case of a cost model with tokens only.

`karmarkar_karp`: largest differencing with equal counts.

The sorted samples are taken in groups of one sample a rank. The two groups whose loads differ most are joined, the
heaviest part of one with the lightest of the other, until one group is left: its parts are the ranks.

`power`: sorted by length and cut into runs of near equal weight L^alpha (FreeScale, variable batch size).

The published value of alpha is not known. Here it follows from the cost model (the slope of log cost against log
length) unless given, and both alpha and the runs can be tuned from measured times, as FreeScale's AutoTune nudges the
local batch: a `PowerTuning` is agreed by all ranks and changed only at a logged step. A cost a * L + b * L^2 is no
power of L, so without tuning long and short ranks differ.

`token_threshold`: the global batch, in its own order, cut into runs of near equal tokens (TurboGR, short sequences).

TurboGR's loader fills a rank until a token threshold is reached. Here the threshold is the smallest with which the
ranks hold the whole global batch, so that no sample changes its step.

`zigzag`: sorted by length and dealt in zig-zag (FreeScale, fixed batch size).

With n ranks, rank i takes the places i, 2n-1-i, 2n+i, 4n-1-i, ... of the sorted list.
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
from nestrec.data.batch_order import contiguous_shares


def fixed(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Counts differ by one at the most; the first ranks have the more."""
    bounds = contiguous_shares(cost.size, num_ranks)
    return [np.arange(start, end) for start, end in itertools.pairwise(bounds)]


def greedy(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Counts differ."""
    return groups_of(longest_first(cost, descending(cost), num_ranks), num_ranks)


@njit(cache=True, nogil=True)
def longest_first(cost: NDArray[np.float64], order: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """(B,) rank of each sample; among equally loaded ranks the lowest number takes it."""
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
    """Restore the heap of ranks by (load, rank) after the load of its top has grown."""
    rank = heap[0]
    place = 0
    size = heap.size
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        right = child + 1
        if right < size and _is_before(heap[right], heap[child], load):
            child = right
        if not _is_before(heap[child], rank, load):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = rank


@njit(cache=True, nogil=True, inline="always")
def _is_before(a: int, b: int, load: NDArray[np.float64]) -> bool:
    return bool(load[a] < load[b] or (load[a] == load[b] and a < b))


def karmarkar_karp(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Counts differ by one at the most."""
    return groups_of(largest_differencing(cost, descending(cost), num_ranks), num_ranks)


@njit(cache=True, nogil=True)
def largest_differencing(cost: NDArray[np.float64], order: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """(B,) rank of each sample. Part p of group g is a linked list of samples, kept by falling load."""
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
    """Join group b into group a, the heaviest parts of one with the lightest of the other."""
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


def token_threshold(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Counts differ. Counts tokens as published, or cost where no lengths are given."""
    weights = cost if lengths is None else lengths.astype(np.float64)
    return groups_of(cut_at_threshold(weights, smallest_threshold(weights, num_ranks)), num_ranks)


def zigzag(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Counts differ by one at the most. Sorts by length as published, or by cost where no lengths are given."""
    order = descending(cost if lengths is None else lengths.astype(np.float64))
    place = np.arange(cost.size) % (2 * num_ranks)
    assignment = np.empty(cost.size, dtype=np.int64)
    assignment[order] = np.minimum(place, 2 * num_ranks - 1 - place)
    return groups_of(assignment, num_ranks)
