"""The store interface, which addresses rows by slot (the key index maps keys to slots), and a growing host array.

The host array is always contiguous: when it grows, the kernel remaps pages instead of copying bytes.
"""

import gc
import mmap
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

_GROWTH = 1.5


class Slab:
    """(capacity, num_words) int32 rows in an anonymous memory map; pages are allocated when they are first written.

    `rows` is replaced when the slab grows, so do not retain references to it.
    """

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._map: mmap.mmap | None = None
        self.rows: NDArray[np.int32] = np.empty((0, num_words), np.int32)

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes

    def reserve(self, num_rows: int) -> None:
        """Grow to at least `num_rows` rows; existing rows keep their content."""
        if num_rows <= len(self.rows):
            return
        capacity = num_rows if self._map is None else max(num_rows, int(len(self.rows) * _GROWTH))
        size = capacity * self._num_words * 4
        self.rows = np.empty((0, self._num_words), np.int32)  # a map with a view cannot be moved
        if self._map is None:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            _resize(self._map, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Each random row touches another page; huge pages avoid most TLB misses.
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.rows = np.frombuffer(self._map, np.int32, capacity * self._num_words).reshape(capacity, self._num_words)

    def close(self) -> None:
        self.rows = np.empty((0, self._num_words), np.int32)
        self._map = None  # unmapped when the last view is released


def _resize(memory: mmap.mmap, size: int) -> None:
    try:
        memory.resize(size)
    except BufferError:
        # numba may keep the arguments of a first call alive until the next garbage collection.
        gc.collect()
        memory.resize(size)


Slots = NDArray[np.int64]


class Store(Protocol):
    """Interface of row stores: rows of int32 words in slots 0 to capacity - 1; negative slots are skipped."""

    def reserve(self, num_slots: int) -> None:
        """Grow to at least this many slots; stored rows are preserved."""
        ...

    def gather(self, slots: Slots, out: torch.Tensor) -> None:
        """Copy rows to `out`, (n, num_words), on the engine's device."""
        ...

    def scatter(self, slots: Slots, rows: torch.Tensor) -> None:
        """Copy rows on the engine's device to unique slots."""
        ...

    def statistics(self) -> dict[str, int]:
        """Return the bytes of host, device and disk memory in use, and counters of the store."""
        ...

    def close(self) -> None:
        """Release memory and files."""
        ...
