"""The `refined` balance policy: a good initial partition, then swaps between the most and least loaded ranks.

The policy is nestrec's own. It starts from largest differencing (Karmarkar-Karp), which spreads the long samples evenly
over the ranks and so leaves each rank samples from which equal micro-batches can be formed. If the result after the
swaps is still above the lower bound, it also starts from greedy (longest first) and uses the better partition. A swap
moves the difference d of two costs from a rank to a less loaded one. The best d is half of the difference of their
loads, and two pointers over the sorted samples of both ranks find the closest one. Every rank also has an empty entry
of cost 0, so that a move is a swap, too.

The work is limited in steps and not in time, so that every rank computes the same partition.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.balance.partition_tools import Groups, descending, groups_of
from nestrec.balance.simple_policies import largest_differencing, longest_first

TOLERANCE = 1e-4
"""Relative distance from the mean load within which a rank counts as balanced."""
GOOD_ENOUGH = 1e-3
"""Relative distance from the lower bound within which the second start is skipped."""
MAX_STEPS = 400_000
"""Maximum number of pointer steps per search for swaps; a step takes a few nanoseconds."""


def refined(cost: NDArray[np.float64], num_ranks: int, *, lengths: NDArray[Any] | None = None) -> Groups:
    """Partition by `refined`. The sample counts of the ranks are usually similar, but this is not guaranteed."""
    order = descending(cost)
    bound = max(cost.sum() / num_ranks, cost.max(initial=0.0))
    best = None
    lowest = np.inf
    for start in (largest_differencing, longest_first):
        assignment = start(cost, order, num_ranks)
        top = swap_until_balanced(cost, order, assignment, num_ranks, TOLERANCE, MAX_STEPS)
        if top < lowest:
            best = assignment
            lowest = top
        if lowest <= bound * (1.0 + GOOD_ENOUGH):
            break
    assert best is not None
    return groups_of(best, num_ranks)


@njit(cache=True, nogil=True)
def swap_until_balanced(  # noqa: PLR0917
    cost: NDArray[np.float64],
    order: NDArray[np.int64],
    assignment: NDArray[np.int64],
    num_ranks: int,
    tolerance: float,
    max_steps: int,
) -> float:
    """Improve `assignment` in place by swaps; return the load of the most loaded rank."""
    start, entries, load = _sorted_entries(cost, order, assignment, num_ranks)
    slack = tolerance * load.mean()
    steps = 0
    while steps < max_steps:
        heavy, light = int(np.argmax(load)), int(np.argmin(load))
        done = True
        if load[heavy] - load.mean() > slack:
            target, i, j, work = _best_swap(cost, start, entries, load, heavy, slack, True)
            steps += work
            if target >= 0:
                _apply(cost, start, entries, load, assignment, heavy, target, i, j)
                done = False
        if done and load.mean() - load[light] > slack:
            source, i, j, work = _best_swap(cost, start, entries, load, light, slack, False)
            steps += work
            if source >= 0:
                _apply(cost, start, entries, load, assignment, source, light, i, j)
                done = False
        if done:
            break
        steps += num_ranks
    return float(load.max())


@njit(cache=True, nogil=True)
def _sorted_entries(
    cost: NDArray[np.float64], order: NDArray[np.int64], assignment: NDArray[np.int64], num_ranks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return the start of each rank's entries, the entries, and the loads.

    The samples of rank r are `entries[start[r]:start[r + 1]]` by decreasing cost, followed by an empty entry (-1).
    """
    start = np.zeros(num_ranks + 1, dtype=np.int64)
    load = np.zeros(num_ranks, dtype=np.float64)
    for sample in order:
        start[assignment[sample] + 1] += 1
        load[assignment[sample]] += cost[sample]
    start = np.cumsum(start) + np.arange(num_ranks + 1)
    fill = start[:-1].copy()
    entries = np.full(cost.size + num_ranks, -1, dtype=np.int64)
    for sample in order:
        entries[fill[assignment[sample]]] = sample
        fill[assignment[sample]] += 1
    return start, entries, load


@njit(cache=True, nogil=True, inline="always")
def _cost_at(cost: NDArray[np.float64], sample: int) -> float:
    return 0.0 if sample < 0 else cost[sample]


@njit(cache=True, nogil=True)
def _best_swap(  # noqa: PLR0917
    cost: NDArray[np.float64],
    start: NDArray[np.int64],
    entries: NDArray[np.int64],
    load: NDArray[np.float64],
    rank: int,
    slack: float,
    is_source: bool,
) -> tuple[int, int, int, int]:
    """Return the other rank, the entry indices of the source and the target, and the number of steps.

    The other rank is -1 if no swap helps. The best swap brings the worse of the two ranks closest to the mean; the
    search ends at the first swap that is close enough.
    """
    mean = load.mean()
    best_rank = -1
    best_i = -1
    best_j = -1
    steps = 0
    best = abs(load[rank] - mean) * (1.0 - 1e-12)
    for offset in range(1, load.size):
        other = (rank + offset) % load.size
        source, target = (rank, other) if is_source else (other, rank)
        gap = load[source] - load[target]
        if gap <= slack:
            continue
        i, j = start[source], start[target]
        while i < start[source + 1] and j < start[target + 1]:
            moved = _cost_at(cost, entries[i]) - _cost_at(cost, entries[j])
            if 0.0 < moved < gap:
                left = load[source] - moved
                right = load[target] + moved
                worst = max(left, right) - mean if is_source else mean - min(left, right)
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
    entries: NDArray[np.int64],
    load: NDArray[np.float64],
    assignment: NDArray[np.int64],
    source: int,
    target: int,
    i: int,
    j: int,
) -> None:
    sample_out, sample_in = entries[i], entries[j]
    moved = _cost_at(cost, sample_out) - _cost_at(cost, sample_in)
    load[source] -= moved
    load[target] += moved
    if sample_out >= 0:
        assignment[sample_out] = target
    if sample_in >= 0:
        assignment[sample_in] = source
    _replace(cost, entries, start[source], start[source + 1], i, sample_in)
    _replace(cost, entries, start[target], start[target + 1], j, sample_out)


@njit(cache=True, nogil=True)
def _replace(  # noqa: PLR0917
    cost: NDArray[np.float64], entries: NDArray[np.int64], first: int, end: int, index: int, sample: int
) -> None:
    """Replace the entry at `index` by `sample` and move it to its position by decreasing cost."""
    own_cost = _cost_at(cost, sample)
    while index > first and _cost_at(cost, entries[index - 1]) < own_cost:
        entries[index] = entries[index - 1]
        index -= 1
    while index + 1 < end and _cost_at(cost, entries[index + 1]) > own_cost:
        entries[index] = entries[index + 1]
        index += 1
    entries[index] = sample
