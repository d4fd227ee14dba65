"""Deduplication of keys on the host: one pass over a hash table, then a stable bucket sort by owner.

The distinct keys come out grouped by owner and, inside a group, in order of first appearance: a pure function of the
key sequence. So the list of distinct keys is at once the send buffer of the key exchange, and the vectors that come
back from the owners need no reordering.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.embedding.hashing import mix64


@dataclass(frozen=True, slots=True)
class Deduplicated:
    """Distinct keys grouped by owner, and for each original key its place among them."""

    keys: NDArray[np.int64]
    inverse: NDArray[np.int32]
    counts: NDArray[np.int64]
    """Distinct keys of each owner."""


def dedup(keys: NDArray[np.int64], num_shards: int = 1) -> Deduplicated:
    """Distinct keys of a sequence; `result.keys[result.inverse]` gives the sequence back."""
    inverse = np.empty(len(keys), np.int32)
    unique = _first_appearance(keys, inverse)
    if num_shards == 1:
        return Deduplicated(unique, inverse, np.array([len(unique)], np.int64))
    counts = np.zeros(num_shards, np.int64)
    grouped = np.empty_like(unique)
    _group_by_owner(unique, inverse, np.uint64(num_shards), counts, grouped)
    return Deduplicated(grouped, inverse, counts)


@njit(cache=True, nogil=True)
def _first_appearance(keys, inverse):  # type: ignore[no-untyped-def]
    # The table grows with the number of distinct keys, not of keys: real batches repeat keys, and a table that stays
    # in the cache is what makes a probe cheap.
    bits = 12
    entries = np.empty((1 << bits, 2), np.int64)
    entries[:, 1] = -1
    unique = np.empty(max(len(keys), 1), np.int64)
    num_unique, limit = 0, 1 << (bits - 1)
    for i in range(len(keys)):
        if num_unique >= limit:
            bits += 2
            limit = 1 << (bits - 1)
            entries = _rehash(unique, num_unique, bits)
        key = keys[i]
        mask = np.int64((1 << bits) - 1)
        place = np.int64(mix64(np.uint64(key)) >> np.uint64(64 - bits))
        while True:
            found = entries[place, 1]
            if found < 0:
                entries[place, 0] = key
                entries[place, 1] = num_unique
                unique[num_unique] = key
                inverse[i] = num_unique
                num_unique += 1
                break
            if entries[place, 0] == key:
                inverse[i] = found
                break
            place = (place + 1) & mask
    return unique[:num_unique].copy()


@njit(cache=True, nogil=True)
def _rehash(unique, num_unique, bits):  # type: ignore[no-untyped-def]
    entries = np.empty((1 << bits, 2), np.int64)
    entries[:, 1] = -1
    mask = np.int64((1 << bits) - 1)
    for j in range(num_unique):
        place = np.int64(mix64(np.uint64(unique[j])) >> np.uint64(64 - bits))
        while entries[place, 1] >= 0:
            place = (place + 1) & mask
        entries[place, 0] = unique[j]
        entries[place, 1] = j
    return entries


@njit(cache=True, nogil=True)
def _group_by_owner(unique, inverse, num_shards, counts, grouped):  # type: ignore[no-untyped-def]
    owners = np.empty(len(unique), np.int32)
    for j in range(len(unique)):
        owners[j] = np.int32(mix64(np.uint64(unique[j])) % num_shards)
        counts[owners[j]] += 1
    cursor = np.zeros(len(counts), np.int64)
    for shard in range(1, len(counts)):
        cursor[shard] = cursor[shard - 1] + counts[shard - 1]
    place = np.empty(len(unique), np.int32)
    for j in range(len(unique)):
        place[j] = cursor[owners[j]]
        cursor[owners[j]] += 1
        grouped[place[j]] = unique[j]
    for i in range(len(inverse)):
        inverse[i] = place[inverse[i]]
