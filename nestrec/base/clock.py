"""Time as a dependency: the real clock, and one that tests move by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary start."""

    def now_s(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class RealClock:
    def now_s(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class SimulatedClock:
    """Stands still until told to move; `sleep` moves it."""

    def __init__(self, start_s: float = 0.0):
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self._now_s += seconds
