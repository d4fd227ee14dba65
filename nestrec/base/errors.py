"""Errors that a user can act on.

A mistake of the user raises :class:`UserError`, which names the field, the value and the remedy; the command line
prints it without a traceback. `assert` is kept for our own invariants.
"""

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(Exception):
    """A mistake that the user can mend: what is wrong, where, and what to do about it."""

    def __init__(self, problem: str, *, field: str | None = None, value: Any = None, remedy: str | None = None):
        self.problem, self.field, self.value, self.remedy = problem, field, value, remedy
        super().__init__(self._text())

    def _text(self) -> str:
        where = f"{self.field} = {self.value!r}: " if self.field is not None else ""
        what_to_do = f"\n  remedy: {self.remedy}" if self.remedy else ""
        return f"{where}{self.problem}{what_to_do}"


class DataError(UserError):
    """Input data that cannot be used as it is."""


class DamagedError(UserError):
    """A file that fails its digest or cannot be parsed: nothing may be read from it."""


class PeerLostError(UserError):
    """Another rank died or stopped answering; every surviving rank raises this within a bounded time."""


class NonFiniteError(UserError):
    """A loss or gradient became NaN or infinite."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest known name, or the list of known names when nothing is close."""
    names = sorted(known)
    if not names:
        return "there are none to choose from"
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known names: " + ", ".join(names)
