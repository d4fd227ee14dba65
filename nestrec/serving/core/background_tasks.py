"""Background threads of a server, which continue after an exception.

A thread that an exception ends is not missed: the server answers requests, but keys are no longer read or a dead
instance is no longer restarted. Each exception is counted for `/metrics`, logged with its traceback the first time that
it occurs, and the thread continues.
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
"""Seconds before a thread continues after an exception, so that one that repeats does not take a whole core."""
_MOST_REMEMBERED = 1000
"""Largest number of different exceptions that are remembered as logged."""


class Failures:
    """Counts of exceptions by task, of this process. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._logged: set[Hashable] = set()

    def register(self, task: str) -> None:
        """Count a task from 0 on: an alert on an increase needs a value from before the first failure."""
        with self._lock:
            self._counts.setdefault(task, 0)

    def add(self, task: str, error: Exception, consequence: str = "it continues", about: Hashable = None) -> None:
        """Count an exception, and log it unless the same one has been logged before.

        Args:
            task: what has failed; a label of the metric.
            error: what it raised. A mistake of a user and an error of the system are logged without a traceback.
            consequence: what happens now, for the log.
            about: the state of the world that caused it; the same exception in another state is logged again.
        """
        is_expected = isinstance(error, UserError | OSError)
        raised_at = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)[-1:]]
        one = (task, type(error), str(error) if is_expected else "", tuple(raised_at), about)
        with self._lock:
            self._counts[task] = self._counts.get(task, 0) + 1
            if one in self._logged:
                return
            if len(self._logged) >= _MOST_REMEMBERED:
                self._logged.clear()
            self._logged.add(one)
        text = f"{task} failed; {consequence}"
        if is_expected:
            _LOG.error("%s: %s", text, error)
        else:
            _LOG.error("%s: %s", text, type(error).__name__, exc_info=error)

    def merge(self, counts: Mapping[str, int]) -> None:
        """Add what another process of this server has counted."""
        with self._lock:
            for task, count in counts.items():
                self._counts[task] = self._counts.get(task, 0) + count

    @property
    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


FAILURES = Failures()


def guarded(task: str, act: Callable[[], object]) -> None:
    """Run `act`; an exception of it is counted and logged, and does not leave this function."""
    try:
        act()
    except Exception as error:
        FAILURES.add(task, error)


def reported(name: str) -> Callable[["asyncio.Task[Any]"], None]:
    """Return a callback for tasks of asyncio that nothing awaits: their exceptions are counted and logged."""
    FAILURES.register(name)

    def report(task: "asyncio.Task[Any]") -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            FAILURES.add(name, error, "its task has ended")

    return report


class BackgroundThread:
    """A daemon thread that repeats one turn until that returns False, whatever the turn raises meanwhile."""

    def __init__(self, name: str, turn: Callable[[], bool]):
        """turn: waits for work and does it. Returns whether there is another turn."""
        self._name = name
        self._turn = turn
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
        goes_on = True
        while goes_on:
            try:
                goes_on = self._turn()
            except Exception as error:
                FAILURES.add(self._name, error)
                time.sleep(_PAUSE_S)
