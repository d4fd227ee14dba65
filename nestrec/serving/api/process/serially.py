"""Something slow that is asked for from outside: done one time after another, and the last request is never missed."""

import threading
from collections.abc import Callable

from nestrec.serving.background import BackgroundThread


class Serially:
    """A thread that acts when it is asked.

    Whoever asks while it acts gets one more turn after that one, however many ask: each turn sees the world as it is
    when the turn begins, so the last one sees what was there at the last request.
    """

    def __init__(self, name: str, act: Callable[[], None]):
        self._act = act
        self._condition = threading.Condition()
        self._is_closed = False
        self.num_asked = self.num_done = 0
        """requests, and those that have been seen to: equal where nothing is under way"""
        BackgroundThread(name, self._turn).start()

    def ask(self) -> None:
        with self._condition:
            self.num_asked += 1
            self._condition.notify_all()

    def close(self) -> None:
        """No further turn. One that is under way is left alone: the process is ending, and nothing waits for it."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _turn(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or self.num_done < self.num_asked)
            if self._is_closed:
                return False
            asked = self.num_asked
        try:
            self._act()
        finally:
            self.num_done = asked
        return True
