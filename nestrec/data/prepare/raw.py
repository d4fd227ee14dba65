"""Raw rows of an input file, in batches of text columns with their line numbers."""

import csv
import gzip
import io
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nestrec.base.errors import DataError
from nestrec.data.prepare.encoding import MARK, MARKING, Utf8Stream
from nestrec.data.prepare.features.cells import is_bytes, is_readable
from nestrec.data.prepare.quotes import BlankLines, QuoteWatch
from nestrec.data.prepare.signature import event_signatures

BLOCK_BYTES = 8 << 20
ROWS_A_BATCH = 1 << 17
WHOLE_LINE = "{}"
"""Name of a column that holds all of a row, where the others are only those that are wanted."""
SIGNATURE = "{#}"
"""Name of a column with the hash of all of a row, where the reader knows more of the row than its columns."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """An input row that cannot be used."""

    line: int
    reason: str
    text: str


def bad_row(line: int, reason: str, text: str) -> BadRow:
    """A bad row whose text may hold marks."""
    return BadRow(line, reason, text.replace(MARK, "\ufffd"))


@dataclass(frozen=True, slots=True)
class RawBatch:
    """Rows of one file: columns by name (text, or typed where the file is typed), and the line of each row from 1."""

    file: str
    lines: NDArray[np.int64]
    columns: dict[str, pa.Array]
    bad: tuple[BadRow, ...] = ()
    done: float = 0.0
    """Share of the file's bytes that have been read."""

    @property
    def num_rows(self) -> int:
        return int(self.lines.size)

    @property
    def names(self) -> list[str]:
        """The columns that the file has."""
        return [name for name in self.columns if name not in (WHOLE_LINE, SIGNATURE)]

    def text_of(self, row: int) -> str:
        """A row as text, for people."""
        if WHOLE_LINE in self.columns:
            return str(self.columns[WHOLE_LINE][row].as_py())
        return ",".join(str(self.columns[name][row].as_py()) for name in self.names)

    def without_marked_rows(self) -> "RawBatch":
        """Rows whose text could not be decoded become bad rows."""
        is_marked = np.zeros(self.num_rows, dtype=np.bool_)
        for column in (column for column in self.columns.values() if pa.types.is_string(column.type)):
            is_marked |= pc.match_substring(column, MARK).to_numpy(zero_copy_only=False)
        if not is_marked.any():
            return self
        more = tuple(bad_row(int(self.lines[i]), "not UTF-8", self.text_of(int(i))) for i in np.flatnonzero(is_marked))
        kept = {name: column.filter(pa.array(~is_marked)) for name, column in self.columns.items()}
        return RawBatch(self.file, self.lines[~is_marked], kept, self.bad + more, self.done)


@dataclass(frozen=True, slots=True)
class Delimited:
    """How a delimited text file is written."""

    separator: str = ","
    """One character, or `::`."""
    names: tuple[str, ...] = ()
    """Column names; empty where the first line holds them."""
    has_quotes: bool = True
    """Whether fields may stand in double quotes."""
    encoding: str = "utf-8"
    """Of the file's bytes."""
    skip_lines: int = 0
    """Lines before the first row, where `names` are given."""

    @property
    def num_header_lines(self) -> int:
        return self.skip_lines if self.names else 1


@dataclass(slots=True)
class _Lines:
    """Tells the line of each good row from the lines of the bad ones."""

    next_line: int
    bad_lines: list[int] = field(default_factory=list)

    def take(self, num_rows: int) -> NDArray[np.int64]:
        ahead = np.array([line for line in self.bad_lines if line >= self.next_line], dtype=np.int64)
        candidates = np.arange(self.next_line, self.next_line + num_rows + ahead.size, dtype=np.int64)
        lines = np.setdiff1d(candidates, ahead, assume_unique=True)[:num_rows]
        if num_rows:
            self.next_line = int(lines[-1]) + 1
            self.bad_lines = [line for line in self.bad_lines if line >= self.next_line]
        return lines


def read_delimited(path: Path, how: Delimited) -> Iterator[RawBatch]:
    """Rows of a delimited text file, plain or gzip. Rows with a wrong number of fields are bad, blank lines skipped."""
    names = how.names or header_names(first_line(path, how.encoding), how)
    _check_unique(path, names)
    if len(how.separator) > 1:  # Arrow's reader knows separators of one byte
        yield from _read_split(path, names, how)
        return
    lines = _Lines(how.num_header_lines + 1)
    rejected: list[BadRow] = []

    def reject(row: pyarrow.csv.InvalidRow) -> str:
        line = row.number
        rejected.append(bad_row(line, "wrong number of fields", row.text))
        lines.bad_lines.append(line)
        return "skip"

    blank_lines: NDArray[np.int64] | None = None
    with pa.OSFile(str(path)) as file:
        binary = pa.CompressedInputStream(file, "gzip") if path.suffix == ".gz" else file
        quotes = QuoteWatch(how.separator, how.num_header_lines) if how.has_quotes else None
        stream = Utf8Stream(binary, how.encoding, quotes.see if quotes else None)
        for batch in _csv_batches(path, stream, names, how, reject, quotes):
            columns = dict(zip(names, batch.columns, strict=True))
            batch_lines = lines.take(batch.num_rows)
            is_blank = _has_no_text(columns)
            if is_blank.any():  # a line without a character, which is skipped, or one of separators, which is a row
                blank_lines = _blank_lines(path, how) if blank_lines is None else blank_lines
                is_blank &= np.isin(batch_lines, blank_lines)
            kept = {name: column.filter(pa.array(~is_blank)) for name, column in columns.items()}
            done = file.tell() / max(1, path.stat().st_size)
            found = RawBatch(path.name, batch_lines[~is_blank], kept, tuple(rejected), done)
            rejected.clear()
            if quotes:
                quotes.check(path, is_end=False)
            yield found.without_marked_rows() if stream.has_marks else found
    if quotes:
        quotes.check(path, is_end=True)
    if rejected:
        yield RawBatch(path.name, np.zeros(0, np.int64), {n: pa.array([], pa.string()) for n in names}, tuple(rejected))


def read_parquet(path: Path, wanted: Collection[str] = (), *, signs_rows: bool = False) -> Iterator[RawBatch]:
    """Yields the rows of a Parquet file; lines are row numbers from 1. Wanted columns hold values, or lists of them.

    signs_rows: add the column SIGNATURE, for which an empty text is a value and a null is none.
    """
    try:
        with pq.ParquetFile(path) as file:
            _check_unique(path, file.schema_arrow.names)
            start = 0
            for batch in file.iter_batches(batch_size=ROWS_A_BATCH, use_threads=False):
                lines = np.arange(start + 1, start + 1 + batch.num_rows, dtype=np.int64)
                start += batch.num_rows
                columns = {n: _plain(c) for n, c in zip(batch.schema.names, batch.columns, strict=True)}
                _check_types(path, columns, wanted)
                if signs_rows:
                    signatures = event_signatures(columns, batch.num_rows, is_typed=True)
                    columns[SIGNATURE] = pa.array(signatures.view(np.int64))
                yield RawBatch(path.name, lines, columns, done=start / max(1, file.metadata.num_rows))
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, error) from error


def read_lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[list[str], int, float]]:
    """Lines of a text file in bounded blocks: the lines, the number of the first, and the share of bytes read."""
    try:
        with path.open("rb") as file:
            binary: Any = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            text = io.TextIOWrapper(binary, encoding=encoding, errors=MARKING)
            start = 1
            while lines := text.readlines(BLOCK_BYTES):
                if start == 1:
                    lines[0] = lines[0].removeprefix("\ufeff")
                yield lines, start, file.tell() / max(1, path.stat().st_size)
                start += len(lines)
    except (OSError, EOFError) as error:
        raise unreadable(path, error) from error


def first_line(path: Path, encoding: str = "utf-8") -> str:
    """The first line without its end, or nothing."""
    for lines, _, _ in read_lines(path, encoding):
        return lines[0].rstrip("\r\n")
    return ""


def header_names(line: str, how: Delimited) -> tuple[str, ...]:
    """Column names of a header line."""
    if how.separator == "::" or not how.has_quotes:
        return tuple(line.split(how.separator))
    return tuple(next(csv.reader([line], delimiter=how.separator), []))


def _check_unique(path: Path, names: Sequence[str]) -> None:
    """Which of two columns of the same name was meant, nobody can tell."""
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                f"is the name of {names.count(name)} columns of {path.name}",
                field="column",
                value=name,
                remedy="give each column a name of its own",
            )


def unreadable(path: Path, error: Exception) -> DataError:
    """The error for an input file that cannot be read."""
    remedy = "check that the file is whole and of the named format (has_quotes=false if a quote is a plain character)"
    return DataError(f"cannot be read: {error}", field="input", value=str(path), remedy=remedy)


def _read_split(path: Path, names: tuple[str, ...], how: Delimited) -> Iterator[RawBatch]:
    """Rows of a file whose separator has several characters, line by line; `a::b: c` has two fields."""
    skip = how.num_header_lines
    for lines, first, done in read_lines(path, how.encoding):
        text = pa.array([line.rstrip("\r\n") for line in lines[skip:]], pa.string())
        numbers = np.arange(first + skip, first + len(lines), dtype=np.int64)
        skip = 0
        fields = pc.split_pattern(text, how.separator)
        counts = pc.list_value_length(fields).to_numpy(zero_copy_only=False)
        is_blank = pc.binary_length(text).to_numpy(zero_copy_only=False) == 0
        is_good = counts == len(names)
        bad = [
            bad_row(int(numbers[i]), "wrong number of fields", text[i].as_py())
            for i in np.flatnonzero(~is_good & ~is_blank)
        ]
        flat = fields.filter(pa.array(is_good)).flatten()
        places = np.arange(int(is_good.sum()), dtype=np.int64) * len(names)
        columns = {name: flat.take(pa.array(places + i)) for i, name in enumerate(names)}
        yield RawBatch(path.name, numbers[is_good], columns, tuple(bad), done).without_marked_rows()


def _csv_batches(  # noqa: PLR0917
    path: Path,
    stream: Any,
    fields: Sequence[str],
    how: Delimited,
    reject: Callable[[pyarrow.csv.InvalidRow], str],
    quotes: QuoteWatch | None,
) -> Iterator[pa.RecordBatch]:
    try:
        reader = pyarrow.csv.open_csv(
            stream,
            read_options=pyarrow.csv.ReadOptions(
                block_size=BLOCK_BYTES, use_threads=False, column_names=list(fields), skip_rows=how.num_header_lines
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=how.separator,
                quote_char='"' if how.has_quotes else False,
                ignore_empty_lines=False,
                newlines_in_values=how.has_quotes,
                invalid_row_handler=reject,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types={name: pa.string() for name in fields}, check_utf8=False, strings_can_be_null=False
            ),
        )
        yield from reader
    except (OSError, pa.ArrowException) as error:
        if quotes:
            quotes.check(path, is_end=True)  # a field that takes in more than a block ends up here
        if "Empty CSV file" not in str(error):
            raise unreadable(path, error) from error


def _has_no_text(columns: dict[str, pa.Array]) -> NDArray[np.bool_]:
    num_bytes = np.asarray(sum(np.diff(_offsets(column)) for column in columns.values()))
    return np.asarray(num_bytes == 0, dtype=np.bool_)


def _blank_lines(path: Path, how: Delimited) -> NDArray[np.int64]:
    """Returns the lines without a character, by reading the file again: Arrow gives them as rows of empty cells."""
    blank = BlankLines(how.separator, how.num_header_lines, has_quotes=how.has_quotes)
    with pa.OSFile(str(path)) as file:
        binary = pa.CompressedInputStream(file, "gzip") if path.suffix == ".gz" else file
        stream = Utf8Stream(binary, how.encoding, blank.see)
        while stream.read(BLOCK_BYTES):
            pass
    return blank.lines()


def _plain(column: pa.Array) -> pa.Array:
    """Text of any Arrow type as plain strings, UUIDs as they are written; bytes that are no text stay what they are."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.type == pa.uuid():
        return pa.array([None if value is None else str(value) for value in column.to_pylist()], pa.string())
    kind = column.type
    if not (is_bytes(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        return column
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return column


def _check_types(path: Path, columns: dict[str, pa.Array], wanted: Collection[str]) -> None:
    for name in wanted:
        kind = columns[name].type if name in columns else pa.null()
        if is_bytes(kind) or not is_readable(kind):
            remedy = "write its values as text or numbers, or lists of them; of a table it can be left out (left_out)"
            raise DataError(f"is of type {kind} in {path.name}", field="column", value=name, remedy=remedy)


def _offsets(column: pa.Array) -> NDArray[np.int32]:
    return np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]
