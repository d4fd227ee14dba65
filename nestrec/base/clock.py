"""Clock interface for dependency injection, so that tests and simulations control the time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic clock in seconds since an arbitrary start."""

    def now_s(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class RealClock:
    """System clock of the process (`time.perf_counter`)."""

    def now_s(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
