"""Plan of the window cache, with which a rank retains received vectors for the later micro-batches of a batch.

Row c of the cache belongs to the c-th unique key of the batch in order of (first micro-batch that uses it, owner). The
vectors received for a micro-batch therefore fill a contiguous range of the cache, and the requested keys are in cache
order. The key exchange sends the last micro-batch that uses each key to the owner, so both sides know which gradients
are sent after which micro-batch, without a second list of keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.ops.embedding.dedup_host import dedup_segments

MAX_MICRO_BATCHES = 1 << 15
"""Maximum number of micro-batches, whose numbers are stored as int16."""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Window cache plan of one table, over all micro-batches of a rank's batch."""

    keys: NDArray[np.int64]
    """Unique keys in cache order."""
    starts: NDArray[np.int64]
    """(number of micro-batches + 1,) bounds of the keys that each micro-batch uses first."""
    last: NDArray[np.int16]
    """Last micro-batch that uses each key."""
    inverse: list[NDArray[np.int32]]
    """Per micro-batch, the index of each of its keys among its unique keys."""
    cache_indices: list[NDArray[np.int32]]
    """Per micro-batch, the cache row of each of its unique keys."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the cache: the unique keys of the batch."""
        return len(self.keys)

    def first_used_keys(self, micro_batch: int) -> NDArray[np.int64]:
        """Return the keys that a micro-batch uses first, grouped by owner."""
        return self.keys[self.starts[micro_batch] : self.starts[micro_batch + 1]]

    def last_micro_batches(self, micro_batch: int) -> NDArray[np.int16]:
        """Return the last micro-batch that uses each of the `first_used_keys` of a micro-batch."""
        return self.last[self.starts[micro_batch] : self.starts[micro_batch + 1]]


def plan_window(keys_of_micro_batches: Sequence[NDArray[np.int64]], num_shards: int) -> WindowPlan:
    """Return the window cache plan of one table for the keys of each micro-batch; a pure function."""
    num_micro_batches = len(keys_of_micro_batches)
    assert num_micro_batches <= MAX_MICRO_BATCHES
    bounds = np.concatenate([[0], np.cumsum([len(keys) for keys in keys_of_micro_batches])])
    unique = dedup_segments(np.concatenate(keys_of_micro_batches), bounds[[0, -1]], num_shards)
    inverse, used, used_bounds, first, last = _uses(unique.inverse, bounds, len(unique.keys))
    # The stable sort keeps keys grouped by owner inside a micro-batch. numpy sorts 16-bit integers with a radix sort,
    # which is faster than the comparison sort of wider ones.
    order = np.argsort(first.astype(np.uint16), kind="stable")
    cache_index = np.empty(len(order), np.int32)
    cache_index[order] = np.arange(len(order), dtype=np.int32)
    starts = np.searchsorted(first[order], np.arange(num_micro_batches + 1))
    return WindowPlan(
        keys=unique.keys[order],
        starts=starts,
        last=last[order].astype(np.int16),
        inverse=np.split(inverse, bounds[1:-1]),
        cache_indices=np.split(cache_index[used], used_bounds[1:-1]),
    )


@njit(cache=True, nogil=True)
def _uses(inverse, bounds, num_unique):  # type: ignore[no-untyped-def]
    """Return the inverse indices and the unique keys of the micro-batches, their bounds, and the first and last
    micro-batch of each key."""
    num_micro_batches = len(bounds) - 1
    local_inverse = np.empty(len(inverse), np.int32)
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
            local_inverse[i] = local[key]
        used_bounds[p + 1] = total
    return local_inverse, used[:total].copy(), used_bounds, first, last
