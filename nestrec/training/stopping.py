"""SIGTERM and SIGINT ask a run to save and end."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(Exception):
    """The run was told to stop; its state has been saved."""


class StopRequest:
    """Set by a signal; the loop looks at it between steps. A second SIGINT interrupts at once, as usual."""

    def __init__(self) -> None:
        self.is_set = False

    @contextlib.contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_set = True
