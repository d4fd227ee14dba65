"""What a format of input is: options of its own, and how to make a dataset of it.

A new format is a file with a `Format`, and one entry: here in registry.py, or elsewhere an entry point of the group
`nestrec.formats`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nestrec.base.errors import UserError
from nestrec.data.card import Card
from nestrec.data.prepare.folder import whole_folder
from nestrec.data.prepare.options import PrepareOptions
from nestrec.data.prepare.progress import Progress
from nestrec.data.prepare.sequences import write_dataset
from nestrec.data.prepare.source import LogSource

OptionsT = TypeVar("OptionsT", bound=PrepareOptions)


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of input that `nestrec prepare` reads."""

    description: str
    """in a line, for `nestrec formats`"""
    options: type[Any]
    """a config whose fields, all with defaults, are the dotted options of `nestrec prepare FORMAT`"""
    prepare: Callable[[str, Path, Any, Progress], Card]
    """(input, output, options, progress): writes the dataset to the folder `output`, whole or not at all; its card"""
    open: Callable[[Path, Any], LogSource] | None = None
    """(input, options): where the rows of an event log are and what they mean; none: nothing can be appended from it"""


def log_format(description: str, options: type[OptionsT], open: Callable[[Path, OptionsT], LogSource]) -> Format:
    """A format of event logs: `open` says where the rows are and what their columns mean."""

    def prepare(input: str, output: Path, options: OptionsT, progress: Progress) -> Card:
        source = checked_source(open(Path(input), options), description)
        with whole_folder(output, force=options.force) as folder:
            return write_dataset(folder, source, options, progress)

    return Format(description, options, prepare, open)


def checked_source(source: Any, format: str) -> LogSource:
    """What `open` of a format gave, where it is the source of a log."""
    if not isinstance(source, LogSource):
        remedy = f"let `open` of the format return a {LogSource.__module__}.LogSource"
        raise UserError(f"its `open` gives {source!r}", field="nestrec.formats", value=format, remedy=remedy)
    return source
