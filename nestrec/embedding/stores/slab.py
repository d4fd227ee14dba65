"""A growing array of rows in host memory or in a file, always contiguous: the kernel moves pages, not bytes."""

import gc
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import UserError

_GROWTH = 1.5


class Slab:
    """(capacity, num_words) int32 rows behind a memory map. `rows` is replaced when it grows: do not keep it."""

    def __init__(self, num_words: int, path: Path | None = None) -> None:
        self._num_words = num_words
        self._path = path
        self._map: mmap.mmap | None = None
        self.rows: NDArray[np.int32] = np.empty((0, num_words), np.int32)

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes

    def reserve(self, num_rows: int) -> None:
        """Have room for `num_rows`; rows keep their content, new ones are zero."""
        if num_rows <= len(self.rows):
            return
        capacity = num_rows if self._map is None else max(num_rows, int(len(self.rows) * _GROWTH))
        size = capacity * self._num_words * 4
        if self._path is not None:
            _allocate(self._path, size)
        self.rows = np.empty((0, self._num_words), np.int32)  # a map with a view on it cannot move
        if self._map is None or self._path is not None:
            self._map = self._open(size)
        else:
            _resize(self._map, size)
        self._advise(self._map)
        self.rows = np.frombuffer(self._map, np.int32, capacity * self._num_words).reshape(capacity, self._num_words)

    def release_pages(self) -> None:
        """Give the memory of a file's pages back; their content stays in the file."""
        if self._map is not None:
            assert self._path is not None
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self.rows = np.empty((0, self._num_words), np.int32)
        self._map = None  # unmapped when the last view on it is gone
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _open(self, size: int) -> mmap.mmap:
        if self._path is None:
            return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with open(self._path, "r+b") as file:
            return mmap.mmap(file.fileno(), size)

    def _advise(self, memory: mmap.mmap) -> None:
        # Random rows touch a page each: large pages save most address translation misses in memory, and reading ahead
        # in a file would fetch rows that nobody asked for.
        if self._path is not None:
            memory.madvise(mmap.MADV_RANDOM)
        elif hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)


def _resize(memory: mmap.mmap, size: int) -> None:
    try:
        memory.resize(size)
    except BufferError:
        # The compiler of the host loops may keep the arguments of a first call alive until the next collection.
        gc.collect()
        memory.resize(size)


def _allocate(path: Path, size: int) -> None:
    """Blocks for the whole file at once: a full disk must be an error here, not a bus error at some later write."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        remedy = "free space, name another folder, or bound the table (max_rows)"
        raise UserError(f"cannot hold {size:,} bytes of rows: {error.strerror}", field="store.folder",
                        value=str(path.parent), remedy=remedy) from error  # fmt: skip
