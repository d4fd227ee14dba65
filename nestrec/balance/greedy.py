"""`greedy`: the costliest sample first, each to the rank with the least load (TurboGR, long sequences).

TurboGR counts tokens; that is the special case of a cost model with tokens only.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.balance.ordering import Groups, descending, groups_of


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
    place, size = 0, heap.size
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
