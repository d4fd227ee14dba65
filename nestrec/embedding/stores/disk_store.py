"""Rows in a file under a bounded cache of rows in host memory, for tables larger than memory.

The cache is set-associative with least-recently-used replacement inside a set, written back when a row leaves it. The
file is scratch: it belongs to one store and goes with it; checkpoints last.

A file of rows that grows, and reads and writes of single rows from inside host loops.
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
from nestrec.base.thread_team import for_parts
from nestrec.embedding.stores.host_store import HostStore
from nestrec.embedding.stores.row_snapshot import CopyOnWriteRing, ExclusiveRows, RowSnapshot, State, host_memory
from nestrec.embedding.stores.row_store import Slots

_GROWTH = 1.5

# The C library's own calls, so that loops without the GIL can use them; addresses are passed as integers.
pread = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))
pwrite = types.ExternalFunction("pwrite", types.intp(types.int32, types.uintp, types.uintp, types.int64))


class RowFile:
    """Rows of `row_bytes` one after another, in the folder of `path`.

    The file is scratch and belongs to this object: its name is unique and is gone as soon as it is open, so that nobody
    else can write into it, and the kernel removes it with the process, however that ends.
    """

    def __init__(self, path: Path, row_bytes: int) -> None:
        self._folder = path.parent
        self._row_bytes = row_bytes
        self.num_rows = 0
        self.descriptor = _open_nameless(path)
        self._closes = weakref.finalize(self, os.close, self.descriptor)
        self._closes.atexit = False  # a lane may still be writing rows, and the number could be another file's by then

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self._row_bytes

    def reserve(self, num_rows: int) -> None:
        """Have room for `num_rows`. Blocks are allocated at once: a full disk must be an error here, not later."""
        if num_rows <= self.num_rows:
            return
        capacity = num_rows if self.num_rows == 0 else max(num_rows, int(self.num_rows * _GROWTH))
        try:
            os.posix_fallocate(self.descriptor, 0, capacity * self._row_bytes)
        except OSError as error:
            problem = f"cannot hold {capacity * self._row_bytes:,} bytes of rows: {error.strerror}"
            remedy = "free space, name another folder, or bound the table (max_rows)"
            raise UserError(problem, option="store.folder", value=str(self._folder), remedy=remedy) from error
        self.num_rows = capacity

    def close(self) -> None:
        self._closes()
        self.descriptor = -1


def remove_leftovers(folder: Path, table: str) -> None:
    """Remove row files of any shard of a table that have a name: nobody will read them.

    They come from a process that was killed between making and unnaming its file, or from a version that left them.
    """
    name = re.compile(re.escape(table) + r"\.\d+\.[0-9a-f]+\.rows")
    with contextlib.suppress(OSError):  # no such folder yet, or a file that another rank was quicker to remove
        for path in [path for path in folder.iterdir() if name.fullmatch(path.name)]:
            path.unlink(missing_ok=True)


def _open_nameless(path: Path) -> int:
    named = path.with_name(f"{path.name}.{secrets.token_hex(8)}.rows")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(named, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        named.unlink(missing_ok=True)
    except OSError as error:
        problem = f"cannot be written to: {error.strerror}"
        remedy = "name a folder that this process may write to"
        raise UserError(problem, option="store.folder", value=str(path.parent), remedy=remedy) from error
    return descriptor


_WAYS = 8


class DiskStore(HostStore):
    """A file of rows and a cache of `cache_rows` rows."""

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
        self._num_read = self._num_missed = 0

    def reserve(self, num_slots: int) -> None:
        with self._changing():
            self._file.reserve(num_slots)

    def gather(self, slots: Slots, out: torch.Tensor) -> None:
        with self._changing():  # what is read changes the cache
            super().gather(slots, out)

    def read(self, slots: Slots, out: NDArray[np.int32]) -> None:
        self._pass(slots, out, is_write=False)
        self._num_read += len(slots)

    def write(self, slots: Slots, rows: NDArray[np.int32]) -> None:
        self._pass(slots, rows, is_write=True)

    def _freeze(self, state: State, num_words: int, max_bytes: int) -> RowSnapshot:
        return ExclusiveRows(self.read, state, CopyOnWriteRing(num_words, max_bytes, host_memory))

    def statistics(self) -> dict[str, int]:
        arrays = (self._cache, self._tags, self._stamps, self._is_dirty)
        return {
            "host_bytes": sum(a.nbytes for a in arrays),
            "device_bytes": 0,
            "disk_bytes": self._file.num_bytes,
            "cache_reads": self._num_read,
            "cache_misses": self._num_missed,
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
        for_parts(self._num_sets, len(slots), work, self._num_threads)
        self._tick += len(slots)
        self._num_missed += sum(misses)
        if min(misses) < 0:
            remedy = "check the disk and restart from the last checkpoint"
            raise UserError(
                "a row could not be read or written", option="store.folder", value=str(self._folder), remedy=remedy
            )


@njit(cache=True, nogil=True)
def _through_cache(file, state, slots, rows, tick, low, high, is_write):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """Read or write rows whose set lies in [low, high); how many were not in the cache, -1 where the file failed."""
    cache, tags, stamps, is_dirty = state
    num_sets, ways = tags.shape
    row_bytes = 4 * cache.shape[1]
    missed = 0
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
        place = group * ways + way
        if tags[group, way] != slot:
            missed += 1
            address = cache.ctypes.data + place * row_bytes
            if is_dirty[group, way] and pwrite(file, address, row_bytes, tags[group, way] * row_bytes) != row_bytes:
                return -1
            tags[group, way] = slot
            is_dirty[group, way] = False
            if not is_write and pread(file, address, row_bytes, slot * row_bytes) != row_bytes:
                return -1
        stamps[group, way] = tick + i + 1
        if is_write:
            cache[place] = rows[i]
            is_dirty[group, way] = True
        else:
            rows[i] = cache[place]
    return missed
