"""Deduplication of keys on the host, grouped by owner.

Keys are first bucketized by owner and then by bits of their hash, into enough buckets that the hash table of one bucket
fits into a core's cache. Then each bucket is deduplicated in order of first appearance. The resulting unique keys are
grouped by owner, in an order that is a pure function of the key sequence. So they are already the send buffer of the
key all-to-all (input dist), and the vectors received from the owners need no reordering.
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
    """Unique keys of a sequence grouped by owner, with the inverse indices of the original keys."""

    keys: NDArray[np.int64]
    """Unique keys, grouped by owner."""
    inverse: NDArray[np.int32]
    """Index of each original key in `keys`."""
    counts: NDArray[np.int64]
    """(num_shards,) number of unique keys per owner."""
    index: torch.Tensor | None = None
    """Inverse indices on the device if the keys were deduplicated there; `inverse` then has only the requested first
    part of them."""


def dedup(keys: NDArray[np.int64], num_shards: int = 1) -> UniqueKeys:
    """Deduplicate a sequence of keys; `result.keys[result.inverse]` is the sequence."""
    buckets_per_shard = min(_MAX_BUCKETS, len(keys) // _BUCKET_KEYS) // num_shards
    bits = max(0, buckets_per_shard.bit_length() - 1)
    inverse = np.empty(len(keys), np.int32)
    counts = np.zeros(num_shards, np.int64)
    scratch = _scratch.of(len(keys))
    num_unique = _dedup(keys, np.uint64(bits), inverse, counts, scratch)
    return UniqueKeys(scratch[0][:num_unique].copy(), inverse, counts)


@dataclass(frozen=True, slots=True)
class Segments:
    """Unique keys of several sequences, grouped by sequence and then by owner."""

    keys: NDArray[np.int64]
    """Unique keys of all sequences."""
    bounds: NDArray[np.int64]
    """(number of sequences + 1,) start of the unique keys of each sequence in `keys`."""
    inverse: NDArray[np.int32]
    """Index of each original key among the unique keys of its sequence."""
    positions: NDArray[np.int64]
    """(number of sequences + 1,) start of the original keys of each sequence in `inverse`."""

    def owners(self, num_shards: int) -> NDArray[np.int32]:
        """Return the shard that owns each unique key."""
        owners = np.zeros(len(self.keys), np.int32)
        if num_shards > 1:
            owners_of(self.keys, np.uint64(num_shards), owners)
        return owners

    def inverse_of(self, sequence: int) -> NDArray[np.int32]:
        """Return the inverse indices of one sequence."""
        return self.inverse[self.positions[sequence] : self.positions[sequence + 1]]


def dedup_segments(keys: NDArray[np.int64], bounds: NDArray[np.int64], num_shards: int = 1) -> Segments:
    """Deduplicate many sequences, keys[bounds[s] : bounds[s + 1]], in one call: with many tables most are short."""
    inverse = np.empty(len(keys), np.int32)
    unique_bounds = np.zeros(len(bounds), np.int64)
    scratch = _scratch.of(len(keys))
    _dedup_segments(keys, bounds, num_shards, inverse, unique_bounds, scratch)
    return Segments(scratch[0][: unique_bounds[-1]].copy(), unique_bounds, inverse, bounds)


Scratch = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]


class _ThreadScratch(threading.local):
    """Buffers of a thread, reused across calls: allocating memory of this size takes as long as the computation."""

    def __init__(self) -> None:
        self._buffers = self._make(1024)

    def of(self, num_keys: int) -> Scratch:
        """Return buffers for unique keys, keys by bucket, their positions in the sequence, and bucket per position."""
        if num_keys > len(self._buffers[0]):
            self._buffers = self._make(num_keys * 5 // 4)
        return self._buffers

    @staticmethod
    def _make(size: int) -> Scratch:
        return np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int32), np.empty(size, np.int32)


_scratch = _ThreadScratch()


@njit(cache=True, nogil=True)
def _dedup_segments(keys, bounds, num_shards, inverse, unique_bounds, scratch):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    distinct, _, position, _ = scratch
    table = np.full((4 * _BUCKET_KEYS, 2), -1, np.int64)
    num_unique = 0
    for s in range(len(bounds) - 1):
        low = bounds[s]
        first = num_unique
        segment_keys = keys[low : bounds[s + 1]]
        segment_inverse = inverse[low : bounds[s + 1]]
        if num_shards == 1 or len(segment_keys) >= 4 * num_shards:
            bits = 0
            while (2 << bits) * num_shards <= min(_MAX_BUCKETS, len(segment_keys) // _BUCKET_KEYS):
                bits += 1
            num_unique, table = _segment_by_buckets(
                segment_keys, num_shards, bits, segment_inverse, num_unique, table, scratch
            )
        else:  # with few keys, one bucket per owner would cost more than the deduplication itself
            for i in range(len(segment_keys)):
                position[i] = i
            num_unique, table = _one_bucket(
                segment_keys, position[: len(segment_keys)], segment_inverse, distinct, num_unique, table
            )
            _group_by_owner(distinct[first:num_unique], segment_inverse, first, num_shards)
        unique_bounds[s + 1] = num_unique
        for i in range(len(segment_keys)):
            segment_inverse[i] -= first


@njit(cache=True, nogil=True)
def _segment_by_buckets(keys, num_shards, bits, inverse, num_unique, table, scratch):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    distinct, bucketed, position, _ = scratch
    ends = _into_buckets(keys, num_shards, np.int64(1) << np.int64(bits), scratch)
    start = 0
    for bucket in range(len(ends)):
        end = ends[bucket]
        bucket_positions = position[start:end]
        num_unique, table = _one_bucket(bucketed[start:end], bucket_positions, inverse, distinct, num_unique, table)
        start = end
    return num_unique, table


@njit(cache=True, nogil=True)
def owners_of(keys, num_shards, out):  # type: ignore[no-untyped-def]
    """Compute the shard that owns each key: the range of hashes is divided into `num_shards` equal ranges.

    This is the only definition of row-wise sharding. In order of their hashes, the keys of a shard are contiguous for
    every number of shards.
    """
    for i in range(len(keys)):
        out[i] = np.int32(((mix64_jit(np.uint64(keys[i])) >> _HALF) * num_shards) >> _HALF)


@njit(cache=True, nogil=True)
def hashes_of(keys, out):  # type: ignore[no-untyped-def]
    """Compute the upper 32 bits of splitmix64 of each key, which determine its owner."""
    for i in range(len(keys)):
        out[i] = np.uint32(mix64_jit(np.uint64(keys[i])) >> _HALF)


@njit(cache=True, nogil=True)
def _group_by_owner(distinct, inverse, first, num_shards):  # type: ignore[no-untyped-def]
    """Group unique keys (numbered from `first` in order of appearance) by owner, and renumber `inverse` in place."""
    owners = np.empty(len(distinct), np.int32)
    owners_of(distinct, np.uint64(num_shards), owners)
    order = np.argsort(owners, kind="mergesort")
    grouped = distinct[order]
    new_index = np.empty(len(order), np.int64)
    new_index[order] = np.arange(len(order))
    distinct[:] = grouped
    for i in range(len(inverse)):
        inverse[i] = first + new_index[inverse[i] - first]


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
        bucket_positions = position[start:end]
        num_unique, table = _one_bucket(bucketed[start:end], bucket_positions, inverse, distinct, num_unique, table)
        counts[bucket // per_owner] += num_unique - first
        start = end
    return num_unique


@njit(cache=True, nogil=True)
def _into_buckets(keys, num_shards, per_owner, scratch):  # type: ignore[no-untyped-def]
    """Split the keys into buckets, in stable order; return the end of each bucket."""
    _, bucketed, position, bucket_of = scratch
    shards, sub_mask = np.uint64(num_shards), np.uint64(per_owner - 1)
    ends = np.zeros(num_shards * per_owner, np.int64)
    for i in range(len(keys)):
        hashed = mix64_jit(np.uint64(keys[i]))
        # Lower bits select the bucket, because the upper ones already select the owner.
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
        target = ends[bucket_of[i]]
        ends[bucket_of[i]] = target + 1
        bucketed[target] = keys[i]
        position[target] = i
    return ends


@njit(cache=True, nogil=True)
def _one_bucket(keys, position, inverse, distinct, num_unique, table):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """Number the unique keys of a bucket from `num_unique` on; the returned hash table can be a new, larger one.

    Entries are (key, number). Numbers only increase, so stale entries of earlier buckets are recognized by a smaller
    number and the table need not be cleared.
    """
    first = num_unique
    size = 16
    while size < 2 * len(keys) and size < len(table):
        size *= 2
    for i in range(len(keys)):
        key = keys[i]
        slot = _find(table, size, key, first)
        if table[slot, 1] < first:
            if 2 * (num_unique - first) >= size:
                size *= 4
                table = _rebuild_table(distinct, first, num_unique, size)
                slot = _find(table, size, key, first)
            table[slot, 0] = key
            table[slot, 1] = num_unique
            distinct[num_unique] = key
            num_unique += 1
        inverse[position[i]] = table[slot, 1]
    return num_unique, table


@njit(cache=True, nogil=True, inline="always")
def _find(table, size, key, first):  # type: ignore[no-untyped-def]
    """Return the slot of a key in the hash table, or the free slot where it belongs (linear probing)."""
    mask = np.int64(size - 1)
    slot = np.int64(mix64_jit(np.uint64(key)) >> np.uint64(4)) & mask
    while table[slot, 1] >= first and table[slot, 0] != key:
        slot = (slot + 1) & mask
    return slot


@njit(cache=True, nogil=True)
def _rebuild_table(distinct, first, num_unique, size):  # type: ignore[no-untyped-def]
    table = np.full((size, 2), -1, np.int64)
    for number in range(first, num_unique):
        slot = _find(table, size, distinct[number], first)
        table[slot, 0] = distinct[number]
        table[slot, 1] = number
    return table
