"""Waiting for less than it takes an idle core to wake: the thread keeps its core and leaves the interpreter to others.

A core that slept between two batches is several times slower just after it (measured on an H200's host: 0.7 ms to put a
batch together instead of 0.2). Only engines on a GPU wait so, and only while a batch is on its way or was a moment
ago.
"""

import time

import numpy as np
from numba import njit
from numpy.typing import NDArray

_MOST_S = 2e-3
_SMOOTH = 0.2
_PLACES = 64
_LOOK_COST = 2.0
"""turns for which one takes that looks at calls as well, about"""


@njit(cache=True, nogil=True)
def _turns(count: int) -> int:
    state = count
    for _ in range(count):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
    return state


@njit(cache=True, nogil=True)
def _turns_until(count: int, calls: NDArray[np.int64], seen: int) -> None:
    """Looks at another place each time: a compiler would read one place once."""
    state = count
    for _ in range(count):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        if calls[(state >> 16) & (_PLACES - 1)] != seen:
            return


class Calls:
    """By which a thread that spins is called without the interpreter: to look it would have to ask for that each time,
    and take from whoever has it."""

    def __init__(self) -> None:
        self.places = np.zeros(_PLACES, np.int64)

    @property
    def count(self) -> int:
        return int(self.places[0])

    def call(self) -> None:
        """One thread at a time."""
        self.places += 1


class Spin:
    """Waits of one thread."""

    _first_rate = 1e9

    def __init__(self) -> None:
        self.turn(1)  # compiled, or read from the cache
        _turns_until(1, np.zeros(_PLACES, np.int64), 0)
        self._turns_a_second = self._first_rate
        for _ in range(8):
            self.wait(1e-4)

    def wait(self, seconds: float) -> None:
        """About so long, but at most two milliseconds."""
        count = int(min(seconds, _MOST_S) * self._turns_a_second)
        if count <= 0:
            return
        start_s = time.perf_counter()
        if self.turn(count) == count:
            found = count / max(time.perf_counter() - start_s, 1e-7)
            self._turns_a_second += _SMOOTH * (found - self._turns_a_second)

    def turn(self, most: int) -> int:
        """Spin for at most `most` turns and return the number of turns made."""
        _turns(most)
        return most

    def wait_for_call(self, seconds: float, calls: Calls, seen: int) -> None:
        """Until there are other calls than those that were seen, or about so long."""
        _turns_until(int(min(seconds, _MOST_S) * self._turns_a_second / _LOOK_COST), calls.places, seen)
