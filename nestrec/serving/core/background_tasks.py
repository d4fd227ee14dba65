"""Background threads of a server that continue after an exception.

If an exception ended such a thread, the server would still answer requests, but would no longer reload keys or restart
a failed instance, for example. Each exception is therefore counted for `/metrics` and logged with its traceback when it
first occurs, and the thread continues.
"""

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from nestrec.base.errors import UserError

_LOG = logging.getLogger(__name__)
_PAUSE_S = 0.1
"""Seconds before a thread continues after an exception, so that a repeating one does not occupy a CPU core."""
_MAX_LOGGED = 1000
"""Maximum number of different exceptions remembered as already logged."""


class Failures:
    """Counts of exceptions by task in this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._logged: set[Hashable] = set()

    def register(self, task: str) -> None:
        """Start the count of a task at 0: an alert on an increase needs a value before the first failure."""
        with self._lock:
            self._counts.setdefault(task, 0)

    def add(self, task: str, error: Exception, consequence: str = "it continues", about: Hashable = None) -> None:
        """Count an exception, and log it unless the same one has been logged before.

        Args:
            task: Task that failed; a label of the metric.
            error: Exception raised by the task. A `UserError` or `OSError` is logged without a traceback.
            consequence: What happens next, for the log.
            about: State that caused the exception; the same exception in another state is logged again.
        """
        is_expected = isinstance(error, UserError | OSError)
        raised_at = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)[-1:]]
        identity = (task, type(error), str(error) if is_expected else "", tuple(raised_at), about)
        with self._lock:
            self._counts[task] = self._counts.get(task, 0) + 1
            if identity in self._logged:
                return
            if len(self._logged) >= _MAX_LOGGED:
                self._logged.clear()
            self._logged.add(identity)
        text = f"{task} failed; {consequence}"
        if is_expected:
            _LOG.error("%s: %s", text, error)
        else:
            _LOG.error("%s: %s", text, type(error).__name__, exc_info=error)

    def merge(self, counts: Mapping[str, int]) -> None:
        """Add the counts of another process of this server."""
        with self._lock:
            for task, count in counts.items():
                self._counts[task] = self._counts.get(task, 0) + count

    @property
    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


FAILURES = Failures()


def guarded(task: str, act: Callable[[], object]) -> None:
    """Run `act`; count and log an exception instead of raising it."""
    try:
        act()
    except Exception as error:
        FAILURES.add(task, error)


def reported(name: str) -> Callable[["asyncio.Task[Any]"], None]:
    """Return a done callback that counts and logs the exception of an asyncio task that is never awaited."""
    FAILURES.register(name)

    def report(task: "asyncio.Task[Any]") -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            FAILURES.add(name, error, "its task has ended")

    return report


class BackgroundThread:
    """Daemon thread that repeats a step until the step returns False, and continues after exceptions."""

    def __init__(self, name: str, step: Callable[[], bool]):
        """Create the thread without starting it.

        Args:
            name: Name of the thread and of its task in the failure counts.
            step: Waits for work and does it. Returns whether to run another step.
        """
        self._name = name
        self._step = step
        FAILURES.register(name)
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> "BackgroundThread":
        self._thread.start()
        return self

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _loop(self) -> None:
        continues = True
        while continues:
            try:
                continues = self._step()
            except Exception as error:
                FAILURES.add(self._name, error)
                time.sleep(_PAUSE_S)
