"""Rows in a file under a bounded cache of rows in host memory, for tables larger than memory.

The cache is set-associative with least-recently-used replacement inside a set, written back when a row leaves it. The
file is mapped; its pages are given back to the system as soon as a bounded number of rows has gone through them, so
resident memory is the cache plus that bound. The file is scratch: it belongs to one run and is removed at its end;
checkpoints last.
"""

import os
from pathlib import Path

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.parallel import for_parts
from nestrec.embedding.hashing import mix64
from nestrec.embedding.stores.host import HostStore
from nestrec.embedding.stores.slab import Slab
from nestrec.embedding.stores.store import Slots

_WAYS = 8
_WINDOW_BYTES = 32 << 20
_FAULT_BYTES = 65536


class DiskStore(HostStore):
    """A file of rows and a cache of `cache_rows` rows."""

    def __init__(self, path: Path, num_words: int, device: torch.device, cache_rows: int, num_threads: int = 0) -> None:
        super().__init__(num_words, device)
        self._slab = Slab(num_words, path)
        self._num_threads = num_threads
        self._num_sets = max(1, cache_rows // _WAYS)
        self._cache = np.zeros((self._num_sets * _WAYS, num_words), np.int32)
        self._tags = np.full((self._num_sets, _WAYS), -1, np.int64)
        self._stamps = np.zeros((self._num_sets, _WAYS), np.int64)
        self._is_dirty = np.zeros((self._num_sets, _WAYS), np.bool_)
        self._tick = 0
        self._num_read = self._num_missed = 0
        # A missed row maps the pages of its own and of the row that leaves the cache, and up to 64 KiB around each.
        self._pass_rows = max(1, _WINDOW_BYTES // (_FAULT_BYTES + 8 * num_words))

    def reserve(self, num_slots: int) -> None:
        self._slab.reserve(num_slots)

    def read(self, slots: Slots, out: NDArray[np.int32]) -> None:
        for a in range(0, len(slots), self._pass_rows):
            part = slice(a, a + self._pass_rows)
            self._pass(slots[part], out[part], is_write=False)

    def write(self, slots: Slots, rows: NDArray[np.int32]) -> None:
        for a in range(0, len(slots), self._pass_rows):
            part = slice(a, a + self._pass_rows)
            self._pass(slots[part], rows[part], is_write=True)

    def statistics(self) -> dict[str, int]:
        host = self._cache.nbytes + self._tags.nbytes + self._stamps.nbytes + self._is_dirty.nbytes
        return {
            "host_bytes": host + min(_WINDOW_BYTES, self._slab.num_bytes),
            "device_bytes": 0,
            "disk_bytes": self._slab.num_bytes,
            "cache_reads": self._num_read,
            "cache_misses": self._num_missed,
        }

    def close(self) -> None:
        self._slab.close()

    def _pass(self, slots: Slots, rows: NDArray[np.int32], *, is_write: bool) -> None:
        state = (self._slab.rows, self._cache, self._tags, self._stamps, self._is_dirty)
        misses: list[int] = []

        def work(low: int, high: int) -> None:
            misses.append(_through_cache(state, slots, rows, self._tick, low, high, is_write))

        # Threads share the sets, not the rows, so that no two of them touch one set.
        for_parts(self._num_sets, len(slots), work, self._num_threads)
        self._tick += len(slots)
        self._num_read += 0 if is_write else len(slots)
        self._num_missed += sum(misses)
        if sum(misses):
            self._slab.release_pages()


def disk_path(folder: str, table: str, shard: int) -> Path:
    """A file of its own for each table, shard and process."""
    return Path(folder) / f"{table}.{shard}.{os.getpid()}.rows"


@njit(cache=True, nogil=True)
def _through_cache(state, slots, rows, tick, low, high, is_write):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """Read or write rows whose set lies in [low, high); how many were not in the cache."""
    file, cache, tags, stamps, is_dirty = state
    num_sets, ways = tags.shape
    missed = 0
    for i in range(len(slots)):
        slot = slots[i]
        if slot < 0:
            continue
        group = np.int64(mix64(np.uint64(slot)) % np.uint64(num_sets))
        if group < low or group >= high:
            continue
        way = 0
        for w in range(ways):
            if tags[group, w] == slot:
                way = w
                break
            if stamps[group, w] < stamps[group, way]:
                way = w
        place = group * ways + way
        if tags[group, way] != slot:
            missed += 1
            if is_dirty[group, way]:
                file[tags[group, way]] = cache[place]
            tags[group, way] = slot
            is_dirty[group, way] = False
            if not is_write:
                cache[place] = file[slot]
        stamps[group, way] = tick + i + 1
        if is_write:
            cache[place] = rows[i]
            is_dirty[group, way] = True
        else:
            rows[i] = cache[place]
    return missed
