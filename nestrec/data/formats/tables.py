"""Tables of items or users beside a log: which of their columns become features, and of which kind."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from nestrec.base.config import config
from nestrec.base.errors import DataError, Mistakes, did_you_mean
from nestrec.data.prepare.files import LogFiles, column_names, find_files
from nestrec.data.prepare.parse import BAD, BLANK, parse_numbers
from nestrec.data.prepare.raw import Delimited, RawBatch
from nestrec.data.prepare.side import SideColumn, SideKind, SideSource

_WORDS_OF_TEXT = ("title", "name", "description", "text", "url")


@config
class TableColumns:
    """The columns of a table. Those that are named nowhere are told by their names and first rows."""

    key: str = ""
    """Column of the id; by default of the name that it has in the log."""
    categories: tuple[str, ...] = ()
    """Columns with one value of a few, such as a brand."""
    lists: tuple[str, ...] = ()
    """Columns with several such values in a cell."""
    list_separator: str = ","
    """Character between the values of such a cell."""
    numbers: tuple[str, ...] = ()
    """Columns of numbers, such as a price: models read the range, of equally many rows, in which one lies."""
    texts: tuple[str, ...] = ()
    """Columns for people, such as a title."""
    left_out: tuple[str, ...] = ()
    """Columns that are not taken over; without this, a column that is named nowhere is guessed by name and content."""

    def kinds(self) -> dict[str, SideKind]:
        """Kind of each column that is named."""
        named: tuple[tuple[tuple[str, ...], SideKind], ...] = (
            (self.categories, "category"),
            (self.lists, "categories"),
            (self.numbers, "range"),
            (self.texts, "text"),
        )
        return {name: kind for names, kind in named for name in names}


def open_table(path: Path, key: str, columns: TableColumns, how: Delimited, what: str) -> SideSource:
    """`what` is the option that names the table, for messages."""
    _, files = find_files(path)
    names = column_names(files[0], how)
    _check(names, key, columns, files[0], what)
    wanted = [name for name in names if name != key and name not in columns.left_out]

    def batches() -> Iterator[RawBatch]:
        reader = LogFiles(how, [key, *wanted])
        for file in files:
            yield from reader.read(file)

    first = next(batches(), None)
    named = columns.kinds()
    told = {} if first is None else {n: _told(n, first.columns[n]) for n in wanted if n not in named}
    kinds = {name: named.get(name) or told.get(name, "category") for name in wanted}
    sides = tuple(
        SideColumn(name, kind, separator="," if _is_list(first, name) else columns.list_separator)
        for name, kind in kinds.items()
    )
    return SideSource(batches, key, sides, must_match=f"--{what} {path}")


def _check(names: tuple[str, ...], key: str, columns: TableColumns, file: Path, what: str) -> None:
    option = f"{what.removesuffix('s')}_columns"
    mistakes = Mistakes()
    wanted = {
        "key": (key,),
        "left_out": columns.left_out,
        "categories": columns.categories,
        "lists": columns.lists,
        "numbers": columns.numbers,
        "texts": columns.texts,
    }
    for field, chosen in wanted.items():
        for name in chosen:
            with mistakes.noted():
                if name not in names:
                    raise DataError(
                        f"is no column of {file.name}",
                        field=f"{option}.{field}",
                        value=name,
                        remedy=did_you_mean(name, names),
                    )
    mistakes.raise_all()


def _told(name: str, column: pa.Array) -> SideKind:
    """Of a column that nobody has named: ids are categories though they are numbers, titles are for people."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return "categories"
    word = name.lower()
    if any(part in word for part in _WORDS_OF_TEXT):
        return "text"
    if word.endswith("id") or pa.types.is_boolean(column.type):
        return "category"
    _, states = parse_numbers(column)
    has_numbers = bool(np.any(states != BLANK)) and not bool(np.any(states == BAD))
    return "range" if has_numbers else "category"


def _is_list(first: RawBatch | None, name: str) -> bool:
    return first is not None and pa.types.is_nested(first.columns[name].type)
