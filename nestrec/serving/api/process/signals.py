"""What a serving process is asked by signals: to stop (SIGTERM, SIGINT), and to load its models anew (SIGHUP).

A handler may run in the middle of anything that the main thread does, so it only puts a number into a queue that is
made for that; a thread acts on it. What comes while the process is still starting is remembered for whoever asks later,
so this stands before everything slow and imports nothing of weight.
"""

import queue
import signal
import threading
from collections.abc import Callable

from nestrec.serving.background import BackgroundThread, guarded


class Signals:
    """Of this process, from `installed` on."""

    def __init__(self) -> None:
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._is_reload_due = False
        self._when_stopped: list[Callable[[bool], None]] = []
        self._when_reloaded: Callable[[], None] | None = None

    @staticmethod
    def installed() -> "Signals":
        """Called on the main thread."""
        signals = Signals()
        signals.take_over()
        BackgroundThread("nestrec-signals", signals._turn).start()
        return signals

    def take_over(self) -> None:
        """Install the handlers, again where a library has set its own meanwhile."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda came, _: self._came.put(came))

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def wait_for_stop(self, timeout_s: float | None = None) -> bool:
        """Whether the process is to stop."""
        return self._stop.wait(timeout_s)

    def stop(self) -> None:
        """As SIGTERM does."""
        self._came.put(signal.SIGTERM)

    def when_stopped(self, act: Callable[[bool], None]) -> None:
        """Call `act`, at once where the process is stopping already; with True at a second SIGINT: without patience."""
        with self._lock:
            self._when_stopped.append(act)
            is_stopping = self.is_stopping
        if is_stopping:
            act(False)

    def when_reloaded(self, act: Callable[[], None]) -> None:
        """Call `act` whenever models are to be loaded anew, at once where that was asked before."""
        with self._lock:
            self._when_reloaded = act
            is_due, self._is_reload_due = self._is_reload_due, False
        if is_due:
            act()

    def _turn(self) -> bool:
        number = self._came.get()
        if number == signal.SIGHUP:
            self._reload()
        else:
            self._end(number)
        return True

    def _reload(self) -> None:
        with self._lock:
            act = self._when_reloaded
            self._is_reload_due = act is None
        if act is not None:
            act()

    def _end(self, number: int) -> None:
        with self._lock:
            is_impatient = self._stop.is_set() and number == signal.SIGINT
            self._stop.set()
            listeners = list(self._when_stopped)
        for act in listeners:
            guarded("nestrec-signals", lambda: act(is_impatient))  # noqa: B023 (called at once)
