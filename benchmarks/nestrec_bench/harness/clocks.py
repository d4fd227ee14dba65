import heapq
import itertools
import math
from collections.abc import Callable


class ManualClock:
    """Stands still until told to move; `sleep` moves it."""

    def __init__(self, start_s: float = 0.0):
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self._now_s += seconds


class EventClock:
    """Stands still until somebody sleeps; what is due meanwhile happens at its moment, in order."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now_s(self) -> float:
        return self._now_s

    def at(self, moment_s: float, act: Callable[[], None]) -> None:
        """What happens must not sleep."""
        heapq.heappush(self._due, (moment_s, next(self._numbers), act))

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        end_s = self._now_s + seconds
        while self.next_s <= end_s:
            moment_s, _, act = heapq.heappop(self._due)
            self._now_s = max(self._now_s, moment_s)
            act()
        self._now_s = end_s

    @property
    def next_s(self) -> float:
        """When the next thing is due; infinite where nothing is."""
        return self._due[0][0] if self._due else math.inf
