"""Exceptions for mistakes that a user can correct, and the exit codes of the commands.

A mistake of the user raises :class:`UserError`, which names the option, the value and the fix. The command line prints
it without a traceback. `assert` is reserved for internal invariants.
"""

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

_LONGEST_VALUE = 2_000
"""Maximum number of characters of a value in an error message."""


class UserError(Exception):
    """A mistake that the user can correct.

    The message reads `OPTION=VALUE: PROBLEM. REMEDY.`:

        >>> print(UserError("no such column in events.csv", option="log.user", value="uid", remedy="columns: id, ts"))
        log.user=uid: no such column in events.csv. Columns: id, ts.

    Args:
        problem: What is wrong, as a sentence or a noun phrase without a final period.
        option: Name of the option, argument or file that is wrong.
        value: Its value. Tables and arrays are shown by their class only.
        remedy: What to do, as an imperative sentence without a final period.
    """

    def __init__(self, problem: str, *, option: str | None = None, value: Any = None, remedy: str | None = None):
        self.problem = problem
        self.option = option
        self.value = value
        self.remedy = remedy
        super().__init__(self._text())

    def add_to_problem(self, text: str) -> None:
        """Append details that only the caller knows to the problem."""
        self.problem += text
        self.args = (self._text(),)

    @property
    def message(self) -> str:
        """The message without the remedy."""
        if self.option is None:
            return as_sentence(self.problem)
        return with_period(f"{self.option}={_shown(self.value)}: {self.problem}")

    def _text(self) -> str:
        return f"{self.message} {as_sentence(self.remedy)}" if self.remedy else self.message

    def name_arguments(self) -> None:
        """Name options as a Python call does: `training.epochs` and `output` instead of --training.epochs, --output.

        Whole command lines, such as `nestrec prepare log ... --log.time ts`, are not changed.
        """
        self.problem = _as_arguments(self.problem)
        self.option = None if self.option is None else _as_arguments(str(self.option))
        self.remedy = None if self.remedy is None else _as_arguments(str(self.remedy))
        self.args = (self._text(),)

    def name_options(self, words: Sequence[str], options: Collection[str] = ()) -> None:
        """Name options as they are typed on the command line: `--training.epochs` instead of `training.epochs`.

        Args:
            words: The words of the command line; an undotted name is an option if it was typed as one.
            options: Undotted names of other options of the command, without hyphens.
        """
        if self.option is not None and (self.option in options or _is_typed_option(self.option, words)):
            self.option = f"--{self.option}"
            self.args = (self._text(),)


_FILE_SUFFIXES = ("csv", "json", "jsonl", "md", "parquet", "safetensors", "toml", "txt", "yaml")
_DOTTED = re.compile(r"[a-z]\w*(\.\w+)+")


def _is_typed_option(name: str, words: Sequence[str]) -> bool:
    if _DOTTED.fullmatch(name):
        return name.rpartition(".")[2] not in _FILE_SUFFIXES
    typed = {word.partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    return f"__{name.replace('-', '_')}" in typed


_PROGRAMS = ("nestrec", "pip", "torchrun")
"""First words of a remedy that is a command line."""


def with_period(text: str) -> str:
    """Return text that ends with a punctuation mark."""
    return text if text.rstrip().endswith((".", "?", "!", ":")) else f"{text}."


def as_sentence(text: str) -> str:
    """Return text with a final period and, unless it begins with a name, a capital letter."""
    first = text.split(maxsplit=1)[0] if text.strip() else ""
    is_word = first.rstrip(",:;").isalpha() and first.islower() and first not in _PROGRAMS
    return with_period(text[:1].upper() + text[1:] if is_word else text)


def _shown(value: Any) -> str:
    """Return a value as an error message contains it."""
    if isinstance(value, str) and value and value.isprintable() and value == value.strip():
        text = value
    else:
        text = repr(value)
    if "\n" in text:
        return f"a value of the class {type(value).__module__}.{type(value).__qualname__}"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


class UserErrorGroup(UserError):
    """Several mistakes that were found together.

    Attributes:
        errors: The individual errors.
    """

    def __init__(self, errors: Sequence[UserError]):
        self.errors = tuple(errors)
        super().__init__(self._problem())

    def _text(self) -> str:
        return self.problem

    def _problem(self) -> str:
        each = "".join("\n- " + str(error).replace("\n", "\n  ") for error in self.errors)
        return f"{len(self.errors)} mistakes:{each}"

    def name_arguments(self) -> None:
        """Call `name_arguments` of each error."""
        for error in self.errors:
            error.name_arguments()
        self._refresh()

    def name_options(self, words: Sequence[str], options: Collection[str] = ()) -> None:
        """Call `name_options` of each error."""
        for error in self.errors:
            error.name_options(words, options)
        self._refresh()

    def _refresh(self) -> None:
        self.problem = self._problem()
        self.args = (self.problem,)

    def __reduce__(self) -> Any:
        return UserErrorGroup, (self.errors,)


class ErrorCollector:
    """Collects independent errors, so that the user sees all of them at once."""

    def __init__(self) -> None:
        self.errors: list[UserError] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect a `UserError` that the block raises; it ends the block only."""
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
        option: str | None = None,
        value: Any = None,
        remedy: str | None = None,
        error: type[UserError] = UserError,
    ) -> None:
        """Add an error of the class `error`; see `UserError` for the other arguments."""
        self.errors.append(error(problem, option=option, value=value, remedy=remedy))

    def raise_if_any(self) -> None:
        """Raise the collected errors: a single one itself, several as a `UserErrorGroup`."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise UserErrorGroup(self.errors)


def require(
    condition: object,
    problem: str,
    *,
    option: str | None = None,
    value: Any = None,
    remedy: str | None = None,
    error: type[UserError] = UserError,
) -> None:
    """Raise an error of the class `error` if the condition is false.

    The texts are built in either case. Write `if ...: raise UserError(...)` instead if building them is expensive or
    fails when the condition holds, in a loop over many values, and where mypy has to narrow a type by the condition.
    """
    if not condition:
        raise error(problem, option=option, value=value, remedy=remedy)


class DataError(UserError):
    """The input data is invalid."""


class CorruptFileError(UserError):
    """A file does not match its digest or cannot be parsed; none of its content may be used."""


class PeerLostError(UserError):
    """Another rank died or stopped responding; every surviving rank raises this within a bounded time."""


class BatchError(UserError):
    """One batch is invalid on all ranks; the step that needs it fails, earlier steps complete."""


class NonFiniteError(UserError):
    """A loss, gradient or weight became NaN or infinite."""


_OPTION = re.compile(r"(?P<command>nestrec [^`;()]*)|(?<![\w-])(?P<option>--[a-z][\w.-]*)")
_ARGUMENTS = {"--warm-start": "warm_start", "--last": "best=False", "--force": "force=True"}
"""Options of commands that are other arguments in Python."""


def _as_arguments(text: str) -> str:
    def argument(found: re.Match[str]) -> str:
        option = found["option"]
        return found["command"] if option is None else _ARGUMENTS.get(option, option.removeprefix("--"))

    return _OPTION.sub(argument, text)


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return a remedy for a misspelled name: `did you mean 'x'?`, or the list of known names if none is similar."""
    names = sorted(known)
    if not names:
        return "no names are available"
    import difflib  # only in case of an error: importing the package must stay fast

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
