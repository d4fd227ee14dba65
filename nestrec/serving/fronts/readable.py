"""Waiting for sockets to be readable without sleeping, and without the interpreter.

A thread that sleeps until a socket is readable is woken late, on a core that has slept too. One that asked again and
again in Python would take the interpreter each time.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import typing

_FIRST_RATE = 2e6
_MOST_S = 2e-3
_SMOOTH = 0.2
_POLLED = np.dtype([("descriptor", np.int32), ("events", np.int16), ("found", np.int16)])
"""`struct pollfd` of poll(2)"""
_poll: Any = types.ExternalFunction("poll", typing.signature(types.int32, types.intp, types.uint64, types.int32))


@njit(cache=True, nogil=True)
def _looks(address: int, count: int, most: int) -> int:
    """How often was looked."""
    for number in range(most):
        if _poll(address, count, 0) != 0:
            return number + 1
    return most


class ReadableSpin:
    """Waits of one thread."""

    def __init__(self) -> None:
        self._polled = np.zeros(0, _POLLED)
        self._looks_a_second = _FIRST_RATE
        _looks(self._polled.ctypes.data, 0, 1)  # compiled, or read from the cache

    def watch(self, events: Mapping[int, int]) -> None:
        """Descriptors, and what is waited for of each (`select.POLLIN` and others)."""
        self._polled = np.array([(descriptor, wanted, 0) for descriptor, wanted in events.items()], _POLLED)

    def wait(self, seconds: float) -> None:
        """Until one of them is ready, or about so long, but at most two milliseconds."""
        most = int(min(seconds, _MOST_S) * self._looks_a_second)
        if most <= 0:
            return
        start_s = time.perf_counter()
        count = self.look(most)
        if count == most:
            found = count / max(time.perf_counter() - start_s, 1e-7)
            self._looks_a_second += _SMOOTH * (found - self._looks_a_second)

    def look(self, most: int) -> int:
        """Until one of them is ready, but at most so often; how often."""
        return int(_looks(self._polled.ctypes.data, len(self._polled), most))
