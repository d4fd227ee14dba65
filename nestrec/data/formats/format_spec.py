"""What a format of input is: options of its own, and how to make a dataset of it.

A new format is a file with a `FormatSpec`, and one entry: here in registry.py, or elsewhere an entry point of the group
`nestrec.formats`.

Tables of items or users beside a log: which of their columns become features, and of which kind.

Vectors of one's own in an array file (.npy), with the ids of its rows in a table or in a file beside it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Count
from nestrec.base.errors import DataError, ErrorCollector, UserError, did_you_mean
from nestrec.base.files import replaced_folder
from nestrec.data.dataset_card import CARD_FILE, DatasetCard, Owner
from nestrec.data.dataset_schema import COUNTS_SUFFIX
from nestrec.data.prepare.id_encoder import as_texts
from nestrec.data.prepare.input_files import LogReader, column_names, find_files, notes_on_skipped
from nestrec.data.prepare.list_cells import MARK, has_marks, vectors, with_marks
from nestrec.data.prepare.log_source import LogSource, require_input
from nestrec.data.prepare.parse import BAD, BLANK, parse_numbers
from nestrec.data.prepare.prepare_options import (
    HashingConfig,
    NumberTransform,
    PrepareOptions,
    Progress,
    check_separator,
)
from nestrec.data.prepare.prepare_sequences import write_dataset
from nestrec.data.prepare.raw_rows import DelimitedFormat, RawBatch, read_lines, unreadable
from nestrec.data.prepare.side_tables import SideColumn, SideKind, SideSource

OptionsT = TypeVar("OptionsT", bound=PrepareOptions)


@dataclass(frozen=True, slots=True)
class FormatSpec:
    """A kind of input that `nestrec prepare` reads."""

    description: str
    """in a line, for `nestrec formats`"""
    options: type[Any]
    """a config whose fields, all with defaults, are the dotted options of `nestrec prepare FORMAT`"""
    prepare: Callable[[str, Path, Any, Progress], DatasetCard]
    """(input, output, options, progress): writes the dataset to the folder `output`, whole or not at all; its card"""
    open: Callable[[Path, Any], LogSource] | None = None
    """(input, options): where the rows of an event log are and what they mean; none: nothing can be appended from it"""


def log_format(description: str, options: type[OptionsT], open: Callable[[Path, OptionsT], LogSource]) -> FormatSpec:
    """A format of event logs: `open` says where the rows are and what their columns mean."""

    def prepare(input: str, output: Path, options: OptionsT, progress: Progress) -> DatasetCard:
        source = checked_source(open(Path(input), options), description)
        with replaced_folder(output, marker=CARD_FILE, force=options.force) as folder:
            return write_dataset(folder, source, options, progress)

    return FormatSpec(description, options, prepare, open)


def checked_source(source: Any, format: str) -> LogSource:
    """What `open` of a format gave, where it is the source of a log."""
    if not isinstance(source, LogSource):
        remedy = f"let `open` of the format return a {LogSource.__module__}.LogSource"
        raise UserError(f"its `open` gives {source!r}", option="nestrec.formats", value=format, remedy=remedy)
    return source


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
                raise UserError("is not named as a number", option="transforms", value=name, remedy=remedy)

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


def open_table(path: Path, key: str, columns: TableColumns, how: DelimitedFormat, what: str) -> SideSource:
    """`what` is the option that names the table, for messages."""
    _, files = find_files(path)
    if columns.separator:
        how = replace(how, separator=columns.separator.replace("\\t", "\t"))
    names = column_names(files[0], how)
    _check(names, key, columns, files[0], what)
    wanted = [name for name in names if name != key and name not in columns.left_out]

    def batches() -> Iterator[RawBatch]:
        reader = LogReader(how, [key, *wanted])
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
    mistakes = ErrorCollector()
    for name in dict.fromkeys(names):
        problem = ""
        if name in _OF_IDS:
            problem = f"would take the place of the dataset's own column {owner}_{name}"
        elif names.count(name) > 1:
            problem = f"is the name of {names.count(name)} features of the {owner}"
        elif name in lists:
            problem = "is what the dataset calls how many values each list has"
        if problem:
            remedy = f"rename it, or leave it out: --{owner}_columns.left_out {name}"
            mistakes.add(problem, option=f"{owner}_columns", value=name, remedy=remedy, error=DataError)
    mistakes.raise_if_any()


def _check(names: tuple[str, ...], key: str, columns: TableColumns, file: Path, what: str) -> None:
    option = f"{what.removesuffix('s')}_columns"
    mistakes = ErrorCollector()
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
            if name not in names:
                hint = f" (is the separator right? --{option}.separator ';')" if len(names) == 1 else ""
                mistakes.add(
                    f"is no column of {file.name}",
                    option=f"{option}.{group}",
                    value=name,
                    remedy=did_you_mean(name, names) + hint,
                    error=DataError,
                )
    mistakes.raise_if_any()


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


_KEY = "id"
_ROWS = 1 << 14


def open_vectors(name: str, text: str, table: SideSource | None, option: str) -> SideSource:
    """The vectors of a feature. text: `FILE.npy` with rows as in the table, or `FILE.npy:IDS`; option: for errors."""
    array, _, ids = text.partition(":")
    vectors = _mapped(require_input(Path(array)), option)
    if not ids and table is None:
        remedy = f"write {name}={array}:IDS with a file of ids, or give the table whose rows it follows"
        raise DataError("has no ids for its rows", option=option, value=text, remedy=remedy)

    def batches() -> Iterator[RawBatch]:
        at = 0
        for keys in _ids_of_file(Path(ids)) if ids else _ids_of_table(table):
            rows = vectors[at : at + len(keys)]
            if len(rows) < len(keys):
                break
            flat = pa.array(np.ascontiguousarray(rows, dtype=np.float32).ravel())
            offsets = pa.array(np.arange(len(keys) + 1, dtype=np.int32) * np.int32(vectors.shape[1]))
            lines = np.arange(at + 1, at + 1 + len(keys), dtype=np.int64)
            at += len(keys)
            yield RawBatch(Path(array).name, lines, {_KEY: keys, name: pa.ListArray.from_arrays(offsets, flat)})
        else:
            if at == len(vectors):
                return
        remedy = "each row of the array needs one id, in the same order"
        raise DataError(
            f"has {len(vectors):,} rows, and there are other numbers of ids", option=option, value=text, remedy=remedy
        )

    return SideSource(batches, _KEY, (SideColumn(name, "vector"),), must_match=f"--{option} {name}={text}")


def _mapped(path: Path, option: str) -> NDArray[Any]:
    try:
        vectors: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if vectors.ndim != 2 or vectors.dtype.kind != "f":
        found = f"is of shape {vectors.shape} and type {vectors.dtype}"
        remedy = "save an array of two dimensions of floating-point numbers with numpy.save"
        raise DataError(found, option=option, value=str(path), remedy=remedy)
    return vectors


def _ids_of_file(path: Path) -> Iterator[pa.Array]:
    if require_input(path).suffix == ".npy":
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        for start in range(0, len(ids), _ROWS):
            yield as_texts(pa.array(np.asarray(ids[start : start + _ROWS])))
        return
    for lines, _, _ in read_lines(path):
        for start in range(0, len(lines), _ROWS):
            yield pa.array([line.strip() for line in lines[start : start + _ROWS]], pa.string())


def _ids_of_table(table: SideSource | None) -> Iterator[pa.Array]:
    assert table is not None
    for batch in table.batches():
        keys = batch.columns[table.key]
        for start in range(0, len(keys), _ROWS):
            yield keys.slice(start, _ROWS)
