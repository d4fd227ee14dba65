"""`refined`: a good partition, then swaps between the most and the least loaded ranks until nothing helps. Our own.

It starts from largest differencing, which spreads the long samples evenly over the ranks and thereby leaves each with
samples from which equal micro-batches can be made; where that and the swaps stay above the lower bound, it also
starts from longest first, and keeps the better. A swap moves the difference d of two costs from a rank to a less
loaded one; the best d is half of the difference of their loads, and two pointers over the sorted samples of both find
the closest. Every rank also has an empty place of cost 0, so that a move is a swap too.

The work is bounded in steps and not in time, so that every rank finds the same partition.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.balance.partition_tools import Groups, descending, groups_of
from nestrec.balance.simple_policies import largest_differencing, longest_first

TOLERANCE = 1e-4
"""Ranks this close to the mean load (relative) are left alone."""
GOOD_ENOUGH = 1e-3
"""No second start where the first comes this close to the lower bound (relative)."""
MAX_STEPS = 400_000
"""Pointer steps of each search for swaps, a few nanoseconds each."""


def refined(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Counts are mostly equal, but nothing keeps them so."""
    order = descending(cost)
    bound = max(cost.sum() / num_ranks, cost.max(initial=0.0))
    best = None
    lowest = np.inf
    for start in (largest_differencing, longest_first):
        assignment = start(cost, order, num_ranks)
        top = swap_until_even(cost, order, assignment, num_ranks, TOLERANCE, MAX_STEPS)
        if top < lowest:
            best = assignment
            lowest = top
        if lowest <= bound * (1.0 + GOOD_ENOUGH):
            break
    assert best is not None
    return groups_of(best, num_ranks)


@njit(cache=True, nogil=True)
def swap_until_even(  # noqa: PLR0917
    cost: NDArray[np.float64],
    order: NDArray[np.int64],
    assignment: NDArray[np.int64],
    num_ranks: int,
    tolerance: float,
    max_steps: int,
) -> float:
    """Improve `assignment` in place; the load of the most loaded rank."""
    start, places, load = _places(cost, order, assignment, num_ranks)
    slack = tolerance * load.mean()
    steps = 0
    while steps < max_steps:
        heavy, light = int(np.argmax(load)), int(np.argmin(load))
        done = True
        if load[heavy] - load.mean() > slack:
            taker, i, j, work = _best_swap(cost, start, places, load, heavy, slack, True)
            steps += work
            if taker >= 0:
                _apply(cost, start, places, load, assignment, heavy, taker, i, j)
                done = False
        if done and load.mean() - load[light] > slack:
            giver, i, j, work = _best_swap(cost, start, places, load, light, slack, False)
            steps += work
            if giver >= 0:
                _apply(cost, start, places, load, assignment, giver, light, i, j)
                done = False
        if done:
            break
        steps += num_ranks
    return float(load.max())


@njit(cache=True, nogil=True)
def _places(
    cost: NDArray[np.float64], order: NDArray[np.int64], assignment: NDArray[np.int64], num_ranks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Samples of rank r by falling cost at `places[start[r]:start[r + 1]]`, an empty place (-1) last; the loads."""
    start = np.zeros(num_ranks + 1, dtype=np.int64)
    load = np.zeros(num_ranks, dtype=np.float64)
    for sample in order:
        start[assignment[sample] + 1] += 1
        load[assignment[sample]] += cost[sample]
    start = np.cumsum(start) + np.arange(num_ranks + 1)
    fill = start[:-1].copy()
    places = np.full(cost.size + num_ranks, -1, dtype=np.int64)
    for sample in order:
        places[fill[assignment[sample]]] = sample
        fill[assignment[sample]] += 1
    return start, places, load


@njit(cache=True, nogil=True, inline="always")
def _cost_at(cost: NDArray[np.float64], sample: int) -> float:
    return 0.0 if sample < 0 else cost[sample]


@njit(cache=True, nogil=True)
def _best_swap(  # noqa: PLR0917
    cost: NDArray[np.float64],
    start: NDArray[np.int64],
    places: NDArray[np.int64],
    load: NDArray[np.float64],
    rank: int,
    slack: float,
    is_giver: bool,
) -> tuple[int, int, int, int]:
    """The other rank, the place of the giver, that of the taker, and the steps taken; the other rank is -1 if none
    helps.

    Best is what leaves the worse of the two ranks closest to the mean; the search ends with the first that is close
    enough.
    """
    mean = load.mean()
    best_rank = -1
    best_i = -1
    best_j = -1
    steps = 0
    best = abs(load[rank] - mean) * (1.0 - 1e-12)
    for offset in range(1, load.size):
        other = (rank + offset) % load.size
        giver, taker = (rank, other) if is_giver else (other, rank)
        gap = load[giver] - load[taker]
        if gap <= slack:
            continue
        i, j = start[giver], start[taker]
        while i < start[giver + 1] and j < start[taker + 1]:
            moved = _cost_at(cost, places[i]) - _cost_at(cost, places[j])
            if 0.0 < moved < gap:
                left = load[giver] - moved
                right = load[taker] + moved
                worst = max(left, right) - mean if is_giver else mean - min(left, right)
                if worst < best:
                    best = worst
                    best_rank = other
                    best_i = i
                    best_j = j
            steps += 1
            if 2.0 * moved > gap:
                i += 1
            else:
                j += 1
        if best <= slack:
            break
    return best_rank, best_i, best_j, steps


@njit(cache=True, nogil=True)
def _apply(  # noqa: PLR0917
    cost: NDArray[np.float64],
    start: NDArray[np.int64],
    places: NDArray[np.int64],
    load: NDArray[np.float64],
    assignment: NDArray[np.int64],
    giver: int,
    taker: int,
    i: int,
    j: int,
) -> None:
    given, taken = places[i], places[j]
    moved = _cost_at(cost, given) - _cost_at(cost, taken)
    load[giver] -= moved
    load[taker] += moved
    if given >= 0:
        assignment[given] = taker
    if taken >= 0:
        assignment[taken] = giver
    _replace(cost, places, start[giver], start[giver + 1], i, taken)
    _replace(cost, places, start[taker], start[taker + 1], j, given)


@njit(cache=True, nogil=True)
def _replace(  # noqa: PLR0917
    cost: NDArray[np.float64], places: NDArray[np.int64], first: int, end: int, at: int, sample: int
) -> None:
    """Put `sample` in the place of the one at `at`, and move it to where the order by falling cost is kept."""
    mine = _cost_at(cost, sample)
    while at > first and _cost_at(cost, places[at - 1]) < mine:
        places[at] = places[at - 1]
        at -= 1
    while at + 1 < end and _cost_at(cost, places[at + 1]) > mine:
        places[at] = places[at + 1]
        at += 1
    places[at] = sample
