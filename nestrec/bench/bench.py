"""What a benchmark is: options, a measurement that gives rows, and how they are shown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
More = Mapping[str, Any]
"""What a result file holds beside its rows."""
Shown = str | tuple[str, Sequence[Mapping[str, Any]]]
"""A line, or a table under its title."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A benchmark. `nestrec bench NAME` makes a command of it: options, table, result file.

    The docstring of the module that holds it is the command's help; its first line stands in the list of benches.
    """

    config: type
    """a config whose fields are the options"""
    measure: Callable[[Any], Iterable[Row]]
    """rows, each written into the result file as it comes: a run that is cut keeps what it has. A generator may return
    a mapping: what the result file holds beside its rows, or `hardware` where others than this machine measured"""
    show: Callable[[Sequence[Row], More], Iterable[Shown]] | None = None
    """lines and tables for people; without it, all rows under the bench's name"""
    said: Callable[[Row], str] | None = None
    """a line to print as a row comes"""
    is_emulated: Callable[[Any], bool] = lambda config: False
    """whether some device or link is not real"""
    page: Callable[[Path, Mapping[str, Any]], None] | None = None
    """writes a page from the content of a result file"""
    argument: str | None = None
    """the field that is given by bare words: `nestrec bench quality runs/a runs/b`"""
