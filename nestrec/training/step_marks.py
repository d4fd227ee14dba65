"""How far a run has come, step by step, in a small file: what a start that follows a crash says has been lost.

Metrics are written every so many steps and checkpoints more seldom; this is a few bytes a step, and outlives a kill.
"""

import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_ENTRY = struct.Struct("<qd")
_MARKS = 16
"""More saves than can be under way, so that the one that is resumed from is among them."""


@dataclass(frozen=True, slots=True)
class Lost:
    """What was trained and is not in the checkpoint that a run goes on from."""

    steps: int
    seconds: float | None
    """From the step that was saved to the last one; none where that moment is not known any more."""

    def __str__(self) -> str:
        time_of = "" if self.seconds is None else f", {self.seconds:.1f} s of work"
        return f"lost: {self.steps} step{'s' if self.steps > 1 else ''}{time_of}"


class StepMarks:
    """The file of one run, kept by its first rank."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.time):
        self._file, self._clock = file, clock
        self._descriptor: int | None = None
        self._num_marks = 0

    def reached(self, step: int) -> None:
        """A step is over."""
        self._put(0, step)

    def mark(self, step: int) -> None:
        """A step that a later start may go on from: the one that training begins at, or one that is being saved."""
        self._put(1 + self._num_marks % _MARKS, step)
        self._num_marks += 1

    def lost(self, step: int) -> Lost | None:
        """Of what an earlier start has reached, what one that goes on from `step` makes again; none: nothing."""
        if not self._file.exists():
            return None
        content = self._file.read_bytes()
        entries = list(_ENTRY.iter_unpack(content[: len(content) // _ENTRY.size * _ENTRY.size]))
        if not entries or entries[0][0] <= step:
            return None
        last, at_s = entries[0]
        begun = [marked_s for marked, marked_s in entries[1:] if marked == step and marked_s > 0]
        return Lost(last - step, max(0.0, at_s - max(begun)) if begun else None)

    def _put(self, place: int, step: int) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        os.pwrite(self._descriptor, _ENTRY.pack(step, self._clock()), place * _ENTRY.size)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
