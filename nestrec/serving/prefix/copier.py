"""Copies between device pages and DRAM on a thread of their own, and what they cost.

Each direction has a copier: a link carries both at once, and what comes back is waited for. On a GPU they also have a
stream of their own, so that batches go on beside them. A copy begins after the engine has
seen the end of whatever wrote its pages, and ends before the engine hears of it: no stream needs to wait for another.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from nestrec.serving.background import FAILURES, guarded
from nestrec.serving.engine.cost_model import EngineCostModel

_TASK = "nestrec-copier"
_SMOOTH = 0.1
_UNKNOWN_S = 1e-9


class Copier:
    """One copy after the other; `done` is called on the copier's thread, with whether the copy was made."""

    def __init__(self, device: torch.device, link_gb_per_s: float = 0.0) -> None:
        """link_gb_per_s: emulates a slower link; 0 copies as fast as the machine can."""
        self._link_s_a_byte = 1e-9 / link_gb_per_s if link_gb_per_s else 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        FAILURES.register(_TASK)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=_TASK)
        self._lock = threading.Lock()
        self._seconds_a_byte: float | None = None
        self._queued_bytes = 0

    def submit(self, copy: Callable[[], None], num_bytes: int, done: Callable[[bool], None]) -> None:
        def run() -> None:
            is_made = False
            try:
                self._make(copy, num_bytes)
                is_made = True
            except Exception as error:
                FAILURES.add(_TASK, error, "the prefix is forgotten")
            finally:  # works wait for it
                with self._lock:
                    self._queued_bytes -= num_bytes
                guarded(_TASK, lambda: done(is_made))  # the pool would keep an exception to itself

        with self._lock:
            self._queued_bytes += num_bytes
        self._pool.submit(run)

    def _make(self, copy: Callable[[], None], num_bytes: int) -> None:
        start_s = time.perf_counter()
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            copy()
        time.sleep(max(0.0, start_s + num_bytes * self._link_s_a_byte - time.perf_counter()))
        seconds = (time.perf_counter() - start_s) / max(num_bytes, 1)
        with self._lock:
            known = self._seconds_a_byte
            self._seconds_a_byte = seconds if known is None else known + _SMOOTH * (seconds - known)

    def wait(self) -> None:
        """Return when the copies that were submitted have ended; called by the thread that submits them."""
        self._pool.submit(lambda: None).result()
        self._queued_bytes = 0  # also of one that could not be submitted

    def copy_s(self, num_bytes: int) -> float:
        """Expected seconds of a copy; before the first one, as of a slow link."""
        return num_bytes * (_UNKNOWN_S if self._seconds_a_byte is None else self._seconds_a_byte)

    def learn(self, copy: Callable[[], None], num_bytes: int) -> None:
        """Find out what copies cost by making two, of which the second counts. Whoever decides by an estimate whether a
        copy is worth it would otherwise never make the first, if the estimate is too high."""
        for _ in range(2):
            made: Future[bool] = Future()
            self._seconds_a_byte = None
            self.submit(copy, num_bytes, made.set_result)
            made.result()

    @property
    def wait_s(self) -> float:
        """Expected seconds of the copies that were begun and have not ended."""
        return self.copy_s(self._queued_bytes)

    def close(self) -> None:
        self._pool.shutdown()


def break_even_tokens(costs: EngineCostModel, copier: Copier, bytes_a_token: int, longest: int) -> int | None:
    """Prefixes from this length on are reloaded faster than computed again; none where none is."""
    for length in [1 << i for i in range(longest.bit_length() + 1)]:
        if copier.copy_s(length * bytes_a_token) < costs.predict_s(*costs.work(0, length, 0)):
            return length
    return None
