"""Waiting for sockets to be readable without sleeping, and without the interpreter.

A thread that sleeps until a socket is readable is woken late, on a core that has slept too. One that asked again and
again in Python would take the interpreter each time.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import typing

from nestrec.serving.engine.spin import Spin

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


class ReadableSpin(Spin):
    """A spin wait that ends when a socket is ready: each turn polls the sockets once."""

    _first_rate = 2e6

    def __init__(self) -> None:
        self._polled = np.zeros(0, _POLLED)
        super().__init__()

    def watch(self, events: Mapping[int, int]) -> None:
        """Descriptors, and what is waited for of each (`select.POLLIN` and others)."""
        self._polled = np.array([(descriptor, wanted, 0) for descriptor, wanted in events.items()], _POLLED)

    def turn(self, most: int) -> int:
        return int(_looks(self._polled.ctypes.data, len(self._polled), most))
