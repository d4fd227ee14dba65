"""One piece of work at a time on a thread of its own; its error waits for whoever asks next."""

import threading
from collections.abc import Callable

from nestrec.base.parallel import Team, set_niceness

NICENESS = 15
"""Of threads that write while others train: where they leave them no core of their own, each takes 3% of theirs."""


class Background:
    """Runs one function at a time in the background."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._team: Team | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Start `work`; the work before it must have been joined."""
        assert self._thread is None
        # Not a daemon: a program that ends without `join` still finishes what it began to write.
        self._thread = threading.Thread(target=self._run, args=(work,), name="nestrec-checkpoint")
        self._thread.start()

    def join(self) -> None:
        """Wait for the work in flight and raise its error, if any."""
        if self._thread is not None:
            if self._team is not None:
                self._team.set_niceness(0)  # somebody waits
            self._thread.join()
            self._thread = self._team = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], object]) -> None:
        own = threading.get_native_id()
        # Who may not come back would be left behind by every other process, also when somebody waits.
        if set_niceness(own, 1) and set_niceness(own, 0):
            set_niceness(own, NICENESS)
            self._team = Team.of_thread()
        try:
            work()
        except BaseException as error:  # raised again by `join`
            self._error = error
