"""One piece of work at a time on a thread of its own; its error waits for whoever asks next."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable

NICENESS = 15
"""Of a thread that writes while others train: where they leave it no core of its own, it takes 3% of theirs."""


class Background:
    """Runs one function at a time in the background."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Start `work`; the work before it must have been joined."""
        assert self._thread is None
        # Not a daemon: a program that ends without `join` still finishes what it began to write.
        self._thread = threading.Thread(target=self._run, args=(work,), name="nestrec-checkpoint")
        self._thread.start()

    def join(self) -> None:
        """Wait for the work in flight and raise its error, if any."""
        if self._thread is not None:
            _set_niceness(self._thread, 0)  # somebody waits
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], object]) -> None:
        _set_niceness(threading.current_thread(), NICENESS)
        try:
            work()
        except BaseException as error:  # raised again by `join`
            self._error = error


def _set_niceness(thread: threading.Thread, more: int) -> None:
    """How much nicer a thread is than its process; on Linux, where threads have a niceness of their own."""
    if sys.platform == "linux" and thread.native_id is not None:
        of_process = os.getpriority(os.PRIO_PROCESS, os.getpid())
        # Who may not be less nice again stays as it is; a thread that has ended is no more.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id, min(19, of_process + more))
