"""Watchdog for device collectives that hang because a peer was lost.

The host does not wait for device collectives, so it would not notice a lost peer. A watchdog thread periodically checks
whether the oldest pending collective has completed. If a collective exceeds the timeout or the device reports an error,
the watchdog prints the cause to standard error and exits the process with code 76 (PEER_LOST), as other code does when
a peer is lost. The watchdogs of the other ranks do the same, and torchrun restarts the job. (torch's own watchdog would
abort the process without an exit code that identifies the cause.)
"""

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from nestrec.base.errors import PEER_LOST, PeerLostError

_POLL_S = 0.5


def exit_process(error: PeerLostError) -> None:
    """Print the error and exit at once, without waiting for threads or devices that may never respond."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(PEER_LOST)


class _PendingOperation(NamedTuple):
    operation: str
    is_done: Callable[[], bool]
    start_s: float


class CollectiveWatchdog:
    """Watchdog of one process for the collectives of all its device communicators."""

    def __init__(
        self,
        timeout_s: float,
        *,
        on_failure: Callable[[PeerLostError], None] = exit_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a watchdog; it checks nothing before `start`.

        Args:
            timeout_s: Time without any completed collective after which a peer counts as lost, in seconds.
            on_failure: Called with the error when a peer counts as lost.
            clock: Monotonic time in seconds.
        """
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._clock = clock
        self._pending: deque[_PendingOperation] = deque()
        self._progress_s = clock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the watchdog thread if it is not running."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="nestrec-collectives", daemon=True)
            self._thread.start()

    @contextlib.contextmanager
    def watch_launch(self, operation: str) -> Iterator[None]:
        """Watch the launch of a collective and then its execution on the device.

        The launch itself is watched because the host can block in it, for example while NCCL creates a communicator.
        """
        returned = threading.Event()
        self.track(operation, returned.is_set)
        try:
            yield
            self._track_stream(operation)
        finally:
            returned.set()

    def _track_stream(self, operation: str) -> None:
        """Watch the collective that was just launched on the current stream of this thread."""
        event = torch.cuda.Event()
        event.record()
        self.track(operation, event.query)

    def track(self, operation: str, is_done: Callable[[], bool]) -> None:
        """Watch an operation until `is_done` returns True."""
        self._pending.append(_PendingOperation(operation, is_done, self._clock()))

    def check_pending(self) -> None:
        """Discard completed operations; report a lost peer if the oldest one has exceeded the timeout."""
        try:
            while self._pending and self._pending[0].is_done():
                self._pending.popleft()
                self._progress_s = self._clock()
        except RuntimeError as error:  # raised by the device or the communicator
            self._fail(self._pending[0].operation, str(error).splitlines()[0])
            return
        if self._pending:
            oldest = self._pending[0]
            silent_s = self._clock() - max(self._progress_s, oldest.start_s)
            if silent_s > self._timeout_s:
                self._fail(oldest.operation, f"no response within {self._timeout_s:g} s")

    def _fail(self, operation: str, reason: str) -> None:
        self._pending.clear()
        problem = f"a peer was lost in {operation}: {reason}"
        self._on_failure(PeerLostError(problem, remedy="restart all ranks from the last checkpoint"))

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_S)
            self.check_pending()
