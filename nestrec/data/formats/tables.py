"""Tables of items or users beside a log: which of their columns become features, and of which kind."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nestrec.base.bounds import Count
from nestrec.base.config import config
from nestrec.base.errors import DataError, Mistakes, UserError, did_you_mean
from nestrec.data.card import Owner
from nestrec.data.prepare.features.cells import MARK, has_marks, vectors, with_marks
from nestrec.data.prepare.files import LogFiles, column_names, find_files, notes_on_skipped
from nestrec.data.prepare.options import HashingConfig, NumberTransform, check_separator
from nestrec.data.prepare.parse import BAD, BLANK, parse_numbers
from nestrec.data.prepare.raw import Delimited, RawBatch
from nestrec.data.prepare.side import SideColumn, SideKind, SideSource
from nestrec.data.schema import COUNTS_SUFFIX

_WORDS_OF_TEXT = ("title", "name", "description", "text")
_WORDS_FOR_PEOPLE = ("url", "link", "image")
_OF_IDS = ("id", "key")
"""Names of features that the columns `item_id`, `item_key`, `user_id` and `user_key` leave no room for."""


@config
class TableColumns:
    """The columns of a table. Those that are named nowhere are told by their names and first rows."""

    key: str = ""
    """Column of the id; by default of the name that it has in the log."""
    separator: str = ""
    """Between the fields of a table that is text: one ASCII character, `\\t` or `::`; that of the log by default."""
    categories: tuple[str, ...] = ()
    """Columns with one value of a few, such as a brand."""
    lists: tuple[str, ...] = ()
    """Columns with several such values in a cell: lists of Parquet or JSON, or text with a separator or as
    ["a", "b"]."""
    list_separator: str = ","
    """Character between the values of such a text, or between the numbers of a vector that is text."""
    numbers: tuple[str, ...] = ()
    """Columns of numbers, such as a price."""
    transforms: Mapping[str, NumberTransform] = field(default_factory=dict)
    """Number to what models read of it: quantiles (the bucket in which it lies, where nothing is said), standard, log
    or none: age=standard,price=log."""
    num_buckets: Count = 16
    """Buckets of a number by quantiles, with about equally many rows of the training part each."""
    texts: tuple[str, ...] = ()
    """Columns of free text, such as a title: kept for people, and for models as hashed words and pieces of
    words (`<name>_bag`)."""
    labels: tuple[str, ...] = ()
    """Columns of text for people alone, such as the address of a picture."""
    hashing: HashingConfig = HashingConfig()
    """How texts become ids."""
    vectors: tuple[str, ...] = ()
    """Columns with a vector in a cell, such as an embedding of a picture: a list of numbers."""
    left_out: tuple[str, ...] = ()
    """Columns that are not taken over; without this, a column that is named nowhere is guessed by name and content."""

    def __post_init__(self) -> None:
        if self.separator:
            check_separator(self.separator, "separator")
        for name in self.transforms:
            if name not in self.numbers:
                remedy = did_you_mean(name, self.numbers) if self.numbers else "name it among the numbers as well"
                raise UserError("is not named as a number", field="transforms", value=name, remedy=remedy)

    def kinds(self) -> dict[str, SideKind]:
        """Kind of each column that is named."""
        named: tuple[tuple[tuple[str, ...], SideKind], ...] = (
            (self.categories, "category"),
            (self.lists, "categories"),
            (self.numbers, "range"),
            (self.texts, "bag"),
            (self.labels, "text"),
            (self.vectors, "vector"),
        )
        return {name: kind for names, kind in named for name in names}

    def sides(self, kinds: Mapping[str, SideKind]) -> tuple[SideColumn, ...]:
        """The features of columns of these kinds; a text gives two."""
        columns = []
        for name, kind in kinds.items():
            transform = self.transforms.get(name, "quantiles")
            is_cut = kind == "range" and transform == "quantiles"
            columns.append(
                SideColumn(
                    name,
                    "text" if kind == "bag" else "number" if kind == "range" and not is_cut else kind,
                    separator=self.list_separator,
                    transform="none" if kind != "range" or is_cut else transform,
                    num_buckets=self.num_buckets,
                )
            )
            if kind == "bag":
                columns.append(SideColumn(name, "bag", name=f"{name}_bag", hashing=self.hashing))
        return tuple(columns)


def open_table(path: Path, key: str, columns: TableColumns, how: Delimited, what: str) -> SideSource:
    """`what` is the option that names the table, for messages."""
    _, files = find_files(path)
    if columns.separator:
        how = replace(how, separator=columns.separator.replace("\\t", "\t"))
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
    return SideSource(batches, key, columns.sides(kinds), must_match=f"--{what} {path}", notes=notes_on_skipped(path))


def check_features(owner: Owner, sources: Sequence[SideSource]) -> None:
    """Refuse features whose columns would be those of the ids, or of each other, in the dataset."""
    names = [column.feature for source in sources for column in source.columns]
    lists = {c.feature + COUNTS_SUFFIX for source in sources for c in source.columns if c.kind in ("categories", "bag")}
    mistakes = Mistakes()
    for name in dict.fromkeys(names):
        problem = ""
        if name in _OF_IDS:
            problem = f"would take the place of the dataset's own column {owner}_{name}"
        elif names.count(name) > 1:
            problem = f"is the name of {names.count(name)} features of the {owner}"
        elif name in lists:
            problem = "is what the dataset calls how many values each list has"
        with mistakes.noted():
            if problem:
                remedy = f"rename it, or leave it out: --{owner}_columns.left_out {name}"
                raise DataError(problem, field=f"{owner}_columns", value=name, remedy=remedy)
    mistakes.raise_all()


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
        "labels": columns.labels,
        "vectors": columns.vectors,
    }
    for group, chosen in wanted.items():
        for name in chosen:
            with mistakes.noted():
                if name not in names:
                    hint = f" (is the separator right? --{option}.separator ';')" if len(names) == 1 else ""
                    raise DataError(
                        f"is no column of {file.name}",
                        field=f"{option}.{group}",
                        value=name,
                        remedy=did_you_mean(name, names) + hint,
                    )
    mistakes.raise_all()


def _told(name: str, column: pa.Array) -> SideKind:
    """Of a column that nobody has named: ids are categories though they are numbers, addresses are for people."""
    if pa.types.is_nested(column.type):
        is_numeric = pa.types.is_floating(column.type.value_type)
        return "vector" if is_numeric else "categories"
    word = name.lower()
    if any(part in word for part in _WORDS_FOR_PEOPLE):
        return "text"
    if any(part in word for part in _WORDS_OF_TEXT):
        return "bag"
    if pa.types.is_string(column.type) and (kind := _kind_of_lists(column)):
        return kind
    if word.endswith("id") or pa.types.is_boolean(column.type):
        return "category"
    _, states = parse_numbers(column)
    has_numbers = bool(np.any(states != BLANK)) and not bool(np.any(states == BAD))
    return "range" if has_numbers else "category"


def _kind_of_lists(column: pa.Array) -> SideKind | None:
    """Of text whose cells are lists, as JSON or Python writes them; equally many fractions in each are a vector."""
    filled = column.filter(pc.greater(pc.binary_length(column), 0))
    marked = with_marks(filled, ",")
    is_list = pc.or_(pc.starts_with(marked, MARK), pc.equal(pc.utf8_trim_whitespace(filled), "[]"))
    if not len(filled) or not (pc.all(is_list).as_py() or has_marks(column)):
        return None
    numbers, counts = vectors(filled, ",")
    is_vector = counts.min() == counts.max() > 1 and bool(np.isfinite(numbers).all() and (numbers % 1).any())
    return "vector" if is_vector else "categories"
