"""Time as a dependency: the real clock, one that tests move by hand, and one with an agenda, for simulations."""

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
