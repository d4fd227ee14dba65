"""A program: what a schedule does on one rank, as a list of events of the thread that submits.

It is recorded from the schedule itself (see recorder), so there is no second description of a schedule. Replays walk
through it in order: a stage waits only for stages that stand before it, because lanes promise the same.
"""

from dataclasses import dataclass
from typing import Literal

from nestrec.trace import Kind

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
