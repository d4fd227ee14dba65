"""A growing array of rows in host memory, always contiguous: when it grows, the kernel moves pages, not bytes.

What a store is: rows in slots. Keys are the residency's business.
"""

import gc
import mmap
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

_GROWTH = 1.5


class Slab:
    """(capacity, num_words) int32 rows behind an anonymous memory map; memory is taken when a row is first written.

    `rows` is replaced when the slab grows: do not keep it.
    """

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._map: mmap.mmap | None = None
        self.rows: NDArray[np.int32] = np.empty((0, num_words), np.int32)

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes

    def reserve(self, num_rows: int) -> None:
        """Have room for `num_rows`; rows keep their content."""
        if num_rows <= len(self.rows):
            return
        capacity = num_rows if self._map is None else max(num_rows, int(len(self.rows) * _GROWTH))
        size = capacity * self._num_words * 4
        self.rows = np.empty((0, self._num_words), np.int32)  # a map with a view on it cannot move
        if self._map is None:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            _resize(self._map, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Random rows touch a page each; large pages save most misses of address translation.
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.rows = np.frombuffer(self._map, np.int32, capacity * self._num_words).reshape(capacity, self._num_words)

    def close(self) -> None:
        self.rows = np.empty((0, self._num_words), np.int32)
        self._map = None  # unmapped when the last view on it is gone


def _resize(memory: mmap.mmap, size: int) -> None:
    try:
        memory.resize(size)
    except BufferError:
        # The compiler of the host loops may keep the arguments of a first call alive until the next collection.
        gc.collect()
        memory.resize(size)


Slots = NDArray[np.int64]


class Store(Protocol):
    """Rows of int32 words in slots 0 to capacity - 1. A negative slot is skipped: nothing read, nothing written."""

    def reserve(self, num_slots: int) -> None:
        """Have room for this many slots; rows already stored stay."""
        ...

    def gather(self, slots: Slots, out: torch.Tensor) -> None:
        """Copy rows into `out`, (n, num_words), on the engine's device."""
        ...

    def scatter(self, slots: Slots, rows: torch.Tensor) -> None:
        """Copy rows of the engine's device into distinct slots."""
        ...

    def statistics(self) -> dict[str, int]:
        """Bytes of host, device and disk memory in use, and counters of the store's own."""
        ...

    def close(self) -> None:
        """Give back memory and files."""
        ...
