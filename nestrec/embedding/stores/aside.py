"""Rows that were about to change before they were read: a ring of them, of bounded size.

One side puts rows at its head, the other takes them from its end, and neither ever holds a lock that the other needs.
"""

import threading
from collections.abc import Callable

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.ops.rows.atomic import exchange_if

Memory = Callable[[int, int], NDArray[np.int32]]
"""(rows, words) to an array of so many."""
_PAGE_WORDS = 1024


class Aside:
    """A ring of rows and of the slots that they are of."""

    def __init__(self, num_words: int, max_bytes: int, memory: Memory) -> None:
        """max_bytes: of the rows; room for one there always is."""
        capacity = max(1, max_bytes // (4 * num_words))
        self.rows = memory(capacity, num_words)
        self._slots = np.empty(capacity, np.int64)
        self._num_put = self._num_taken = 0
        self._has_room, self._has_more, self._is_closed = threading.Event(), threading.Event(), False

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
        start, capacity = self._num_put % len(self._slots), len(self._slots)
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
