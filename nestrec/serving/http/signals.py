"""What a serving process is asked by signals: to stop (SIGTERM, SIGINT), and to load its models anew (SIGHUP).

A handler may run in the middle of anything that the main thread does, so it only puts a number into a queue that is
made for that; a thread acts on it. What comes while the process is still starting is remembered for whoever asks later,
so this stands before everything slow and imports nothing of weight.

Instances end with their front, however that ends: each has one end of a pipe, and the front alone has the other.

Nothing is ever written. When the front is gone, even by SIGKILL, the system closes its end, and whoever reads is told.
"""

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable

from nestrec.serving.core.background_tasks import BackgroundThread, guarded


class SignalHandler:
    """Of this process, from `installed` on."""

    def __init__(self) -> None:
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._is_reload_due = False
        self._when_stopped: list[Callable[[bool], None]] = []
        self._when_reloaded: Callable[[], None] | None = None

    @staticmethod
    def installed() -> "SignalHandler":
        """Called on the main thread."""
        signals = SignalHandler()
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


_FRONT = "NESTREC_FRONT_PIPE"


class ParentDeathPipe:
    """The front's side."""

    def __init__(self) -> None:
        self.descriptor, self._held = os.pipe()
        """the end that instances inherit"""

    @property
    def environment(self) -> dict[str, str]:
        """What an instance finds its end by."""
        return {_FRONT: str(self.descriptor)}

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._held)


def end_with_front(signals: SignalHandler, patience_s: float) -> None:
    """The instance's side: stop as by SIGTERM when the front is gone, and without more ado after `patience_s`."""
    given = os.environ.pop(_FRONT, None)
    if given is None:
        return
    descriptor = int(given)
    os.set_inheritable(descriptor, False)

    def watch() -> bool:
        with contextlib.suppress(OSError):  # a pipe that cannot be read does not show whether the front is alive
            while os.read(descriptor, 1):
                pass
        guarded("nestrec-front", signals.stop)
        time.sleep(patience_s)
        os._exit(1)

    BackgroundThread("nestrec-front", watch).start()
