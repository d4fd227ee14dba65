"""Lanes: each runs its tasks one after another on a thread of its own, and hands out tickets to wait on.

A task waits only for tickets of tasks that were submitted before it. So the oldest unfinished task of all lanes is
always free to run, and lanes cannot wait for each other in a circle, whatever the timing. All collectives are
submitted to one lane, in program order of the one thread that submits: that is the "order of collectives".

The device side of a lane is a stream and events on CUDA, nothing on a CPU. On a CPU a thread's work is done when it
goes on; on CUDA it has only been launched. Events make up for it: whoever submits a task leaves one behind what it has
launched so far, and whoever waits for a ticket waits for the lane's.
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

_ABANDON_S = 10.0
"""How long a failed run waits for what a lane is doing: an exchange may wait for a peer that does not answer."""
_STEPS_AHEAD = 2
_STEPS_KEPT = 8
"""Batches are begun up to five steps before theirs, and the host may be two steps ahead of the device."""


def launched(device: torch.device) -> torch.cuda.Event | None:
    """An event behind all that this thread has launched into its current stream."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(event: torch.cuda.Event | None) -> None:
    """What this thread launches next comes after the event; the host does not wait."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def is_over(event: torch.cuda.Event | None) -> bool:
    """Whether the device has passed the event."""
    return event is None or event.query()


@contextlib.contextmanager
def own_stream(device: torch.device, *, is_urgent: bool = False) -> Iterator[None]:
    """Inside the block, this thread launches into a stream of its own; what is urgent gets room on the device first."""
    if device.type != "cuda":
        yield
        return
    if device.index is not None:  # without one, a new thread is on the first device, which is the only one then
        torch.cuda.set_device(device)
    with on_stream(side_stream(device, is_urgent=is_urgent)):
        yield


class RunAheadLimiter:
    """Lets the host be two steps ahead of the device, and keeps what steps use until the device is done with it.

    The allocator gives the memory of a dropped tensor back to the stream that made the tensor, even while a kernel of
    another stream still reads it. So everything that a lane hands over is kept here: `Lane.submit` keeps the ticket of
    each task, and with it the result, for more steps than any lane can lag behind. On a CPU nothing needs to be kept.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._now: list[object] = []
        self._kept: deque[list[object]] = deque(maxlen=_STEPS_KEPT)
        self._ends: deque[torch.cuda.Event] = deque()

    def keep(self, used: object) -> None:
        """Keep something that this step or one of the next three uses."""
        if self.device.type == "cuda":
            self._now.append(used)

    def end_step(self) -> None:
        end = launched(self.device)
        if end is None:
            return
        self._ends.append(end)
        if len(self._ends) > _STEPS_AHEAD:
            self._ends.popleft().synchronize()
        self._kept.append(self._now)
        self._now = []


T = TypeVar("T")

LANES = ("compute", "transfer", "communication", "lookup")


def make_tracer(device: torch.device, *, rank: int = 0) -> Tracer:
    """A tracer that tells the time of the device on which the lanes work."""
    return DeviceTracer(device, lanes=LANES, rank=rank) if device.type == "cuda" else Tracer(rank=rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """What a task is called in the trace."""

    name: str
    kind: Kind
    step: int
    micro_batch: int | None = None
    is_collective: bool = False


class Future(Generic[T]):
    """The result of a task, when it is there."""

    def __init__(self, tracer: Tracer, span_id: int) -> None:
        self._tracer = tracer
        self._span_id = span_id
        self._done = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._ready: torch.cuda.Event | None = None

    def wait(self) -> T:
        """The result, or the error of the task. On a GPU the host waits for the launch, the device for the result."""
        self._tracer.depends_on(self._span_id)
        if not self._done.is_set() or not is_over(self._ready):
            with self._tracer.wait(self._span_id):
                self._done.wait()
                wait_for(self._ready)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def succeed(self, value: T, ready: torch.cuda.Event | None) -> None:
        self._value = value
        self._ready = ready
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()


Task = Callable[[OpenSpan], T]


@dataclass(frozen=True, slots=True)
class _Entry:
    task: Task[Any]
    label: Label
    after: tuple[FutureLike[Any], ...]
    ticket: Future[Any]
    span_id: int
    launched: torch.cuda.Event | None
    """Behind what the submitter had launched: on a device, too, a task comes after it."""


class Lane:
    """Runs tasks in order. After an error it runs no more of them: all later tickets carry the same error.

    A mistake in one batch ends only what needs that batch. Every rank knows of it, so all leave out the same tasks.
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
        """Run `task(span)` once the lane's earlier tasks and what is in `after` are done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"nestrec-{self.name}", daemon=True)
            self._thread.start()
        span_id = self._tracer.new_id()
        ticket: Future[T] = Future(self._tracer, span_id)
        self._run_ahead.keep(ticket)
        self._entries.put(_Entry(task, label, tuple(after), ticket, span_id, launched(self._device)))
        return ticket

    def close(self) -> None:
        """End the thread; tasks already submitted are run first."""
        if self._thread is not None:
            self._entries.put(None)
            self._thread.join()
            self._thread = None

    def abandon(self, error: BaseException) -> None:
        """End the thread after the task that it runs; tickets of all later ones carry the error."""
        self._error = self._error or error
        if self._thread is not None:
            self._entries.put(None)
            self._thread.join(_ABANDON_S)
            self._thread = None

    def _run(self) -> None:
        try:
            with own_stream(self._device, is_urgent=self._is_urgent):
                self._serve()
        except BaseException as error:  # no stream: whoever waits is told
            self._error = error
            self._serve()

    def _serve(self) -> None:
        while (entry := self._entries.get()) is not None:
            if self._error is None:
                try:
                    self._run_one(entry)
                except BatchError as error:
                    entry.ticket.fail(error)
                except BaseException as error:
                    self._error = error
                    entry.ticket.fail(error)
            else:
                entry.ticket.fail(self._error)

    def _run_one(self, entry: _Entry) -> None:
        label = entry.label
        with self._tracer.context(lane=self.name, step=label.step, micro_batch=label.micro_batch):
            wait_for(entry.launched)
            for earlier in entry.after:
                earlier.wait()
            span = self._tracer.span(label.name, kind=label.kind, is_collective=label.is_collective, id=entry.span_id)
            with span:
                value = entry.task(span)
            entry.ticket.succeed(value, launched(self._device))


class Lanes:
    """The lanes of a rank beside its compute lane, which is the caller's own thread."""

    def __init__(self, tracer: Tracer, run_ahead: RunAheadLimiter) -> None:
        self.transfer = Lane("transfer", tracer, run_ahead)
        """Samples to the device, keys deduplicated (stage 2)."""
        # Its kernels are short and others wait for them; behind large matrix products each would cost a long wait.
        self.communication = Lane("communication", tracer, run_ahead, is_urgent=True)
        """Every collective (stage 3 and the exchanges of stage 5)."""
        self.lookup = Lane("lookup", tracer, run_ahead)
        """Stores: write-backs and fetches, in order of submission (stage 4)."""
        self._all = (self.transfer, self.communication, self.lookup)

    def drain(self) -> None:
        """Wait until every lane has run all that was submitted."""
        for lane in self._all:
            lane.submit(lambda span: None, Label(name="drain", kind="other", step=0)).wait()

    def close(self) -> None:
        for lane in self._all:
            lane.close()

    def abandon(self, error: BaseException) -> None:
        """End the threads of a run that has failed."""
        for lane in self._all:
            if isinstance(error, BatchError):  # every rank has it at the same place: none would wait for another
                lane.close()
            else:
                lane.abandon(error)
