"""Programs: the stages of a schedule on one rank and the actions of the submitting thread, recorded while it runs.

A program is recorded from the schedule itself by a tracer (`Recorder`), so that schedules are not described a second
time for the simulator. Replays process it in order: a stage waits only for stages before it, as lanes guarantee.

The compute lane is the thread that created the recorder. Operations of other threads belong to the stage whose span
they have opened.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from nestrec.trace import Kind, OpenSpan, Tracer

EventKind = Literal["begin", "end", "work", "submit", "wait"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of a schedule: one span of the trace, and the operations inside it."""

    name: str
    """Name of the span."""
    kind: Kind
    """Kind of the span."""
    lane: str
    """Lane that runs the stage."""
    step: int
    """Training step that the stage belongs to."""
    micro_batch: int | None
    """Index of the micro-batch, if the stage belongs to one."""
    is_collective: bool
    """Whether all ranks take part."""
    operations: tuple[str, ...]
    """Operations of the engine, the model or the dense update, in order."""
    after: tuple[int, ...] = ()
    """Indices of stages that must have ended before this one starts."""


@dataclass(frozen=True, slots=True)
class Event:
    """An action of the submitting thread, which is the compute lane."""

    kind: EventKind
    """Begin or end a step, work on a stage, submit a stage to its lane, or wait for a stage."""
    index: int
    """Index of the stage; for `begin` and `end` the number of the step."""


@dataclass(frozen=True, slots=True)
class Program:
    """Recorded steps of a schedule on one rank, from an empty pipeline to a drained one."""

    schedule: str
    micro_batches: int
    stages: tuple[Stage, ...]
    """Stages in the order in which they are worked on or submitted."""
    events: tuple[Event, ...]
    """Actions of the submitting thread, in order."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the steps."""
        return tuple(event.index for event in self.events if event.kind == "begin")


@dataclass(slots=True)
class _Thread:
    """Open span of a thread, with the waits and operations recorded so far."""

    span: OpenSpan | None = None
    waits: list[int] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)


class _RecordedSpan(OpenSpan):
    """Span that notifies the recorder when it starts and ends."""

    def __enter__(self) -> Self:
        assert isinstance(self.tracer, Recorder)
        self.tracer.span_started(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert isinstance(self.tracer, Recorder)
        self.tracer.span_ended(self)


class Recorder(Tracer):
    """Tracer that records the program of a schedule: the order of operations instead of their times."""

    def __init__(self) -> None:
        super().__init__()
        self._main = threading.get_ident()
        self._local = threading.local()
        self._events: list[tuple[str, int]] = []
        self._stages: dict[int, Stage] = {}

    def new_id(self) -> int:
        """Return a new stage id; schedules call it when they submit a stage."""
        number = super().new_id()
        self._events.append(("submit", number))
        return number

    def span(
        self,
        name: str,
        *,
        kind: Kind = "other",
        lane: str | None = None,
        step: int | None = None,
        micro_batch: int | None = None,
        bytes: int = 0,
        rows: int = 0,
        awaits: int | None = None,
        is_collective: bool = False,
        id: int | None = None,
    ) -> OpenSpan:
        plain = super().span(
            name,
            kind=kind,
            lane=lane,
            step=step,
            micro_batch=micro_batch,
            awaits=awaits,
            is_collective=is_collective,
            id=id,
        )
        return _RecordedSpan(**{key: getattr(plain, key) for key in OpenSpan.__slots__})

    def wait(self, awaits: int | None, *, name: str = "wait") -> OpenSpan:
        """Return a span of a wait; the wait itself is recorded by `depends_on`."""
        return super().span(name, kind="wait", awaits=awaits)

    def depends_on(self, awaited: int) -> None:
        if self._is_main:
            self._events.append(("wait", awaited))
        else:
            self._thread.waits.append(awaited)

    def record_operation(self, operation: str) -> None:
        """Record an operation inside the open span of this thread."""
        self._thread.operations.append(operation)

    def recording(
        self, operation: str, function: Callable[..., Any], suffix_of: Callable[..., str] | None = None
    ) -> Callable[..., Any]:
        """Wrap a function so that every call is recorded.

        Args:
            operation: Name of the operation.
            function: Function to wrap.
            suffix_of: Returns a suffix of the name for the arguments of a call.
        """

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.record_operation(operation + ("" if suffix_of is None else suffix_of(*args, **kwargs)))
            return function(*args, **kwargs)

        return recorded

    def span_started(self, span: OpenSpan) -> None:
        """Record the start of a step, or open a stage on this thread."""
        if span.kind == "step":
            self._events.append(("begin", span.step or 0))
            return
        thread = self._thread
        assert thread.span is None, f"{span.name} inside {thread.span and thread.span.name}: stages do not nest"
        thread.span = span
        thread.operations = []

    def span_ended(self, span: OpenSpan) -> None:
        """Record the end of a step, or close the stage of this thread."""
        if span.kind == "step":
            self._events.append(("end", span.step or 0))
            return
        thread = self._thread
        self._stages[span.id] = Stage(
            name=span.name,
            kind=span.kind,
            lane=span.lane,
            step=span.step or 0,
            micro_batch=span.micro_batch,
            is_collective=span.is_collective,
            operations=tuple(thread.operations) or (span.name,),
            after=tuple(dict.fromkeys(thread.waits)),
        )
        thread.span = None
        thread.waits = []
        if self._is_main:
            self._events.append(("work", span.id))

    def program(self, schedule: str, micro_batches: int) -> Program:
        """Return the program recorded so far. All lanes must have ended."""
        order = [number for kind, number in self._events if kind in ("work", "submit")]
        index = {number: i for i, number in enumerate(order)}
        stages = [self._stages[number] for number in order]
        renumbered = tuple(_renumber(stage, index) for stage in stages)
        events = [
            Event(kind, number if kind in ("begin", "end") else index[number])  # type: ignore[arg-type]
            for kind, number in self._events
        ]
        return Program(schedule, micro_batches, renumbered, tuple(events))

    @property
    def _is_main(self) -> bool:
        return threading.get_ident() == self._main

    @property
    def _thread(self) -> _Thread:
        if not hasattr(self._local, "thread"):
            self._local.thread = _Thread()
        thread: _Thread = self._local.thread
        return thread


def _renumber(stage: Stage, index: dict[int, int]) -> Stage:
    return Stage(
        name=stage.name,
        kind=stage.kind,
        lane=stage.lane,
        step=stage.step,
        micro_batch=stage.micro_batch,
        is_collective=stage.is_collective,
        operations=stage.operations,
        after=tuple(index[number] for number in stage.after),
    )
