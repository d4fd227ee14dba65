"""Deduplication of keys on the host, grouped by owner.

Keys are first split into buckets, by owner and then by bits of their hash, so many that the hash table of one bucket
stays in a core's cache; then each bucket is deduplicated in order of first appearance. The distinct keys so come out
grouped by owner, in an order that is a pure function of the key sequence: they are at once the send buffer of the key
exchange, and the vectors that come back from the owners need no reordering.
"""

import threading
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.random import mix64_jit

_BUCKET_KEYS = 4096
_MAX_BUCKETS = 2048
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class UniqueKeys:
    """Distinct keys grouped by owner, and for each original key its place among them."""

    keys: NDArray[np.int64]
    inverse: NDArray[np.int32]
    counts: NDArray[np.int64]
    """Distinct keys of each owner."""
    index: torch.Tensor | None = None
    """`inverse` on the device, where the keys were deduplicated there; `inverse` is then as much of its beginning as
    was asked for."""


def dedup(keys: NDArray[np.int64], num_shards: int = 1) -> UniqueKeys:
    """Distinct keys of a sequence; `result.keys[result.inverse]` gives the sequence back."""
    wanted = min(_MAX_BUCKETS, len(keys) // _BUCKET_KEYS) // num_shards
    bits = max(0, wanted.bit_length() - 1)
    inverse = np.empty(len(keys), np.int32)
    counts = np.zeros(num_shards, np.int64)
    scratch = _scratch.of(len(keys))
    num_unique = _dedup(keys, np.uint64(bits), inverse, counts, scratch)
    return UniqueKeys(scratch[0][:num_unique].copy(), inverse, counts)


@dataclass(frozen=True, slots=True)
class Segments:
    """Distinct keys of each of several sequences, those of a sequence grouped by owner."""

    keys: NDArray[np.int64]
    bounds: NDArray[np.int64]
    """(number of sequences + 1,) where the keys of each begin."""
    inverse: NDArray[np.int32]
    """For each original key its place among the distinct keys of its sequence."""
    positions: NDArray[np.int64]
    """(number of sequences + 1,) where the original keys of each begin."""

    def owners(self, num_shards: int) -> NDArray[np.int32]:
        """Of each key."""
        found = np.zeros(len(self.keys), np.int32)
        if num_shards > 1:
            owners_of(self.keys, np.uint64(num_shards), found)
        return found

    def inverse_of(self, sequence: int) -> NDArray[np.int32]:
        """Its part of `inverse`."""
        return self.inverse[self.positions[sequence] : self.positions[sequence + 1]]


def dedup_segments(keys: NDArray[np.int64], bounds: NDArray[np.int64], num_shards: int = 1) -> Segments:
    """`dedup` of many sequences, keys[bounds[s] : bounds[s + 1]], in one call: most are short where tables are many."""
    inverse = np.empty(len(keys), np.int32)
    found = np.zeros(len(bounds), np.int64)
    scratch = _scratch.of(len(keys))
    _dedup_segments(keys, bounds, num_shards, inverse, found, scratch)
    return Segments(scratch[0][: found[-1]].copy(), found, inverse, bounds)


Scratch = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]


class _ThreadScratch(threading.local):
    """Buffers of a thread, kept from call to call: fresh memory of this size would cost as much as the work itself."""

    def __init__(self) -> None:
        self._buffers = self._make(1024)

    def of(self, num_keys: int) -> Scratch:
        """Distinct keys, keys in buckets, their positions in the sequence, and the bucket of each position."""
        if num_keys > len(self._buffers[0]):
            self._buffers = self._make(num_keys * 5 // 4)
        return self._buffers

    @staticmethod
    def _make(size: int) -> Scratch:
        return np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int32), np.empty(size, np.int32)


_scratch = _ThreadScratch()


@njit(cache=True, nogil=True)
def _dedup_segments(keys, bounds, num_shards, inverse, found, scratch):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    distinct, _, position, _ = scratch
    table = np.full((4 * _BUCKET_KEYS, 2), -1, np.int64)
    num_unique = 0
    for s in range(len(bounds) - 1):
        low = bounds[s]
        first = num_unique
        own = keys[low : bounds[s + 1]]
        of_own = inverse[low : bounds[s + 1]]
        if num_shards == 1 or len(own) >= 4 * num_shards:
            bits = 0
            while (2 << bits) * num_shards <= min(_MAX_BUCKETS, len(own) // _BUCKET_KEYS):
                bits += 1
            num_unique, table = _segment_by_buckets(own, num_shards, bits, of_own, num_unique, table, scratch)
        else:  # as many buckets as owners would cost more than the keys do
            for i in range(len(own)):
                position[i] = i
            num_unique, table = _one_bucket(own, position[: len(own)], of_own, distinct, num_unique, table)
            _group_by_owner(distinct[first:num_unique], of_own, first, num_shards)
        found[s + 1] = num_unique
        for i in range(len(own)):
            of_own[i] -= first


@njit(cache=True, nogil=True)
def _segment_by_buckets(keys, num_shards, bits, inverse, num_unique, table, scratch):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    distinct, bucketed, position, _ = scratch
    ends = _into_buckets(keys, num_shards, np.int64(1) << np.int64(bits), scratch)
    start = 0
    for bucket in range(len(ends)):
        end = ends[bucket]
        here = position[start:end]
        num_unique, table = _one_bucket(bucketed[start:end], here, inverse, distinct, num_unique, table)
        start = end
    return num_unique, table


@njit(cache=True, nogil=True)
def owners_of(keys, num_shards, out):  # type: ignore[no-untyped-def]
    """The one rule that says which shard owns a key: the hashes are cut into as many equal ranges as there are shards.

    What any shard owns is then a run of all keys in order of their hashes, however many shards there are.
    """
    for i in range(len(keys)):
        out[i] = np.int32(((mix64_jit(np.uint64(keys[i])) >> _HALF) * num_shards) >> _HALF)


@njit(cache=True, nogil=True)
def hashes_of(keys, out):  # type: ignore[no-untyped-def]
    """The upper 32 bits of splitmix64, by which keys are owned."""
    for i in range(len(keys)):
        out[i] = np.uint32(mix64_jit(np.uint64(keys[i])) >> _HALF)


@njit(cache=True, nogil=True)
def _group_by_owner(distinct, inverse, first, num_shards):  # type: ignore[no-untyped-def]
    """Distinct keys, numbered from `first` in order of appearance, to groups by owner; numbers follow."""
    owners = np.empty(len(distinct), np.int32)
    owners_of(distinct, np.uint64(num_shards), owners)
    order = np.argsort(owners, kind="mergesort")
    grouped = distinct[order]
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    distinct[:] = grouped
    for i in range(len(inverse)):
        inverse[i] = first + place[inverse[i] - first]


@njit(cache=True, nogil=True)
def _dedup(keys, bits, inverse, counts, scratch):  # type: ignore[no-untyped-def]
    distinct, bucketed, position, _ = scratch
    per_owner = np.int64(1) << np.int64(bits)
    ends = _into_buckets(keys, len(counts), per_owner, scratch)
    table = np.full((4 * _BUCKET_KEYS, 2), -1, np.int64)
    num_unique, start = 0, 0
    for bucket in range(len(ends)):
        first = num_unique
        end = ends[bucket]
        here = position[start:end]
        num_unique, table = _one_bucket(bucketed[start:end], here, inverse, distinct, num_unique, table)
        counts[bucket // per_owner] += num_unique - first
        start = end
    return num_unique


@njit(cache=True, nogil=True)
def _into_buckets(keys, num_shards, per_owner, scratch):  # type: ignore[no-untyped-def]
    """Stable split; the end of each bucket."""
    _, bucketed, position, bucket_of = scratch
    shards, sub_mask = np.uint64(num_shards), np.uint64(per_owner - 1)
    ends = np.zeros(num_shards * per_owner, np.int64)
    for i in range(len(keys)):
        hashed = mix64_jit(np.uint64(keys[i]))
        # Lower bits for the bucket: the owner is a matter of the upper ones.
        owner = ((hashed >> _HALF) * shards) >> _HALF
        bucket = np.int32(owner * np.uint64(per_owner) + ((hashed >> np.uint64(20)) & sub_mask))
        bucket_of[i] = bucket
        ends[bucket] += 1
    total = 0
    for b in range(len(ends)):
        count = ends[b]
        ends[b] = total
        total += count
    for i in range(len(keys)):
        place = ends[bucket_of[i]]
        ends[bucket_of[i]] = place + 1
        bucketed[place] = keys[i]
        position[place] = i
    return ends


@njit(cache=True, nogil=True)
def _one_bucket(keys, position, inverse, distinct, num_unique, table):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """Number the distinct keys of a bucket from `num_unique` on; the table may have been replaced by a larger one.

    Entries are (key, number). Numbers only grow, so what other buckets left behind is told by its number.
    """
    first = num_unique
    size = 16
    while size < 2 * len(keys) and size < len(table):
        size *= 2
    for i in range(len(keys)):
        key = keys[i]
        place = _find(table, size, key, first)
        if table[place, 1] < first:
            if 2 * (num_unique - first) >= size:
                size *= 4
                table = _rebuilt(distinct, first, num_unique, size)
                place = _find(table, size, key, first)
            table[place, 0] = key
            table[place, 1] = num_unique
            distinct[num_unique] = key
            num_unique += 1
        inverse[position[i]] = table[place, 1]
    return num_unique, table


@njit(cache=True, nogil=True, inline="always")
def _find(table, size, key, first):  # type: ignore[no-untyped-def]
    """Where a key is, or would be."""
    mask = np.int64(size - 1)
    place = np.int64(mix64_jit(np.uint64(key)) >> np.uint64(4)) & mask
    while table[place, 1] >= first and table[place, 0] != key:
        place = (place + 1) & mask
    return place


@njit(cache=True, nogil=True)
def _rebuilt(distinct, first, num_unique, size):  # type: ignore[no-untyped-def]
    table = np.full((size, 2), -1, np.int64)
    for number in range(first, num_unique):
        place = _find(table, size, distinct[number], first)
        table[place, 0] = distinct[number]
        table[place, 1] = number
    return table
