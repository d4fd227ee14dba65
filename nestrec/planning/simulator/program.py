"""A program: what a schedule does on one rank, as a list of events of the thread that submits.

It is recorded from the schedule itself (see recorder), so there is no second description of a schedule. Replays walk
through it in order: a stage waits only for stages that stand before it, because lanes promise the same.

Records the program of a schedule while it runs: a tracer that keeps the order of things instead of their times.

The compute lane is the thread that made the recorder. What other threads do belongs to the stage whose span they open.
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
    """A span of the trace to be, and what is done inside it."""

    name: str
    """of its span"""
    kind: Kind
    """of its span"""
    lane: str
    """where it runs"""
    step: int
    """batch that it works for"""
    micro_batch: int | None
    """part of that batch"""
    is_collective: bool
    """all ranks take part"""
    operations: tuple[str, ...]
    """operations of the engine, the model or the dense update, in order"""
    after: tuple[int, ...] = ()
    """stages that must have ended"""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the submitting thread, which is the compute lane, does."""

    kind: EventKind
    """begin or end a step, work on a stage, submit a stage to its lane, wait for a stage"""
    place: int
    """number of the stage; of the step for begin and end"""


@dataclass(frozen=True, slots=True)
class Program:
    """Some steps of a schedule, from an empty pipeline to an empty pipeline."""

    schedule: str
    micro_batches: int
    stages: tuple[Stage, ...]
    """in the order in which they are worked on or submitted"""
    events: tuple[Event, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(event.place for event in self.events if event.kind == "begin")


@dataclass(slots=True)
class _Thread:
    """What a thread is in the middle of."""

    span: OpenSpan | None = None
    waits: list[int] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)


class _RecordedSpan(OpenSpan):
    """Tells the recorder when it begins and ends."""

    def __enter__(self) -> Self:
        assert isinstance(self.tracer, Recorder)
        self.tracer.begun(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert isinstance(self.tracer, Recorder)
        self.tracer.ended(self)


class Recorder(Tracer):
    """Gives schedules what they need of a tracer, and `program` of what they did."""

    def __init__(self) -> None:
        super().__init__()
        self._main = threading.get_ident()
        self._local = threading.local()
        self._events: list[tuple[str, int]] = []
        self._stages: dict[int, Stage] = {}

    def new_id(self) -> int:
        """A stage is being submitted."""
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
        """Kept by `depends_on` already."""
        return super().span(name, kind="wait", awaits=awaits)

    def depends_on(self, awaited: int) -> None:
        if self._is_main:
            self._events.append(("wait", awaited))
        else:
            self._thread.waits.append(awaited)

    def note(self, operation: str) -> None:
        """An operation inside the span that this thread has open."""
        self._thread.operations.append(operation)

    def noting(
        self, operation: str, function: Callable[..., Any], which: Callable[..., str] | None = None
    ) -> Callable[..., Any]:
        """`function`, noted whenever it is called. which: what is added to its name for given arguments."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note(operation + ("" if which is None else which(*args, **kwargs)))
            return function(*args, **kwargs)

        return noted

    def begun(self, span: OpenSpan) -> None:
        if span.kind == "step":
            self._events.append(("begin", span.step or 0))
            return
        thread = self._thread
        assert thread.span is None, f"{span.name} inside {thread.span and thread.span.name}: stages do not nest"
        thread.span = span
        thread.operations = []

    def ended(self, span: OpenSpan) -> None:
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
        """What was done so far; once every lane has ended."""
        order = [number for kind, number in self._events if kind in ("work", "submit")]
        place = {number: i for i, number in enumerate(order)}
        stages = [self._stages[number] for number in order]
        renumbered = tuple(_with_places(stage, place) for stage in stages)
        events = [
            Event(kind, number if kind in ("begin", "end") else place[number])  # type: ignore[arg-type]
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


def _with_places(stage: Stage, place: dict[int, int]) -> Stage:
    return Stage(
        name=stage.name,
        kind=stage.kind,
        lane=stage.lane,
        step=stage.step,
        micro_batch=stage.micro_batch,
        is_collective=stage.is_collective,
        operations=stage.operations,
        after=tuple(place[number] for number in stage.after),
    )
