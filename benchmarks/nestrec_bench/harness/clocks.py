"""Clocks of simulated time, for tests and simulations."""

import heapq
import itertools
import math
from collections.abc import Callable


class ManualClock:
    """Clock that advances only by calls of `sleep`."""

    def __init__(self, start_s: float = 0.0):
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self._now_s += seconds


class EventClock:
    """Clock that advances only by calls of `sleep`, which runs the events that are due meanwhile, in order."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now_s(self) -> float:
        return self._now_s

    def at(self, moment_s: float, callback: Callable[[], None]) -> None:
        """Schedule a callback, which must not call `sleep`."""
        heapq.heappush(self._events, (moment_s, next(self._numbers), callback))

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        end_s = self._now_s + seconds
        while self.next_s <= end_s:
            moment_s, _, callback = heapq.heappop(self._events)
            self._now_s = max(self._now_s, moment_s)
            callback()
        self._now_s = end_s

    @property
    def next_s(self) -> float:
        """Time of the next event, or infinity."""
        return self._events[0][0] if self._events else math.inf
