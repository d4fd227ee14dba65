"""Rows of a store as they were at a moment, read in pieces while others write.

Each row is claimed once: by the reader, who takes it, or by a writer who is about to overwrite it and puts it aside
first (nestrec.embedding.stores.aside). The memory aside is bounded; the reader empties it before it is full, and only
where it comes too late does a writer wait.

In host memory the two meet in one byte a row, and neither waits for the other: a writer claims a row, then copies it;
the reader copies a row, then claims it, and drops the copy where a writer was first.
"""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.parallel import Team, niceness
from nestrec.embedding.stores.aside import Aside
from nestrec.embedding.stores.slab import Slab
from nestrec.embedding.stores.store import Slots
from nestrec.ops.rows.atomic import exchange_if
from nestrec.ops.rows.prefetch import AHEAD, prefetch_row

Words = NDArray[np.int32]
State = NDArray[np.uint8]
WAITS, GONE = 1, 2
"""Of a slot: its row is still to be claimed; it was. 0: it is of no interest."""


class FrozenRows(ABC):
    """The rows of some slots of a store. One thread takes them, others write to the store meanwhile."""

    _has_memory_aside = False
    """The system has given what is kept for rows aside; else it does when that is first written."""

    def __init__(self, state: State, aside: Aside) -> None:
        """state: by slot, `WAITS` where its row is wanted; it is changed here."""
        self._state, self.aside = state, aside
        self._readers: Team | None = None
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
            self._readers, self._niceness = Team.of_thread(), niceness(threading.get_native_id())
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


class Turns:
    """A lock of a reader and of writers: the reader, who takes it again and again, lets all writers go first."""

    def __init__(self) -> None:
        self._turn, self._gate, self._num_coming = threading.Condition(threading.RLock()), threading.Lock(), 0

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


class MemoryRows(FrozenRows):
    """Of a store in host memory that is read and written row by row."""

    def __init__(self, rows: Callable[[], Words], state: State, aside: Aside) -> None:
        """rows: those of the store by slot, which may lie elsewhere after each change of the store itself."""
        super().__init__(state, aside)
        self._rows, self._moves = rows, Turns()

    def take(self, slots: Slots, out: Words) -> Slots:
        kept = np.empty(len(slots), np.int64)
        with self._moves.of_reader():
            return kept[: _take(self._rows(), slots, self._state, out, kept)]

    def _claim(self, slots: Slots, out: Words) -> Slots:
        kept = np.empty(len(slots), np.int64)
        return kept[: _claim(self._rows(), slots, self._state, out, kept)]

    def _turn(self, *, is_whole: bool) -> contextlib.AbstractContextManager[object]:
        return self._moves.of_writer() if is_whole else contextlib.nullcontext()


class ExclusiveRows(FrozenRows):
    """Of a store that only one thread at a time may use."""

    def __init__(self, read: Callable[[Slots, Words], None], state: State, aside: Aside) -> None:
        super().__init__(state, aside)
        self._read, self._turns = read, Turns()

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


class Freezable(ABC):
    """A store that can be read as it was while it is written to."""

    _frozen: FrozenRows | None = None
    _changing: Callable[..., contextlib.AbstractContextManager[object]] = staticmethod(contextlib.nullcontext)
    """To be held while rows of some slots, or the store itself, are changed."""

    def freeze(self, state: State, num_words: int, max_bytes: int) -> FrozenRows:
        """The rows of the slots that are to wait, as they are now, until `thaw`; while nobody writes.

        state: see `FrozenRows`. max_bytes: of rows that are put aside.
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
    def _freeze(self, state: State, num_words: int, max_bytes: int) -> FrozenRows: ...


def host_memory(num_rows: int, num_words: int) -> Words:
    """Memory of the host, which is taken when it is first written; a `Memory` of `Aside`."""
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
    num_kept, width = 0, out.shape[1]
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
    num_kept, width = 0, out.shape[1]
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
