"""Keeping a front's core awake while requests come: one that slept is slow for the next of them.

On hosts of GPUs, virtual ones above all, a core takes tens to hundreds of microseconds to wake, and is several times
slower just after it. A front waits three times for each request: for it, for what was computed, and for the next one.
"""

import asyncio
import time


class Awake:
    """An event loop that does not sleep until so many seconds after the last request. Used inside that loop."""

    def __init__(self, seconds: float):
        self._seconds, self._until_s, self._is_turning = seconds, 0.0, False

    def called(self) -> None:
        """A request has come."""
        if self._seconds:
            self._until_s = time.monotonic() + self._seconds
            if not self._is_turning:
                self._is_turning = True
                self._turn()

    def _turn(self) -> None:
        """A loop that has something to do does not wait for anything."""
        self._is_turning = time.monotonic() < self._until_s
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)
