"""Errors that a user can act on.

A mistake of the user raises :class:`UserError`, which names the field, the value and the remedy; the command line
prints it without a traceback. `assert` is kept for our own invariants.
"""

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence
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


class UserErrors(UserError):
    """Several mistakes, told at once; `errors` holds each of them."""

    def __init__(self, errors: Sequence[UserError]):
        self.errors = tuple(errors)
        each = "".join("\n- " + str(error).replace("\n", "\n  ") for error in self.errors)
        super().__init__(f"{len(self.errors)} mistakes:{each}")

    def __reduce__(self) -> Any:
        return UserErrors, (self.errors,)


class Mistakes:
    """Gathers errors of parts that do not depend on each other, so that a user need not find them one a try."""

    def __init__(self) -> None:
        self.errors: list[UserError] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """An error inside the block is kept for later, and ends only the block."""
        try:
            yield
        except UserErrors as several:
            self.errors += several.errors
        except UserError as error:
            self.errors.append(error)

    def raise_all(self) -> None:
        """Raise what was noted: one error as it is, several as one."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise UserErrors(self.errors)


class DataError(UserError):
    """Input data that cannot be used as it is."""


class DamagedError(UserError):
    """A file that fails its digest or cannot be parsed: nothing may be read from it."""


class PeerLostError(UserError):
    """Another rank died or stopped answering; every surviving rank raises this within a bounded time."""


class BatchError(UserError):
    """A mistake in one batch that every rank knows of: it ends the step that needs the batch, and no step before."""


class NonFiniteError(UserError):
    """A loss, a gradient or a weight became NaN or infinite."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest known name, or the list of known names when nothing is close."""
    names = sorted(known)
    if not names:
        return "there are none to choose from"
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known names: " + ", ".join(names)
