"""Which keys cross with which micro-batch when a rank keeps what it has received (the window cache).

Place c of the cache belongs to the c-th distinct key of the batch in order of (first micro-batch that uses it, owner).
So the vectors that arrive for a micro-batch fill one run of the cache, and the keys to ask for are the cache's own
order. Owners learn from the exchange in which micro-batch each key is used last, and both sides so know which gradients
leave with which micro-batch, without a second list of keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.ops.embedding.dedup_host import dedup_segments

MOST_MICRO_BATCHES = 1 << 15
"""Parts are told apart by sixteen bits with a sign."""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """One table over all micro-batches of a rank's batch."""

    keys: NDArray[np.int64]
    """Distinct keys in the order of the cache."""
    starts: NDArray[np.int64]
    """(number of micro-batches + 1,) where those that each uses first begin."""
    last: NDArray[np.int16]
    """The micro-batch that uses each key last."""
    index: list[NDArray[np.int32]]
    """For each micro-batch, of each of its positions, the place among its distinct keys."""
    places: list[NDArray[np.int32]]
    """For each micro-batch the place in the cache of each of its distinct keys."""

    @property
    def num_rows(self) -> int:
        """Rows of the cache: distinct keys of the batch."""
        return len(self.keys)

    def new_of(self, micro_batch: int) -> NDArray[np.int64]:
        """Keys that a micro-batch uses first, grouped by owner."""
        return self.keys[self.starts[micro_batch] : self.starts[micro_batch + 1]]

    def last_of(self, micro_batch: int) -> NDArray[np.int16]:
        """Of these, the micro-batch that uses each last."""
        return self.last[self.starts[micro_batch] : self.starts[micro_batch + 1]]


def plan_window(keys_of_micro_batches: Sequence[NDArray[np.int64]], num_shards: int) -> WindowPlan:
    """The plan of one table for the keys of each micro-batch; a pure function."""
    num_micro_batches = len(keys_of_micro_batches)
    assert num_micro_batches <= MOST_MICRO_BATCHES
    bounds = np.concatenate([[0], np.cumsum([len(keys) for keys in keys_of_micro_batches])])
    whole = dedup_segments(np.concatenate(keys_of_micro_batches), bounds[[0, -1]], num_shards)
    index, used, used_bounds, first, last = _uses(whole.inverse, bounds, len(whole.keys))
    # Keys are grouped by owner, and stay so inside a micro-batch. Sixteen bits are sorted by counting, more by
    # comparing.
    order = np.argsort(first.astype(np.uint16), kind="stable")
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    starts = np.searchsorted(first[order], np.arange(num_micro_batches + 1))
    return WindowPlan(
        keys=whole.keys[order],
        starts=starts,
        last=last[order].astype(np.int16),
        index=np.split(index, bounds[1:-1]),
        places=np.split(place[used], used_bounds[1:-1]),
    )


@njit(cache=True, nogil=True)
def _uses(inverse, bounds, num_unique):  # type: ignore[no-untyped-def]
    """Place of each position among its micro-batch's distinct keys, these keys, their bounds, first and last
    micro-batch of a key."""
    num_micro_batches = len(bounds) - 1
    index = np.empty(len(inverse), np.int32)
    used = np.empty(len(inverse), np.int32)
    used_bounds = np.zeros(num_micro_batches + 1, np.int64)
    first, last = np.full(num_unique, -1, np.int32), np.full(num_unique, -1, np.int32)
    local = np.empty(num_unique, np.int32)
    total = 0
    for p in range(num_micro_batches):
        start = total
        for i in range(bounds[p], bounds[p + 1]):
            key = inverse[i]
            if last[key] != p:
                if first[key] < 0:
                    first[key] = p
                last[key] = p
                local[key] = total - start
                used[total] = key
                total += 1
            index[i] = local[key]
        used_bounds[p + 1] = total
    return index, used[:total].copy(), used_bounds, first, last
