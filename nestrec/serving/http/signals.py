"""Unix signals of a server process (graceful shutdown, reload), and shutdown of an instance when its parent dies.

SIGTERM and SIGINT shut down gracefully, SIGHUP reloads the models. A Python signal handler can interrupt the main
thread at any point, so it only puts the signal into a reentrant queue, and a thread acts on it. Signals that arrive
while the process starts are remembered until callbacks are registered. Therefore the handlers are installed before
anything slow, and this module has no expensive imports.

`ParentDeathPipe`: every instance inherits the read end of a pipe whose write end only the parent (the gateway) holds.
Nothing is written. If the parent dies, even by SIGKILL, the kernel closes the write end, and the instances read
end-of-file and stop.
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
    """Handler of SIGTERM, SIGINT and SIGHUP for this process; create it with `installed`."""

    def __init__(self) -> None:
        self._received: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._is_reload_due = False
        self._stop_callbacks: list[Callable[[bool], None]] = []
        self._reload_callback: Callable[[], None] | None = None

    @staticmethod
    def installed() -> "SignalHandler":
        """Install the handlers and start the thread that acts on signals; call this on the main thread."""
        signals = SignalHandler()
        signals.take_over()
        BackgroundThread("nestrec-signals", signals._turn).start()
        return signals

    def take_over(self) -> None:
        """Install the signal handlers; call it again if a library may have replaced them."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda received, _: self._received.put(received))

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def wait_for_stop(self, timeout_s: float | None = None) -> bool:
        """Wait for a request to stop; return whether it was received before the timeout."""
        return self._stop.wait(timeout_s)

    def stop(self) -> None:
        """Stop the process as SIGTERM does."""
        self._received.put(signal.SIGTERM)

    def on_stop(self, act: Callable[[bool], None]) -> None:
        """Register a callback for the request to stop; it is called immediately if the process is already stopping.

        Args:
            act: Called with False, and called with True on a second SIGINT, which asks to stop without draining.
        """
        with self._lock:
            self._stop_callbacks.append(act)
            is_stopping = self.is_stopping
        if is_stopping:
            act(False)

    def on_reload(self, act: Callable[[], None]) -> None:
        """Set the callback that reloads the models; it is called immediately if a SIGHUP was received before."""
        with self._lock:
            self._reload_callback = act
            is_due, self._is_reload_due = self._is_reload_due, False
        if is_due:
            act()

    def _turn(self) -> bool:
        number = self._received.get()
        if number == signal.SIGHUP:
            self._reload()
        else:
            self._end(number)
        return True

    def _reload(self) -> None:
        with self._lock:
            act = self._reload_callback
            self._is_reload_due = act is None
        if act is not None:
            act()

    def _end(self, number: int) -> None:
        with self._lock:
            is_impatient = self._stop.is_set() and number == signal.SIGINT
            self._stop.set()
            callbacks = list(self._stop_callbacks)
        for act in callbacks:
            guarded("nestrec-signals", lambda: act(is_impatient))  # noqa: B023 (called at once)


_PIPE_VARIABLE = "NESTREC_PARENT_PIPE"


class ParentDeathPipe:
    """Parent's side of the pipe."""

    def __init__(self) -> None:
        self.descriptor, self._write_end = os.pipe()
        """File descriptor of the read end, which instances inherit."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variable that passes the read end to an instance."""
        return {_PIPE_VARIABLE: str(self.descriptor)}

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._write_end)


def exit_with_parent(signals: SignalHandler, patience_s: float) -> None:
    """Stop this instance when its parent dies: gracefully as on SIGTERM, and by exiting `patience_s` seconds later."""
    pipe = os.environ.pop(_PIPE_VARIABLE, None)
    if pipe is None:
        return
    descriptor = int(pipe)
    os.set_inheritable(descriptor, False)

    def watch() -> bool:
        with contextlib.suppress(OSError):  # a pipe that cannot be read does not show whether the parent is alive
            while os.read(descriptor, 1):
                pass
        guarded("nestrec-parent-watch", signals.stop)
        time.sleep(patience_s)
        os._exit(1)

    BackgroundThread("nestrec-parent-watch", watch).start()
