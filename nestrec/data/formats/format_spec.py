"""Defines `FormatSpec`, the plugin interface of input formats, and opens side tables and vector files.

A new format is a file with a `FormatSpec` and one entry: in format_registry.py, or in another package an entry point of
the group `nestrec.formats`.

Side tables contain features of items or users. Their columns become features; the kind of a column that is not
configured is inferred from its name and its first rows. Vectors (embeddings) are read from array files (.npy), with the
ids of the rows in the side table or in a separate file.
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
from nestrec.data.prepare.input_files import LogReader, column_names, find_files, skipped_files_notes
from nestrec.data.prepare.list_cells import LIST_MARK, has_marks, mark_lists, parse_vectors
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
from nestrec.data.prepare.raw_rows import DelimitedFormat, RawBatch, read_lines, unreadable_file
from nestrec.data.prepare.side_tables import SideColumn, SideKind, SideSource

OptionsT = TypeVar("OptionsT", bound=PrepareOptions)


@dataclass(frozen=True, slots=True)
class FormatSpec:
    """An input format that `nestrec prepare` reads; the plugin interface of the entry point group `nestrec.formats`."""

    description: str
    """Description in one line for `nestrec formats`."""
    options: type[Any]
    """Config class whose fields, all with defaults, are the dotted options of `nestrec prepare FORMAT`."""
    prepare: Callable[[str, Path, Any, Progress], DatasetCard]
    """Function of (input, output, options, progress) that writes the dataset atomically to the folder `output` and
    returns its card."""
    open: Callable[[Path, Any], LogSource] | None = None
    """Function of (input, options) that returns the rows and the schema of an event log; None for formats that cannot
    be appended to a dataset."""


def log_format(description: str, options: type[OptionsT], open: Callable[[Path, OptionsT], LogSource]) -> FormatSpec:
    """Return the spec of an event log format.

    Args:
        description: Description in one line.
        options: Config class of the format.
        open: Returns the rows and the schema of a log.
    """

    def prepare(input: str, output: Path, options: OptionsT, progress: Progress) -> DatasetCard:
        source = checked_source(open(Path(input), options), description)
        with replaced_folder(output, marker=CARD_FILE, force=options.force) as folder:
            return write_dataset(folder, source, options, progress)

    return FormatSpec(description, options, prepare, open)


def checked_source(source: Any, format: str) -> LogSource:
    """Return the result of a format's `open`, or raise if it is not a `LogSource`."""
    if not isinstance(source, LogSource):
        remedy = f"fix the format plugin: `open` must return a {LogSource.__module__}.LogSource"
        raise UserError(
            f"`open` of the format returned {source!r}", option="nestrec.formats", value=format, remedy=remedy
        )
    return source


_WORDS_OF_TEXT = ("title", "name", "description", "text")
_DISPLAY_WORDS = ("url", "link", "image")
_RESERVED_NAMES = ("id", "key")
"""Reserved feature names: they would collide with the columns `item_id`, `item_key`, `user_id` and `user_key`."""


@config
class TableColumns:
    """Columns of a side table; the kind of a column that is not listed is inferred from its name and first rows."""

    key: str = ""
    """Column of the id; by default the name of the id column of the log."""
    separator: str = ""
    """Field separator of a text table: one ASCII character, `\\t` or `::`; by default that of the log."""
    categories: tuple[str, ...] = ()
    """Categorical columns, such as the brand."""
    lists: tuple[str, ...] = ()
    """Categorical columns with several values per cell: lists of Parquet or JSON, or text with a separator or such as
    ["a", "b"]."""
    list_separator: str = ","
    """Separator of the values of list columns that are text, and of the numbers of vectors that are text."""
    numbers: tuple[str, ...] = ()
    """Numeric columns, such as the price."""
    transforms: Mapping[str, NumberTransform] = field(default_factory=dict)
    """Numeric column to the transform that models read: quantiles (the id of its bucket, the default), standard, log or
    none: age=standard,price=log."""
    num_buckets: Count = 16
    """Number of quantile buckets of a numeric column; each has about the same number of training rows."""
    texts: tuple[str, ...] = ()
    """Columns of free text, such as the title: stored as text for display, and as hashed n-grams for models
    (`<name>_bag`)."""
    display_columns: tuple[str, ...] = ()
    """Text columns that are only displayed and not read by models, such as the URL of a picture."""
    hashing: HashingConfig = HashingConfig()
    """Feature hashing of the text columns."""
    vectors: tuple[str, ...] = ()
    """Columns with a vector per cell (a list of numbers), such as the embedding of a picture."""
    ignored_columns: tuple[str, ...] = ()
    """Columns that are not read; the kind of all other columns is inferred unless they are listed in another option."""

    def __post_init__(self) -> None:
        if self.separator:
            check_separator(self.separator, "separator")
        for name in self.transforms:
            if name not in self.numbers:
                remedy = did_you_mean(name, self.numbers) if self.numbers else "add the column to numbers"
                raise UserError("the column is not one of numbers", option="transforms", value=name, remedy=remedy)

    def kinds(self) -> dict[str, SideKind]:
        """Return the kind of each configured column."""
        declared: tuple[tuple[tuple[str, ...], SideKind], ...] = (
            (self.categories, "category"),
            (self.lists, "categories"),
            (self.numbers, "range"),
            (self.texts, "bag"),
            (self.display_columns, "text"),
            (self.vectors, "vector"),
        )
        return {name: kind for names, kind in declared for name in names}

    def side_columns(self, kinds: Mapping[str, SideKind]) -> tuple[SideColumn, ...]:
        """Return the side columns for columns of these kinds; a text column becomes two features."""
        columns = []
        for name, kind in kinds.items():
            transform = self.transforms.get(name, "quantiles")
            is_bucketed = kind == "range" and transform == "quantiles"
            if kind == "bag":
                column_kind: SideKind = "text"
            else:
                column_kind = "number" if kind == "range" and not is_bucketed else kind
            columns.append(
                SideColumn(
                    name,
                    column_kind,
                    separator=self.list_separator,
                    transform="none" if kind != "range" or is_bucketed else transform,
                    num_buckets=self.num_buckets,
                )
            )
            if kind == "bag":
                columns.append(SideColumn(name, "bag", name=f"{name}_bag", hashing=self.hashing))
        return tuple(columns)


def open_table(
    path: Path, key: str, columns: TableColumns, text_format: DelimitedFormat, table_option: str
) -> SideSource:
    """Open a side table.

    Args:
        path: A file, a folder, or a glob pattern.
        key: Column of the id.
        columns: Configured columns; the kinds of all others are inferred.
        text_format: Format of delimited text files.
        table_option: Name of the option that sets the table, for messages.

    Raises:
        DataError: No file was found, or a configured column does not exist.
    """
    _, files = find_files(path)
    if columns.separator:
        text_format = replace(text_format, separator=columns.separator.replace("\\t", "\t"))
    names = column_names(files[0], text_format)
    _check(names, key, columns, files[0], table_option)
    feature_columns = [name for name in names if name != key and name not in columns.ignored_columns]

    def batches() -> Iterator[RawBatch]:
        reader = LogReader(text_format, [key, *feature_columns])
        for file in files:
            yield from reader.read(file)

    first = next(batches(), None)
    declared = columns.kinds()
    inferred = (
        {} if first is None else {n: _infer_kind(n, first.columns[n]) for n in feature_columns if n not in declared}
    )
    kinds = {name: declared.get(name) or inferred.get(name, "category") for name in feature_columns}
    return SideSource(
        batches,
        key,
        columns.side_columns(kinds),
        must_match=f"--{table_option} {path}",
        notes=skipped_files_notes(path),
    )


def check_features(owner: Owner, sources: Sequence[SideSource]) -> None:
    """Raise for features whose columns in the dataset collide with id columns or with each other."""
    names = [column.feature for source in sources for column in source.columns]
    lists = {c.feature + COUNTS_SUFFIX for source in sources for c in source.columns if c.kind in ("categories", "bag")}
    errors = ErrorCollector()
    for name in dict.fromkeys(names):
        problem = ""
        if name in _RESERVED_NAMES:
            problem = f"the feature collides with the dataset's own column {owner}_{name}"
        elif names.count(name) > 1:
            problem = f"{names.count(name)} features of the {owner} have this name"
        elif name in lists:
            problem = "the dataset uses this name for the number of values of a list"
        if problem:
            remedy = f"rename the column, or exclude it with --{owner}_columns.ignored_columns {name}"
            errors.add(problem, option=f"{owner}_columns", value=name, remedy=remedy, error=DataError)
    errors.raise_if_any()


def _check(names: tuple[str, ...], key: str, columns: TableColumns, file: Path, table_option: str) -> None:
    option = f"{table_option.removesuffix('s')}_columns"
    errors = ErrorCollector()
    columns_of_option = {
        "key": (key,),
        "ignored_columns": columns.ignored_columns,
        "categories": columns.categories,
        "lists": columns.lists,
        "numbers": columns.numbers,
        "texts": columns.texts,
        "display_columns": columns.display_columns,
        "vectors": columns.vectors,
    }
    for field_name, columns_of_field in columns_of_option.items():
        for name in columns_of_field:
            if name not in names:
                hint = f" (is the separator right? --{option}.separator ';')" if len(names) == 1 else ""
                errors.add(
                    f"no such column in {file.name}",
                    option=f"{option}.{field_name}",
                    value=name,
                    remedy=did_you_mean(name, names) + hint,
                    error=DataError,
                )
    errors.raise_if_any()


def _infer_kind(name: str, column: pa.Array) -> SideKind:
    """Return the inferred kind of a column that is not configured: numeric ids are categories, URLs display text."""
    if pa.types.is_nested(column.type):
        is_numeric = pa.types.is_floating(column.type.value_type)
        return "vector" if is_numeric else "categories"
    word = name.lower()
    if any(part in word for part in _DISPLAY_WORDS):
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
    """Return the kind of a text column whose cells are list literals of JSON or Python; None for other columns.

    Lists with the same number of fractional numbers in each cell are vectors.
    """
    filled = column.filter(pc.greater(pc.binary_length(column), 0))
    marked = mark_lists(filled, ",")
    is_list = pc.or_(pc.starts_with(marked, LIST_MARK), pc.equal(pc.utf8_trim_whitespace(filled), "[]"))
    if not len(filled) or not (pc.all(is_list).as_py() or has_marks(column)):
        return None
    numbers, counts = parse_vectors(filled, ",")
    is_vector = counts.min() == counts.max() > 1 and bool(np.isfinite(numbers).all() and (numbers % 1).any())
    return "vector" if is_vector else "categories"


_KEY = "id"
_ROWS = 1 << 14


def open_vectors(name: str, text: str, table: SideSource | None, option: str) -> SideSource:
    """Open the vectors of a feature.

    Args:
        name: Name of the feature.
        text: `FILE.npy` with rows in the order of the table, or `FILE.npy:IDS` with a file of ids.
        table: The side table of the same owner, if there is one.
        option: Name of the option, for error messages.

    Raises:
        DataError: The file is not a two-dimensional array of floats, or its ids are missing.
    """
    array, _, ids = text.partition(":")
    vectors = _map_vectors(require_input(Path(array)), option)
    if not ids and table is None:
        remedy = f"write {name}={array}:IDS with a file of ids, or set the table with rows in the same order"
        raise DataError("the rows of the array have no ids", option=option, value=text, remedy=remedy)

    def batches() -> Iterator[RawBatch]:
        start_row = 0
        for keys in _ids_of_file(Path(ids)) if ids else _ids_of_table(table):
            rows = vectors[start_row : start_row + len(keys)]
            if len(rows) < len(keys):
                break
            flat = pa.array(np.ascontiguousarray(rows, dtype=np.float32).ravel())
            offsets = pa.array(np.arange(len(keys) + 1, dtype=np.int32) * np.int32(vectors.shape[1]))
            lines = np.arange(start_row + 1, start_row + 1 + len(keys), dtype=np.int64)
            start_row += len(keys)
            yield RawBatch(Path(array).name, lines, {_KEY: keys, name: pa.ListArray.from_arrays(offsets, flat)})
        else:
            if start_row == len(vectors):
                return
        remedy = "provide one id for each row of the array, in the same order"
        raise DataError(
            f"the array has {len(vectors):,} rows, but the number of ids is different",
            option=option,
            value=text,
            remedy=remedy,
        )

    return SideSource(batches, _KEY, (SideColumn(name, "vector"),), must_match=f"--{option} {name}={text}")


def _map_vectors(path: Path, option: str) -> NDArray[Any]:
    try:
        vectors: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise unreadable_file(path, error) from error
    if vectors.ndim != 2 or vectors.dtype.kind != "f":
        problem = f"the array has the shape {vectors.shape} and the type {vectors.dtype}"
        remedy = "save a two-dimensional array of floating-point numbers with numpy.save"
        raise DataError(problem, option=option, value=str(path), remedy=remedy)
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
