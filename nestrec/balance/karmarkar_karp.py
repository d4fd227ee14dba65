"""`karmarkar_karp`: largest differencing with equal counts.

The sorted samples are taken in groups of one sample a rank. The two groups whose loads differ most are joined, the
heaviest part of one with the lightest of the other, until one group is left: its parts are the ranks.
"""

import heapq
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.balance.ordering import Groups, descending, groups_of


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
        group, part = i // num_ranks, i % num_ranks
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
