"""A growing array of rows in host memory, always contiguous: when it grows, the kernel moves pages, not bytes."""

import gc
import mmap

import numpy as np
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
