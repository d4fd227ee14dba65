"""Lanes: single-thread executors with a CUDA stream each. `Lane.submit` runs a task and returns a `Future`.

A lane runs its tasks in order. A task waits only for futures of tasks that were submitted before it, so the oldest
unfinished task of all lanes can always run: lanes cannot deadlock, whatever the timing. All collectives are submitted
to one lane, in program order of the one thread that submits, so every rank runs them in the same order.

On CUDA, a lane has its own stream. Work is only launched when a task ends, so events order it on the device: `submit`
records an event after the work that the submitting thread has launched so far, and the task waits for it; `result`
waits for an event after the work of the task. On a CPU, work is complete when the task ends.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from nestrec.base.cuda import on_stream, side_stream
from nestrec.base.errors import BatchError
from nestrec.base.thread_team import FutureLike
from nestrec.trace import DeviceTracer, Kind, OpenSpan, Tracer

_ABORT_TIMEOUT_S = 10.0
"""Seconds that a failed run waits for the current task of a lane: an exchange may wait for a peer that is not
responding."""
_STEPS_AHEAD = 2
_STEPS_KEPT = 8
"""Number of steps for which results of tasks are kept alive: batches are started up to five steps ahead, and the host
can be two steps ahead of the device."""


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record and return an event after all work that this thread has launched on its current stream; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(event: torch.cuda.Event | None) -> None:
    """Make later work on the current stream wait for the event; the host does not wait."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def has_passed(event: torch.cuda.Event | None) -> bool:
    """Return whether the work before the event is complete."""
    return event is None or event.query()


@contextlib.contextmanager
def own_stream(device: torch.device, *, is_urgent: bool = False) -> Iterator[None]:
    """Use a new CUDA stream inside the block, with high priority if `is_urgent`."""
    if device.type != "cuda":
        yield
        return
    if device.index is not None:  # without an index there is only one device, which new threads use by default
        torch.cuda.set_device(device)
    with on_stream(side_stream(device, is_urgent=is_urgent)):
        yield


class RunAheadLimiter:
    """Limits the host to two steps ahead of the device, and keeps task results alive until the device has used them.

    The CUDA caching allocator returns the memory of a freed tensor to the stream that allocated it, even while a kernel
    on another stream still reads it. Therefore `Lane.submit` passes the future of each task, and with it the result, to
    `keep_alive`, which references it for more steps than any lane can lag. On a CPU, nothing needs to be kept alive.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._current_step: list[object] = []
        self._recent_steps: deque[list[object]] = deque(maxlen=_STEPS_KEPT)
        self._ends: deque[torch.cuda.Event] = deque()

    def keep_alive(self, used: object) -> None:
        """Reference an object that this step or one of the next steps uses."""
        if self.device.type == "cuda":
            self._current_step.append(used)

    def end_step(self) -> None:
        """Wait until the host is at most two steps ahead of the device, and release objects of old steps."""
        end = record_event(self.device)
        if end is None:
            return
        self._ends.append(end)
        if len(self._ends) > _STEPS_AHEAD:
            self._ends.popleft().synchronize()
        self._recent_steps.append(self._current_step)
        self._current_step = []


T = TypeVar("T")

LANES = ("compute", "transfer", "communication", "lookup")


def make_tracer(device: torch.device, *, rank: int = 0) -> Tracer:
    """Return a tracer that measures device time on CUDA, and host time on a CPU."""
    return DeviceTracer(device, lanes=LANES, rank=rank) if device.type == "cuda" else Tracer(rank=rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """Name and attributes of a task in the trace."""

    name: str
    kind: Kind
    step: int
    micro_batch: int | None = None
    is_collective: bool = False


class Future(Generic[T]):
    """The result of a task that runs on a lane."""

    def __init__(self, tracer: Tracer, span_id: int) -> None:
        self._tracer = tracer
        self._span_id = span_id
        self._done = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._ready: torch.cuda.Event | None = None

    def result(self) -> T:
        """Return the result, or raise the error of the task.

        On a GPU, the host waits until the task is launched, and the current stream waits until it is complete.
        """
        self._tracer.depends_on(self._span_id)
        if not self._done.is_set() or not has_passed(self._ready):
            with self._tracer.wait(self._span_id):
                self._done.wait()
                wait_for(self._ready)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def set_result(self, value: T, ready: torch.cuda.Event | None) -> None:
        self._value = value
        self._ready = ready
        self._done.set()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._done.set()


Task = Callable[[OpenSpan], T]


@dataclass(frozen=True, slots=True)
class _Entry:
    task: Task[Any]
    label: Label
    after: tuple[FutureLike[Any], ...]
    future: Future[Any]
    span_id: int
    launched: torch.cuda.Event | None
    """Event after the work that the submitting thread had launched; the task waits for it on the device."""


class Lane:
    """Executor with one thread that runs tasks in order.

    After an error, the lane does not run further tasks, and their futures raise the same error. A `BatchError` is an
    exception: it ends only the tasks that depend on the batch. Every rank raises it, so all skip the same tasks.

    Args:
        name: Name of the lane in traces.
        tracer: Tracer of the tasks.
        run_ahead: Limiter that keeps results alive.
        is_urgent: Whether the CUDA stream of the lane has high priority.
    """

    def __init__(self, name: str, tracer: Tracer, run_ahead: RunAheadLimiter, *, is_urgent: bool = False) -> None:
        self.name = name
        self._tracer = tracer
        self._run_ahead = run_ahead
        self._device = run_ahead.device
        self._is_urgent = is_urgent
        self._entries: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, task: Task[T], label: Label, after: Iterable[FutureLike[Any]] = ()) -> Future[T]:
        """Submit a task.

        Args:
            task: Function of the trace span of the task; it runs after the earlier tasks of the lane.
            label: Name of the task in the trace.
            after: Futures that must be complete before the task runs.

        Returns:
            The future of the task's result.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"nestrec-{self.name}", daemon=True)
            self._thread.start()
        span_id = self._tracer.new_id()
        future: Future[T] = Future(self._tracer, span_id)
        self._run_ahead.keep_alive(future)
        self._entries.put(_Entry(task, label, tuple(after), future, span_id, record_event(self._device)))
        return future

    def close(self) -> None:
        """Run the submitted tasks, then end the thread."""
        if self._thread is not None:
            self._entries.put(None)
            self._thread.join()
            self._thread = None

    def abort(self, error: BaseException) -> None:
        """End the thread after its current task; the futures of later tasks raise `error`."""
        self._error = self._error or error
        if self._thread is not None:
            self._entries.put(None)
            self._thread.join(_ABORT_TIMEOUT_S)
            self._thread = None

    def _run(self) -> None:
        try:
            with own_stream(self._device, is_urgent=self._is_urgent):
                self._serve()
        except BaseException as error:  # the stream could not be created: fail the futures
            self._error = error
            self._serve()

    def _serve(self) -> None:
        while (entry := self._entries.get()) is not None:
            if self._error is None:
                try:
                    self._run_one(entry)
                except BatchError as error:
                    entry.future.set_exception(error)
                except BaseException as error:
                    self._error = error
                    entry.future.set_exception(error)
            else:
                entry.future.set_exception(self._error)

    def _run_one(self, entry: _Entry) -> None:
        label = entry.label
        with self._tracer.context(lane=self.name, step=label.step, micro_batch=label.micro_batch):
            wait_for(entry.launched)
            for earlier in entry.after:
                earlier.result()
            span = self._tracer.span(label.name, kind=label.kind, is_collective=label.is_collective, id=entry.span_id)
            with span:
                value = entry.task(span)
            entry.future.set_result(value, record_event(self._device))


class Lanes:
    """The lanes of a rank, except the compute lane, which is the caller's thread."""

    def __init__(self, tracer: Tracer, run_ahead: RunAheadLimiter) -> None:
        self.transfer = Lane("transfer", tracer, run_ahead)
        """Copies samples to the device and deduplicates keys (stage 2)."""
        # High priority: its kernels are short and other lanes wait for them, so they must not queue after large
        # matrix products.
        self.communication = Lane("communication", tracer, run_ahead, is_urgent=True)
        """Runs every collective (stage 3 and the exchanges of stage 5)."""
        self.lookup = Lane("lookup", tracer, run_ahead)
        """Reads and writes the stores: fetches and write-backs, in order of submission (stage 4)."""
        self._all = (self.transfer, self.communication, self.lookup)

    def drain(self) -> None:
        """Wait until every lane has run all submitted tasks."""
        for lane in self._all:
            lane.submit(lambda span: None, Label(name="drain", kind="other", step=0)).result()

    def close(self) -> None:
        for lane in self._all:
            lane.close()

    def abort(self, error: BaseException) -> None:
        """End the threads of a run that has failed."""
        for lane in self._all:
            if isinstance(error, BatchError):  # every rank raises it at the same step, so no collective can hang
                lane.close()
            else:
                lane.abort(error)
