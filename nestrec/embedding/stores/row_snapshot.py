"""Copy-on-write snapshots of the rows of a store, read in chunks while training changes the rows.

Each row of a snapshot is claimed exactly once: by the reader, which reads it from the store, or by a writer that is
about to overwrite it and copies the old row to a ring buffer first. The ring has one producer and one consumer, is
lock-free, and its size is bounded. The reader drains it before it is full; a writer waits only if the reader is late.

In host memory, reader and writers synchronize through one byte per row without waiting for each other: a writer claims
a row, then copies it; the reader copies a row, then claims it, and discards the copy if a writer claimed it first.

In device memory, the host decides which side claims a row, under a lock that is held while work is launched and never
while it runs. On a GPU the reader has its own stream: work of a writer waits on the GPU for work that the reader
launched before, so that the host waits for neither. Writers copy old rows to pinned memory before they launch the
update.
"""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.cuda import on_stream, pinned_empty, side_stream
from nestrec.base.thread_team import ThreadTeam, niceness
from nestrec.embedding.stores.row_store import Slab, Slots
from nestrec.ops.embedding.host_loops import AHEAD, compare_and_swap, prefetch_row

Memory = Callable[[int, int], NDArray[np.int32]]
"""Allocator: (rows, words) to an array of that shape."""
_PAGE_WORDS = 1024


class CopyOnWriteRing:
    """Copy-on-write ring buffer of row copies and their slots; single producer, single consumer, lock-free."""

    def __init__(self, num_words: int, max_bytes: int, memory: Memory) -> None:
        """Create a ring for at most `max_bytes` of rows, but at least one row."""
        capacity = max(1, max_bytes // (4 * num_words))
        self.rows = memory(capacity, num_words)
        self._slots = np.empty(capacity, np.int64)
        self._num_put = self._num_released = 0
        self._has_space = threading.Event()
        self._has_rows = threading.Event()
        self._is_closed = False

    @property
    def num_copied(self) -> int:
        """Number of rows copied to the ring so far."""
        return self._num_put

    @property
    def is_half_full(self) -> bool:
        """Whether at least half of the ring is in use, so that it should be drained."""
        return 2 * (self._num_put - self._num_released) >= len(self._slots)

    def prefault(self) -> None:
        """Touch all pages of the ring; safe while a writer adds rows.

        The system allocates and clears a page when it is first written. In a training step, that would take many times
        as long as copying the rows.
        """
        _touch_pages(self.rows.reshape(-1))

    def reserve(self, num_rows: int) -> NDArray[np.int32]:
        """Return contiguous memory for at most `num_rows` next rows; fewer or none if the ring is nearly full."""
        start = self._num_put % len(self._slots)
        capacity = len(self._slots)
        free = min(num_rows, capacity - (self._num_put - self._num_released), capacity - start)
        return self.rows[start : start + free]

    def commit(self, slots: NDArray[np.int64]) -> None:
        """Publish the rows of these slots, written to the start of the memory that `reserve` returned."""
        start = self._num_put % len(self._slots)
        self._slots[start : start + len(slots)] = slots
        self._num_put += len(slots)
        self._has_rows.set()

    def wait_for_space(self) -> None:
        """Block until the ring has space or is closed."""
        while self._num_put - self._num_released == len(self._slots) and not self._is_closed:
            self._has_space.clear()
            if self._num_put - self._num_released == len(self._slots) and not self._is_closed:
                self._has_space.wait()

    def wait_for_rows(self) -> None:
        """Block until the ring contains a row; call it only if a writer has claimed one."""
        while self._num_put == self._num_released:
            self._has_rows.clear()
            if self._num_put == self._num_released:
                self._has_rows.wait()

    def stored_slots(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the slots of all rows in the ring, and their indices in `rows`."""
        indices = np.arange(self._num_released, self._num_put) % len(self._slots)
        return self._slots[indices], indices

    def release(self, num_rows: int) -> None:
        """Free the first `num_rows` rows."""
        self._num_released += num_rows
        self._has_space.set()

    def close(self) -> None:
        self._is_closed = True
        self._has_space.set()


@njit(cache=True, nogil=True)
def _touch_pages(words):  # type: ignore[no-untyped-def]
    for position in range(0, len(words), _PAGE_WORDS):
        compare_and_swap(words, position, np.int32(0), np.int32(0))


Words = NDArray[np.int32]
State = NDArray[np.uint8]
PENDING, CLAIMED = 1, 2
"""States of a slot: its row is not claimed yet; its row has been claimed. 0: the row is not part of the snapshot."""


class RowSnapshot(ABC):
    """Copy-on-write snapshot of rows of a store; one thread reads it while other threads write to the store."""

    _is_ring_prefaulted = False
    """Whether the memory of the ring is already allocated, instead of on first write."""

    def __init__(self, state: State, ring: CopyOnWriteRing) -> None:
        """Create a snapshot; `state` is `PENDING` for the slots to read and is modified in place."""
        self._state = state
        self.ring = ring
        self._readers: ThreadTeam | None = None
        self._niceness = 0
        self.waited_s = 0.0
        """Total time in seconds that writers spent waiting for ring space and the lock, and copying rows."""

    @contextlib.contextmanager
    def before_write(self, slots: Slots | None = None) -> Iterator[None]:
        """Protect a write to these slots; None protects a change of the store itself, such as its growth."""
        start_s = time.perf_counter()
        remaining = np.empty(0, np.int64) if slots is None else slots
        while True:
            with self._writer_lock(is_structural=slots is None):
                remaining = self._copy_to_ring(remaining)
                if not len(remaining):
                    self.waited_s += time.perf_counter() - start_s
                    yield
                    return
            self.raise_priority()
            self.ring.wait_for_space()

    def start_reading(self) -> None:
        """Prepare for reading; called by the reading thread."""
        if self._readers is None:
            self._readers = ThreadTeam.current()
            self._niceness = niceness(threading.get_native_id())
            if not self._is_ring_prefaulted:
                self.ring.prefault()

    def raise_priority(self) -> None:
        """Raise the priority of the reading threads to that of the writers, which are waiting for them."""
        if self._readers is not None and self._niceness:
            self._readers.set_niceness(0)

    def restore_priority(self) -> None:
        """Restore the original priority (niceness) of the reading threads."""
        if self._readers is not None and self._niceness:
            self._readers.set_niceness(self._niceness)

    def _copy_to_ring(self, slots: Slots) -> Slots:
        """Copy unclaimed rows to the ring; return the slots for which it had no space."""
        waiting = np.empty(len(slots), np.int64)
        waiting = waiting[: _find_pending(slots, self._state, waiting)]
        while len(waiting) and len(space := self.ring.reserve(len(waiting))):
            part, waiting = waiting[: len(space)], waiting[len(space) :]
            self.ring.commit(self._claim(part, space))
        return waiting

    def close(self) -> None:
        """End the snapshot: writers no longer wait and no longer copy rows."""
        self._state[:] = 0
        self.ring.close()

    @abstractmethod
    def take(self, slots: Slots, out: Words) -> Slots:
        """Claim the unclaimed rows among these slots; return their slots and copy the rows to `out`."""

    def copied_slots(self) -> tuple[Slots, NDArray[np.int64]]:
        """Return the slots of the rows in the ring and their indices in `ring.rows`; release them after reading."""
        return self.ring.stored_slots()

    @abstractmethod
    def _claim(self, slots: Slots, out: Words) -> Slots:
        """Claim rows for a writer, like `take`."""

    @abstractmethod
    def _writer_lock(self, *, is_structural: bool) -> contextlib.AbstractContextManager[object]:
        """Return the lock held by a writer; `is_structural` if it changes the store itself instead of rows."""


class WriterPriorityLock:
    """Mutual exclusion with writer priority: the reader, which acquires it repeatedly, lets all writers go first."""

    def __init__(self) -> None:
        self._turn = threading.Condition(threading.RLock())
        self._gate = threading.Lock()
        self._num_writers = 0

    @contextlib.contextmanager
    def for_writer(self) -> Iterator[None]:
        self._count_writers(1)  # a plain lock would let the reader go first many times
        with self._turn:
            self._count_writers(-1)
            self._turn.notify_all()
            yield

    @contextlib.contextmanager
    def for_reader(self) -> Iterator[None]:
        with self._turn:
            self._turn.wait_for(lambda: not self._num_writers)
            yield

    def _count_writers(self, number: int) -> None:
        with self._gate:
            self._num_writers += number


class MemoryRows(RowSnapshot):
    """Snapshot of a store in host memory that is read and written row by row."""

    def __init__(self, rows: Callable[[], Words], state: State, ring: CopyOnWriteRing) -> None:
        """Create a snapshot; `rows` returns the rows of the store by slot, whose memory may move when it grows."""
        super().__init__(state, ring)
        self._rows = rows
        self._moves = WriterPriorityLock()

    def take(self, slots: Slots, out: Words) -> Slots:
        claimed = np.empty(len(slots), np.int64)
        with self._moves.for_reader():
            return claimed[: _take(self._rows(), slots, self._state, out, claimed)]

    def _claim(self, slots: Slots, out: Words) -> Slots:
        claimed = np.empty(len(slots), np.int64)
        return claimed[: _claim(self._rows(), slots, self._state, out, claimed)]

    def _writer_lock(self, *, is_structural: bool) -> contextlib.AbstractContextManager[object]:
        return self._moves.for_writer() if is_structural else contextlib.nullcontext()


class ExclusiveRows(RowSnapshot):
    """Snapshot of a store that only one thread may use at a time."""

    def __init__(self, read: Callable[[Slots, Words], None], state: State, ring: CopyOnWriteRing) -> None:
        super().__init__(state, ring)
        self._read = read
        self._turns = WriterPriorityLock()

    def take(self, slots: Slots, out: Words) -> Slots:
        with self._turns.for_reader():
            return self._claim(slots, out)

    def _claim(self, slots: Slots, out: Words) -> Slots:
        claimed = np.asarray(slots[self._state[slots] == PENDING])
        self._read(claimed, out[: len(claimed)])
        self._state[claimed] = CLAIMED
        return claimed

    def _writer_lock(self, *, is_structural: bool) -> contextlib.AbstractContextManager[object]:
        return self._turns.for_writer()


class SnapshotStore(ABC):
    """Base class of stores that support copy-on-write snapshots."""

    _snapshot: RowSnapshot | None = None
    _before_write: Callable[..., contextlib.AbstractContextManager[object]] = staticmethod(contextlib.nullcontext)
    """Context manager that protects writes to slots, or changes of the store itself."""

    def snapshot(self, state: State, num_words: int, max_bytes: int) -> RowSnapshot:
        """Start a snapshot of the current rows, which lasts until `release_snapshot`; no thread may write meanwhile.

        Args:
            state: Per slot, `PENDING` for the rows of the snapshot; see `RowSnapshot`.
            num_words: Words per row.
            max_bytes: Maximum size of the copy-on-write ring.
        """
        assert self._snapshot is None, "only one snapshot at a time"
        self._snapshot = self._make_snapshot(
            state, num_words, min(max_bytes, 4 * num_words * int(np.count_nonzero(state)))
        )
        self._before_write = self._snapshot.before_write
        return self._snapshot

    def release_snapshot(self) -> None:
        """End the snapshot after its reader has finished or given up."""
        ended, self._snapshot, self._before_write = self._snapshot, None, contextlib.nullcontext
        if ended is not None:
            ended.close()

    @abstractmethod
    def _make_snapshot(self, state: State, num_words: int, max_bytes: int) -> RowSnapshot: ...


def host_memory(num_rows: int, num_words: int) -> Words:
    """Allocate host memory for a `CopyOnWriteRing`; pages are allocated when they are first written."""
    slab = Slab(num_words)
    slab.reserve(num_rows)
    return slab.rows


@njit(cache=True, nogil=True)
def _find_pending(slots, state, pending):  # type: ignore[no-untyped-def]
    """Write the slots with unclaimed rows to `pending`; skips negative slots and slots newer than the snapshot."""
    num_pending = 0
    for slot in slots:
        if 0 <= slot < len(state) and state[slot] == PENDING:
            pending[num_pending] = slot
            num_pending += 1
    return num_pending


@njit(cache=True, nogil=True)
def _take(rows, slots, state, out, claimed):  # type: ignore[no-untyped-def]
    num_claimed = 0
    width = out.shape[1]
    for i in range(len(slots)):
        if i + AHEAD < len(slots):
            prefetch_row(rows, slots[i + AHEAD], width)
        slot = slots[i]
        if state[slot] == PENDING:
            for j in range(width):
                out[num_claimed, j] = rows[slot, j]
            if compare_and_swap(state, slot, np.uint8(PENDING), np.uint8(CLAIMED)):
                claimed[num_claimed] = slot
                num_claimed += 1
    return num_claimed


@njit(cache=True, nogil=True)
def _claim(rows, slots, state, out, claimed):  # type: ignore[no-untyped-def]
    num_claimed = 0
    width = out.shape[1]
    for slot in slots:  # claim all rows first: each atomic claim waits for preceding memory writes
        if compare_and_swap(state, slot, np.uint8(PENDING), np.uint8(CLAIMED)):
            claimed[num_claimed] = slot
            num_claimed += 1
    for i in range(num_claimed):
        if i + AHEAD < num_claimed:
            prefetch_row(rows, claimed[i + AHEAD], width)
        slot = claimed[i]
        for j in range(width):
            out[i, j] = rows[slot, j]
    return num_claimed


class DeviceRows(RowSnapshot):
    """Snapshot of a store in device memory; on a CPU, where launched work is complete, it uses no streams."""

    _is_ring_prefaulted = True  # pinned

    def __init__(
        self, gather: Callable[[Slots, torch.Tensor], None], device: torch.device, state: State, ring: CopyOnWriteRing
    ) -> None:
        """Create a snapshot; `gather` copies rows of the store to a device tensor on the current stream."""
        super().__init__(state, ring)
        self._gather = gather
        self._device = device
        self._launching = threading.Lock()
        self._stream = side_stream(device)
        if self._stream is not None:
            torch.cuda.synchronize(device)  # waits for earlier writes on all streams
        self._read: torch.cuda.Event | None = None
        self._put: torch.cuda.Event | None = None
        self._moved: torch.cuda.Event | None = None

    def take(self, slots: Slots, out: Words) -> Slots:
        with on_stream(self._stream):
            with self._launching:
                if self._stream is not None and self._moved is not None:
                    self._stream.wait_event(self._moved)
                claimed, rows = self._unclaimed_rows(slots)
                self._state[claimed] = CLAIMED
                self._read = self._record_event()
            torch.from_numpy(out[: len(claimed)]).copy_(rows)
        return claimed

    def copied_slots(self) -> tuple[Slots, NDArray[np.int64]]:
        copied = super().copied_slots()
        put = self._put
        if put is not None:
            put.synchronize()
        return copied

    def _claim(self, slots: Slots, out: Words) -> Slots:
        claimed, rows = self._unclaimed_rows(slots)
        torch.from_numpy(out[: len(claimed)]).copy_(rows, non_blocking=True)
        self._put = self._record_event()
        self._state[claimed] = CLAIMED  # last: if copying fails, the reader must not wait for these rows
        return claimed

    def _unclaimed_rows(self, slots: Slots) -> tuple[Slots, torch.Tensor]:
        """Return the unclaimed slots among these, and their rows."""
        claimed = slots[self._state[slots] == PENDING]
        rows = torch.empty(len(claimed), self.ring.rows.shape[1], dtype=torch.int32, device=self._device)
        self._gather(claimed, rows)
        return claimed, rows

    @contextlib.contextmanager
    def _writer_lock(self, *, is_structural: bool) -> Iterator[None]:
        with self._launching:
            if self._read is not None:
                torch.cuda.current_stream(self._device).wait_event(self._read)
            yield
            if is_structural:
                self._moved = self._record_event()

    def _record_event(self) -> torch.cuda.Event | None:
        """Return an event that completes with the work launched so far on the current stream."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event


def pinned_memory(num_rows: int, num_words: int) -> Words:
    """Allocate pinned host memory for a `CopyOnWriteRing`; torch caches it for the next snapshot."""
    return pinned_empty([num_rows, num_words], torch.int32, torch.device("cuda")).numpy()
