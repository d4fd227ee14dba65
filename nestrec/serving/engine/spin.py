"""Waiting for less than it takes an idle core to wake: the thread keeps its core and leaves the interpreter to others.

A core that slept between two batches is several times slower just after it (measured on an H200's host: 0.7 ms to put a
batch together instead of 0.2). Only engines on a GPU wait so, and only while a batch is on its way or was a moment
ago.
"""

import time

from numba import njit

_FIRST_RATE = 1e9
_MOST_S = 2e-3
_SMOOTH = 0.2


@njit(cache=True, nogil=True)
def _turns(count: int) -> int:
    state = count
    for _ in range(count):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
    return state


class Spin:
    """Waits of one thread."""

    def __init__(self) -> None:
        _turns(1)  # compiled, or read from the cache
        self._turns_a_second = _FIRST_RATE
        for _ in range(8):
            self.wait(1e-4)

    def wait(self, seconds: float) -> None:
        """About so long, but at most two milliseconds."""
        count = int(min(seconds, _MOST_S) * self._turns_a_second)
        if count <= 0:
            return
        start_s = time.perf_counter()
        _turns(count)
        found = count / max(time.perf_counter() - start_s, 1e-7)
        self._turns_a_second += _SMOOTH * (found - self._turns_a_second)
