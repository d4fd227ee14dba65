"""Collectives of a device that do not end: a lost peer is noticed by nobody, since the host does not wait for them.

A thread of the host looks now and then whether the oldest collective that was launched is over. One that takes longer
than a peer may stay silent, or a device that reports an error, ends this process as a lost peer does elsewhere: with
the cause on standard error and exit code 76. Peers come to the same end, each by its own watch, and torchrun starts all
again. (torch's own watchdog would abort the process instead, with no code that says why.)
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


def end_process(error: PeerLostError) -> None:
    """Say why, and end without waiting for threads or devices that may never answer."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(PEER_LOST)


class _Launched(NamedTuple):
    what: str
    is_over: Callable[[], bool]
    since_s: float


class CollectiveWatchdog:
    """Of one process, over all its communicators of a device."""

    def __init__(
        self,
        timeout_s: float,
        *,
        end: Callable[[PeerLostError], None] = end_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._end = end
        self._clock = clock
        self._launched: deque[_Launched] = deque()
        self._progress_s = clock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on, on a thread of its own."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="nestrec-collectives", daemon=True)
            self._thread.start()

    @contextlib.contextmanager
    def launching(self, what: str) -> Iterator[None]:
        """Around the call of a collective: the host may wait inside it, for keys or for a communicator to be made."""
        returned = threading.Event()
        self.await_end(what, returned.is_set)
        try:
            yield
            self._note(what)
        finally:
            returned.set()

    def _note(self, what: str) -> None:
        """A collective was launched into the current stream of this thread."""
        event = torch.cuda.Event()
        event.record()
        self.await_end(what, event.query)

    def await_end(self, what: str, is_over: Callable[[], bool]) -> None:
        """Something that must be over in time."""
        self._launched.append(_Launched(what, is_over, self._clock()))

    def look(self) -> None:
        """What is over is forgotten; who is not, in time, ends the process."""
        try:
            while self._launched and self._launched[0].is_over():
                self._launched.popleft()
                self._progress_s = self._clock()
        except RuntimeError as error:  # of the device, or of the communicator
            self._fail(self._launched[0].what, str(error).splitlines()[0])
            return
        if self._launched:
            oldest = self._launched[0]
            silent_s = self._clock() - max(self._progress_s, oldest.since_s)
            if silent_s > self._timeout_s:
                self._fail(oldest.what, f"no answer in {self._timeout_s:g} s")

    def _fail(self, what: str, why: str) -> None:
        self._launched.clear()
        problem = f"a peer was lost in {what}: {why}"
        self._end(PeerLostError(problem, remedy="restart all ranks from the last checkpoint"))

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_S)
            self.look()
