"""Errors that a user can act on.

A mistake of the user raises :class:`UserError`, which names the field, the value and the remedy; the command line
prints it without a traceback. `assert` is kept for our own invariants.

What a process tells its launcher when it ends.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_LONGEST_VALUE = 2_000
"""Characters of a value that an error contains."""


class UserError(Exception):
    """A mistake that the user can mend: what is wrong, where, and what to do about it."""

    def __init__(self, problem: str, *, field: str | None = None, value: Any = None, remedy: str | None = None):
        self.problem = problem
        self.field = field
        self.value = value
        self.remedy = remedy
        super().__init__(self._text())

    def add_to_problem(self, text: str) -> None:
        """Extend the problem with something that only the caller knows."""
        self.problem += text
        self.args = (self._text(),)

    def _text(self) -> str:
        where = f"{self.field} = {_shown(self.value)}: " if self.field is not None else ""
        what_to_do = f"\n  remedy: {self.remedy}" if self.remedy else ""
        return f"{where}{self.problem}{what_to_do}"

    def name_arguments(self) -> None:
        """Name options as a Python call does: `training.epochs` and `output` instead of --training.epochs, --output.

        Whole command lines, such as `nestrec prepare log ... --log.time ts`, stay as they are.
        """
        self.problem = _as_arguments(self.problem)
        self.field = None if self.field is None else _as_arguments(str(self.field))
        self.remedy = None if self.remedy is None else _as_arguments(str(self.remedy))
        self.args = (self._text(),)


def _shown(value: Any) -> str:
    """Return a value as an error contains it: a table or an array by the name of its class."""
    text = repr(value)
    if "\n" in text:
        return f"a value of the class {type(value).__module__}.{type(value).__qualname__}"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


class UserErrorGroup(UserError):
    """Several mistakes, told at once; `errors` holds each of them."""

    def __init__(self, errors: Sequence[UserError]):
        self.errors = tuple(errors)
        super().__init__(self._problem())

    def _problem(self) -> str:
        each = "".join("\n- " + str(error).replace("\n", "\n  ") for error in self.errors)
        return f"{len(self.errors)} mistakes:{each}"

    def name_arguments(self) -> None:
        for error in self.errors:
            error.name_arguments()
        self.problem = self._problem()
        self.args = (self.problem,)

    def __reduce__(self) -> Any:
        return UserErrorGroup, (self.errors,)


class ErrorCollector:
    """Gathers errors of parts that do not depend on each other, so that a user need not find them one a try."""

    def __init__(self) -> None:
        self.errors: list[UserError] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """An error inside the block is kept for later, and ends only the block."""
        try:
            yield
        except UserErrorGroup as several:
            self.errors += several.errors
        except UserError as error:
            self.errors.append(error)

    def add(
        self,
        problem: str,
        *,
        field: str | None = None,
        value: Any = None,
        remedy: str | None = None,
        error: type[UserError] = UserError,
    ) -> None:
        """Keep an error of the class `error` for later."""
        self.errors.append(error(problem, field=field, value=value, remedy=remedy))

    def raise_all(self) -> None:
        """Raise what was noted: one error as it is, several as one."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise UserErrorGroup(self.errors)


def require(
    condition: object,
    problem: str,
    *,
    field: str | None = None,
    value: Any = None,
    remedy: str | None = None,
    error: type[UserError] = UserError,
) -> None:
    """Raise an error of the class `error` if the condition is false.

    The texts are built in either case. Write `if ...: raise UserError(...)` instead if building them is expensive or
    fails when the condition holds, in a loop over many values, and where mypy has to narrow a type by the condition.
    """
    if not condition:
        raise error(problem, field=field, value=value, remedy=remedy)


class DataError(UserError):
    """Input data that cannot be used as it is."""


class CorruptFileError(UserError):
    """A file that fails its digest or cannot be parsed: nothing may be read from it."""


class PeerLostError(UserError):
    """Another rank died or stopped answering; every surviving rank raises this within a bounded time."""


class BatchError(UserError):
    """A mistake in one batch that every rank knows of: it ends the step that needs the batch, and no step before."""


class NonFiniteError(UserError):
    """A loss, a gradient or a weight became NaN or infinite."""


_OPTION = re.compile(r"(?P<command>nestrec [^`;()]*)|(?<![\w-])(?P<option>--[a-z][\w.-]*)")
_ARGUMENTS = {"--from": "start_from", "--last": "best=False", "--force": "force=True"}
"""Options of commands that are other arguments in Python."""


def _as_arguments(text: str) -> str:
    def argument(found: re.Match[str]) -> str:
        option = found["option"]
        return found["command"] if option is None else _ARGUMENTS.get(option, option.removeprefix("--"))

    return _OPTION.sub(argument, text)


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest known name, or the list of known names when nothing is close."""
    names = sorted(known)
    if not names:
        return "there are none to choose from"
    import difflib  # only when something is wrong: importing the package must stay quick

    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known names: " + ", ".join(names)


USER_ERROR = 2
"""A mistake of the user; the message is on standard error."""
NON_FINITE = 70
"""The loss became NaN or infinite; the last checkpoint is intact."""
INTERRUPTED = 75
"""SIGTERM or SIGINT: a checkpoint was written and the run can be resumed (as sysexits' EX_TEMPFAIL: try again)."""
PEER_LOST = 76
"""Another rank died; restart from the last checkpoint."""
ENGINE_LOST = 77
"""An engine of `nestrec serve` cannot continue; start the server again."""
