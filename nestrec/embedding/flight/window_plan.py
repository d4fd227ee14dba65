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

from nestrec.ops.rows.dedup_host import Deduplicated, dedup

MOST_MICRO_BATCHES = 1 << 15
"""Parts are told apart by sixteen bits with a sign."""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """One table over all micro-batches of a rank's batch."""

    micro_batches: list[Deduplicated]
    """For each micro-batch the keys that it uses first, grouped by owner; `inverse`: place among all its distinct
    keys."""
    places: list[NDArray[np.int32]]
    """For each micro-batch the place in the cache of each of its distinct keys."""
    last_micro_batch: list[NDArray[np.int16]]
    """For each micro-batch, in the order of `micro_batches[p].keys`, the micro-batch that uses the key last."""
    leaving: list[NDArray[np.int32]]
    """For each micro-batch the places in the cache of the gradients that leave after it, grouped by owner."""
    leaving_counts: NDArray[np.int64]
    """(micro-batch, owner) numbers of gradients."""

    @property
    def num_rows(self) -> int:
        """Rows of the cache: distinct keys of the batch."""
        return sum(len(micro_batch.keys) for micro_batch in self.micro_batches)


def plan_window(keys_of_micro_batches: Sequence[NDArray[np.int64]], num_shards: int) -> WindowPlan:
    """The plan of one table for the keys of each micro-batch; a pure function."""
    num_micro_batches = len(keys_of_micro_batches)
    assert num_micro_batches <= MOST_MICRO_BATCHES
    bounds = np.concatenate([[0], np.cumsum([len(keys) for keys in keys_of_micro_batches])])
    whole = dedup(np.concatenate(keys_of_micro_batches), num_shards)
    owner = np.repeat(np.arange(num_shards, dtype=np.uint16), whole.counts)
    index, used, used_bounds, first, last = _uses(whole.inverse, bounds, len(whole.keys))
    # Keys are grouped by owner, and stay so inside a micro-batch. Sixteen bits are sorted by counting, more by
    # comparing.
    order = np.argsort(first.astype(np.uint16), kind="stable")
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    keys, first, last, owner = whole.keys[order], first[order], last[order], owner[order]
    starts = np.searchsorted(first, np.arange(num_micro_batches + 1))
    micro_batches, places, last_micro_batch, leaving = [], [], [], []
    for p in range(num_micro_batches):
        new = slice(starts[p], starts[p + 1])
        counts = np.bincount(owner[new], minlength=num_shards).astype(np.int64)
        micro_batches.append(Deduplicated(keys[new], index[bounds[p] : bounds[p + 1]], counts))
        places.append(place[used[used_bounds[p] : used_bounds[p + 1]]])
        last_micro_batch.append(last[new].astype(np.int16))
        gone = np.flatnonzero(last == p)
        leaving.append(gone[np.argsort(owner[gone], kind="stable")].astype(np.int32))
    leaving_counts = np.stack([np.bincount(owner[gone], minlength=num_shards) for gone in leaving]).astype(np.int64)
    return WindowPlan(micro_batches, places, last_micro_batch, leaving, leaving_counts)


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
