"""Row store in a file (SSD tier) with a bounded row cache in host memory, for tables larger than memory.

The cache is set-associative with LRU replacement inside a set and writes dirty rows back on eviction. The file is a
temporary file of one store and is removed with it; only checkpoints are persistent. Compiled host loops read and write
single rows of the file.
"""

import contextlib
import os
import re
import secrets
import weakref
from pathlib import Path

import numpy as np
import torch
from numba import njit, types
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.base.random import mix64_jit
from nestrec.base.thread_team import parallel_for
from nestrec.embedding.stores.host_store import HostStore
from nestrec.embedding.stores.row_snapshot import CopyOnWriteRing, ExclusiveRows, RowSnapshot, State, host_memory
from nestrec.embedding.stores.row_store import Slots

_GROWTH = 1.5

# C library functions, so that compiled loops can call them without the GIL; addresses are passed as integers.
pread = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))
pwrite = types.ExternalFunction("pwrite", types.intp(types.int32, types.uintp, types.uintp, types.int64))


class RowFile:
    """Growing temporary file of rows of `row_bytes` each, in the folder of `path`.

    The file has a unique name and is unlinked as soon as it is open: no other process can write to it, and the kernel
    removes it with the process, even after SIGKILL.
    """

    def __init__(self, path: Path, row_bytes: int) -> None:
        self._folder = path.parent
        self._row_bytes = row_bytes
        self.num_rows = 0
        self.descriptor = _open_nameless(path)
        self._closes = weakref.finalize(self, os.close, self.descriptor)
        self._closes.atexit = False  # a lane may still write rows, and the descriptor could be reused

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self._row_bytes

    def reserve(self, num_rows: int) -> None:
        """Grow the file to at least `num_rows` rows; blocks are allocated now, so that a full disk fails here."""
        if num_rows <= self.num_rows:
            return
        capacity = num_rows if self.num_rows == 0 else max(num_rows, int(self.num_rows * _GROWTH))
        try:
            os.posix_fallocate(self.descriptor, 0, capacity * self._row_bytes)
        except OSError as error:
            problem = f"cannot allocate {capacity * self._row_bytes:,} bytes for rows: {error.strerror}"
            remedy = "free disk space, set another folder, or limit the table (max_rows)"
            raise UserError(problem, option="store.folder", value=str(self._folder), remedy=remedy) from error
        self.num_rows = capacity

    def close(self) -> None:
        self._closes()
        self.descriptor = -1


def remove_leftovers(folder: Path, table: str) -> None:
    """Remove row files of any shard of a table that are still visible in the folder; no process uses them.

    They were left by a process that was killed between creating and unlinking its file, or by an older version.
    """
    name = re.compile(re.escape(table) + r"\.\d+\.[0-9a-f]+\.rows")
    with contextlib.suppress(OSError):  # the folder may not exist yet, and another rank may remove the same file
        for path in [path for path in folder.iterdir() if name.fullmatch(path.name)]:
            path.unlink(missing_ok=True)


def _open_nameless(path: Path) -> int:
    path_with_suffix = path.with_name(f"{path.name}.{secrets.token_hex(8)}.rows")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path_with_suffix, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        path_with_suffix.unlink(missing_ok=True)
    except OSError as error:
        problem = f"the folder is not writable: {error.strerror}"
        remedy = "set a folder that this process can write to"
        raise UserError(problem, option="store.folder", value=str(path.parent), remedy=remedy) from error
    return descriptor


_WAYS = 8


class DiskStore(HostStore):
    """Row store in a file, with a cache of `cache_rows` rows in host memory."""

    def __init__(self, path: Path, num_words: int, device: torch.device, cache_rows: int, num_threads: int = 0) -> None:
        super().__init__(device, num_lanes=1)
        self._file = RowFile(path, 4 * num_words)
        self._folder = path.parent
        self._num_threads = num_threads
        self._num_sets = max(1, cache_rows // _WAYS)
        self._cache = np.zeros((self._num_sets * _WAYS, num_words), np.int32)
        self._tags = np.full((self._num_sets, _WAYS), -1, np.int64)
        self._stamps = np.zeros((self._num_sets, _WAYS), np.int64)
        self._is_dirty = np.zeros((self._num_sets, _WAYS), np.bool_)
        self._tick = 0
        self._num_read = self._num_misses = 0

    def reserve(self, num_slots: int) -> None:
        with self._before_write():
            self._file.reserve(num_slots)

    def gather(self, slots: Slots, out: torch.Tensor) -> None:
        with self._before_write():  # reading changes the cache
            super().gather(slots, out)

    def read(self, slots: Slots, out: NDArray[np.int32]) -> None:
        self._pass(slots, out, is_write=False)
        self._num_read += len(slots)

    def write(self, slots: Slots, rows: NDArray[np.int32]) -> None:
        self._pass(slots, rows, is_write=True)

    def _make_snapshot(self, state: State, num_words: int, max_bytes: int) -> RowSnapshot:
        return ExclusiveRows(self.read, state, CopyOnWriteRing(num_words, max_bytes, host_memory))

    def statistics(self) -> dict[str, int]:
        arrays = (self._cache, self._tags, self._stamps, self._is_dirty)
        return {
            "host_bytes": sum(a.nbytes for a in arrays),
            "device_bytes": 0,
            "disk_bytes": self._file.num_bytes,
            "cache_reads": self._num_read,
            "cache_misses": self._num_misses,
        }

    def close(self) -> None:
        self._file.close()

    def _pass(self, slots: Slots, rows: NDArray[np.int32], *, is_write: bool) -> None:
        state = (self._cache, self._tags, self._stamps, self._is_dirty)
        file = self._file.descriptor
        misses = list[int]()

        def work(low: int, high: int) -> None:
            misses.append(_through_cache(file, state, slots, rows, self._tick, low, high, is_write))

        # Threads share the sets, not the rows, so that no two of them touch one set.
        parallel_for(self._num_sets, len(slots), work, self._num_threads)
        self._tick += len(slots)
        self._num_misses += sum(misses)
        if min(misses) < 0:
            remedy = "check the disk, then resume from the last checkpoint"
            raise UserError(
                "reading or writing a row failed", option="store.folder", value=str(self._folder), remedy=remedy
            )


@njit(cache=True, nogil=True)
def _through_cache(file, state, slots, rows, tick, low, high, is_write):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """Read or write rows whose set is in [low, high); return the number of cache misses, -1 after a file error."""
    cache, tags, stamps, is_dirty = state
    num_sets, ways = tags.shape
    row_bytes = 4 * cache.shape[1]
    num_misses = 0
    for i in range(len(slots)):
        slot = slots[i]
        if slot < 0:
            continue
        group = np.int64(mix64_jit(np.uint64(slot)) % np.uint64(num_sets))
        if group < low or group >= high:
            continue
        way = 0
        for w in range(ways):
            if tags[group, w] == slot:
                way = w
                break
            if stamps[group, w] < stamps[group, way]:
                way = w
        cache_row = group * ways + way
        if tags[group, way] != slot:
            num_misses += 1
            address = cache.ctypes.data + cache_row * row_bytes
            if is_dirty[group, way] and pwrite(file, address, row_bytes, tags[group, way] * row_bytes) != row_bytes:
                return -1
            tags[group, way] = slot
            is_dirty[group, way] = False
            if not is_write and pread(file, address, row_bytes, slot * row_bytes) != row_bytes:
                return -1
        stamps[group, way] = tick + i + 1
        if is_write:
            cache[cache_row] = rows[i]
            is_dirty[group, way] = True
        else:
            rows[i] = cache[cache_row]
    return num_misses
