"""Snapshots of rows that are saved while training changes them (copy on write).

Rows that were about to change before they were read: a ring of them, of bounded size.

One side puts rows at its head, the other takes them from its end, and neither ever holds a lock that the other needs.

Rows of a store as they were at a moment, read in pieces while others write.

Each row is claimed once: by the reader, who takes it, or by a writer who is about to overwrite it and puts it aside
first (nestrec.embedding.stores.aside). The memory aside is bounded; the reader empties it before it is full, and only
where it comes too late does a writer wait.

In host memory the two meet in one byte a row, and neither waits for the other: a writer claims a row, then copies it;
the reader copies a row, then claims it, and drops the copy where a writer was first.

Rows in the memory of a device as they were at a moment, read in pieces while training writes on.

The host decides who claims a row, under a lock that is held while work is launched and never while it runs. On a GPU
the reader has a stream of its own: what a writer launches waits there for what the reader has launched before, so that
the host waits for neither. Rows are put aside in pinned memory, copied before the update that is launched after them.
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
from nestrec.ops.embedding.host_loops import AHEAD, exchange_if, prefetch_row

Memory = Callable[[int, int], NDArray[np.int32]]
"""(rows, words) to an array of so many."""
_PAGE_WORDS = 1024


class CopyOnWriteRing:
    """A ring of rows and of the slots that they are of."""

    def __init__(self, num_words: int, max_bytes: int, memory: Memory) -> None:
        """max_bytes: of the rows; room for one there always is."""
        capacity = max(1, max_bytes // (4 * num_words))
        self.rows = memory(capacity, num_words)
        self._slots = np.empty(capacity, np.int64)
        self._num_put = self._num_taken = 0
        self._has_room = threading.Event()
        self._has_more = threading.Event()
        self._is_closed = False

    @property
    def num_put(self) -> int:
        """Rows that were put aside so far."""
        return self._num_put

    @property
    def is_crowded(self) -> bool:
        """Half of the room is taken: time to take rows out."""
        return 2 * (self._num_put - self._num_taken) >= len(self._slots)

    def touch(self) -> None:
        """Have all of the memory, whoever puts rows into it meanwhile.

        The system gives memory when it is first written, and clears it then: for rows, many times what their copy
        takes, in a training that puts them there.
        """
        _touch(self.rows.reshape(-1))

    def room(self, num_rows: int) -> NDArray[np.int32]:
        """Memory for the next rows, at most so many, side by side; less, or none, where there is no room."""
        start = self._num_put % len(self._slots)
        capacity = len(self._slots)
        free = min(num_rows, capacity - (self._num_put - self._num_taken), capacity - start)
        return self.rows[start : start + free]

    def put(self, slots: NDArray[np.int64]) -> None:
        """The first part of what `room` gave holds the rows of these slots now."""
        start = self._num_put % len(self._slots)
        self._slots[start : start + len(slots)] = slots
        self._num_put += len(slots)
        self._has_more.set()

    def wait_for_room(self) -> None:
        """Until there is some, or none is needed any more."""
        while self._num_put - self._num_taken == len(self._slots) and not self._is_closed:
            self._has_room.clear()
            if self._num_put - self._num_taken == len(self._slots) and not self._is_closed:
                self._has_room.wait()

    def wait_for_more(self) -> None:
        """Until a row is here. For who knows that one was claimed by a writer."""
        while self._num_put == self._num_taken:
            self._has_more.clear()
            if self._num_put == self._num_taken:
                self._has_more.wait()

    def held(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Slots of all rows that are here, and the rows' places in `rows`."""
        places = np.arange(self._num_taken, self._num_put) % len(self._slots)
        return self._slots[places], places

    def forget(self, num_rows: int) -> None:
        """So many rows, the first ones, are needed no more."""
        self._num_taken += num_rows
        self._has_room.set()

    def close(self) -> None:
        self._is_closed = True
        self._has_room.set()


@njit(cache=True, nogil=True)
def _touch(words):  # type: ignore[no-untyped-def]
    for place in range(0, len(words), _PAGE_WORDS):
        exchange_if(words, place, np.int32(0), np.int32(0))


Words = NDArray[np.int32]
State = NDArray[np.uint8]
WAITS, GONE = 1, 2
"""Of a slot: its row is still to be claimed; it was. 0: it is of no interest."""


class RowSnapshot(ABC):
    """The rows of some slots of a store. One thread takes them, others write to the store meanwhile."""

    _has_memory_aside = False
    """The system has given what is kept for rows aside; else it does when that is first written."""

    def __init__(self, state: State, aside: CopyOnWriteRing) -> None:
        """state: by slot, `WAITS` where its row is wanted; it is changed here."""
        self._state = state
        self.aside = aside
        self._readers: ThreadTeam | None = None
        self._niceness = 0
        self.waited_s = 0.0
        """What writers have waited for room, and for their turn, and what putting aside took."""

    @contextlib.contextmanager
    def changing(self, slots: Slots | None = None) -> Iterator[None]:
        """The caller is about to write to these slots of the store; none: to change the store itself."""
        start_s = time.perf_counter()
        left = np.empty(0, np.int64) if slots is None else slots
        while True:
            with self._turn(is_whole=slots is None):
                left = self._put_aside(left)
                if not len(left):
                    self.waited_s += time.perf_counter() - start_s
                    yield
                    return
            self.hurry()
            self.aside.wait_for_room()

    def begin(self) -> None:
        """Called by the thread that reads."""
        if self._readers is None:
            self._readers = ThreadTeam.of_thread()
            self._niceness = niceness(threading.get_native_id())
            if not self._has_memory_aside:
                self.aside.touch()

    def hurry(self) -> None:
        """The reader, and who works for it, may be nicer than those who write; where these wait, they are not."""
        if self._readers is not None and self._niceness:
            self._readers.set_niceness(0)

    def calm(self) -> None:
        """They are as nice as they were."""
        if self._readers is not None and self._niceness:
            self._readers.set_niceness(self._niceness)

    def _put_aside(self, slots: Slots) -> Slots:
        """Those for which there was no room."""
        waiting = np.empty(len(slots), np.int64)
        waiting = waiting[: _waiting(slots, self._state, waiting)]
        while len(waiting) and len(room := self.aside.room(len(waiting))):
            part, waiting = waiting[: len(room)], waiting[len(room) :]
            self.aside.put(self._claim(part, room))
        return waiting

    def close(self) -> None:
        """Nothing more is read: nobody waits, and nothing is put aside any more."""
        self._state[:] = 0
        self.aside.close()

    @abstractmethod
    def take(self, slots: Slots, out: Words) -> Slots:
        """Claim the rows of those of these slots that nobody has claimed: these slots, with their rows in `out`."""

    def held_aside(self) -> tuple[Slots, NDArray[np.int64]]:
        """Slots of rows that are aside now, and where in `aside.rows` they are; to be forgotten when they are read."""
        return self.aside.held()

    @abstractmethod
    def _claim(self, slots: Slots, out: Words) -> Slots:
        """`take` for a writer."""

    @abstractmethod
    def _turn(self, *, is_whole: bool) -> contextlib.AbstractContextManager[object]:
        """Held by a writer; is_whole: while it changes the store itself, and not rows alone."""


class WriterPriorityLock:
    """A lock of a reader and of writers: the reader, who takes it again and again, lets all writers go first."""

    def __init__(self) -> None:
        self._turn = threading.Condition(threading.RLock())
        self._gate = threading.Lock()
        self._num_coming = 0

    @contextlib.contextmanager
    def of_writer(self) -> Iterator[None]:
        self._come(1)  # a lock alone would let the reader go first many times
        with self._turn:
            self._come(-1)
            self._turn.notify_all()
            yield

    @contextlib.contextmanager
    def of_reader(self) -> Iterator[None]:
        with self._turn:
            self._turn.wait_for(lambda: not self._num_coming)
            yield

    def _come(self, number: int) -> None:
        with self._gate:
            self._num_coming += number


class MemoryRows(RowSnapshot):
    """Of a store in host memory that is read and written row by row."""

    def __init__(self, rows: Callable[[], Words], state: State, aside: CopyOnWriteRing) -> None:
        """rows: those of the store by slot, which may lie elsewhere after each change of the store itself."""
        super().__init__(state, aside)
        self._rows = rows
        self._moves = WriterPriorityLock()

    def take(self, slots: Slots, out: Words) -> Slots:
        kept = np.empty(len(slots), np.int64)
        with self._moves.of_reader():
            return kept[: _take(self._rows(), slots, self._state, out, kept)]

    def _claim(self, slots: Slots, out: Words) -> Slots:
        kept = np.empty(len(slots), np.int64)
        return kept[: _claim(self._rows(), slots, self._state, out, kept)]

    def _turn(self, *, is_whole: bool) -> contextlib.AbstractContextManager[object]:
        return self._moves.of_writer() if is_whole else contextlib.nullcontext()


class ExclusiveRows(RowSnapshot):
    """Of a store that only one thread at a time may use."""

    def __init__(self, read: Callable[[Slots, Words], None], state: State, aside: CopyOnWriteRing) -> None:
        super().__init__(state, aside)
        self._read = read
        self._turns = WriterPriorityLock()

    def take(self, slots: Slots, out: Words) -> Slots:
        with self._turns.of_reader():
            return self._claim(slots, out)

    def _claim(self, slots: Slots, out: Words) -> Slots:
        kept = np.asarray(slots[self._state[slots] == WAITS])
        self._read(kept, out[: len(kept)])
        self._state[kept] = GONE
        return kept

    def _turn(self, *, is_whole: bool) -> contextlib.AbstractContextManager[object]:
        return self._turns.of_writer()


class SnapshotStore(ABC):
    """A store that can be read as it was while it is written to."""

    _frozen: RowSnapshot | None = None
    _changing: Callable[..., contextlib.AbstractContextManager[object]] = staticmethod(contextlib.nullcontext)
    """To be held while rows of some slots, or the store itself, are changed."""

    def freeze(self, state: State, num_words: int, max_bytes: int) -> RowSnapshot:
        """The rows of the slots that are to wait, as they are now, until `thaw`; while nobody writes.

        state: see `RowSnapshot`. max_bytes: of rows that are put aside.
        """
        assert self._frozen is None, "one reader at a time"
        self._frozen = self._freeze(state, num_words, min(max_bytes, 4 * num_words * int(np.count_nonzero(state))))
        self._changing = self._frozen.changing
        return self._frozen

    def thaw(self) -> None:
        """Whoever reads the frozen rows has done so, or given up."""
        frozen, self._frozen, self._changing = self._frozen, None, contextlib.nullcontext
        if frozen is not None:
            frozen.close()

    @abstractmethod
    def _freeze(self, state: State, num_words: int, max_bytes: int) -> RowSnapshot: ...


def host_memory(num_rows: int, num_words: int) -> Words:
    """Memory of the host, which is taken when it is first written; a `Memory` of `CopyOnWriteRing`."""
    slab = Slab(num_words)
    slab.reserve(num_rows)
    return slab.rows


@njit(cache=True, nogil=True)
def _waiting(slots, state, found):  # type: ignore[no-untyped-def]
    """Those of the slots, some of which may be of no row or of one that came later, whose rows wait."""
    num_found = 0
    for slot in slots:
        if 0 <= slot < len(state) and state[slot] == WAITS:
            found[num_found] = slot
            num_found += 1
    return num_found


@njit(cache=True, nogil=True)
def _take(rows, slots, state, out, kept):  # type: ignore[no-untyped-def]
    num_kept = 0
    width = out.shape[1]
    for i in range(len(slots)):
        if i + AHEAD < len(slots):
            prefetch_row(rows, slots[i + AHEAD], width)
        slot = slots[i]
        if state[slot] == WAITS:
            for j in range(width):
                out[num_kept, j] = rows[slot, j]
            if exchange_if(state, slot, np.uint8(WAITS), np.uint8(GONE)):
                kept[num_kept] = slot
                num_kept += 1
    return num_kept


@njit(cache=True, nogil=True)
def _claim(rows, slots, state, out, kept):  # type: ignore[no-untyped-def]
    num_kept = 0
    width = out.shape[1]
    for slot in slots:  # first: a claim waits until what was written before it has arrived
        if exchange_if(state, slot, np.uint8(WAITS), np.uint8(GONE)):
            kept[num_kept] = slot
            num_kept += 1
    for i in range(num_kept):
        if i + AHEAD < num_kept:
            prefetch_row(rows, kept[i + AHEAD], width)
        slot = kept[i]
        for j in range(width):
            out[i, j] = rows[slot, j]
    return num_kept


class DeviceRows(RowSnapshot):
    """Of a store in the memory of a device; on a CPU, where launched is done, the same without streams."""

    _has_memory_aside = True  # pinned

    def __init__(
        self, gather: Callable[[Slots, torch.Tensor], None], device: torch.device, state: State, aside: CopyOnWriteRing
    ) -> None:
        """gather: rows of the store into a tensor of the device, launched on the current stream."""
        super().__init__(state, aside)
        self._gather = gather
        self._device = device
        self._launching = threading.Lock()
        self._stream = side_stream(device)
        if self._stream is not None:
            torch.cuda.synchronize(device)  # what was written until now, on whatever stream
        self._read: torch.cuda.Event | None = None
        self._put: torch.cuda.Event | None = None
        self._moved: torch.cuda.Event | None = None

    def take(self, slots: Slots, out: Words) -> Slots:
        with on_stream(self._stream):
            with self._launching:
                if self._stream is not None and self._moved is not None:
                    self._stream.wait_event(self._moved)
                kept, rows = self._waiting_rows(slots)
                self._state[kept] = GONE
                self._read = self._launched()
            torch.from_numpy(out[: len(kept)]).copy_(rows)
        return kept

    def held_aside(self) -> tuple[Slots, NDArray[np.int64]]:
        found = super().held_aside()
        put = self._put
        if put is not None:
            put.synchronize()
        return found

    def _claim(self, slots: Slots, out: Words) -> Slots:
        kept, rows = self._waiting_rows(slots)
        torch.from_numpy(out[: len(kept)]).copy_(rows, non_blocking=True)
        self._put = self._launched()
        self._state[kept] = GONE  # last: where this fails, the reader must not wait for them
        return kept

    def _waiting_rows(self, slots: Slots) -> tuple[Slots, torch.Tensor]:
        """Those of these slots that nobody has claimed, and their rows."""
        kept = slots[self._state[slots] == WAITS]
        rows = torch.empty(len(kept), self.aside.rows.shape[1], dtype=torch.int32, device=self._device)
        self._gather(kept, rows)
        return kept, rows

    @contextlib.contextmanager
    def _turn(self, *, is_whole: bool) -> Iterator[None]:
        with self._launching:
            if self._read is not None:
                torch.cuda.current_stream(self._device).wait_event(self._read)
            yield
            if is_whole:
                self._moved = self._launched()

    def _launched(self) -> torch.cuda.Event | None:
        """Happens when what is launched on the current stream is done."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event


def pinned_memory(num_rows: int, num_words: int) -> Words:
    """Memory of the host that a GPU writes to by itself; torch keeps it for the next save."""
    return pinned_empty([num_rows, num_words], torch.int32, torch.device("cuda")).numpy()
