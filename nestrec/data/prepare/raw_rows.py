"""Reads raw rows of delimited text files (CSV) and Parquet files in batches with line numbers, and collects bad rows.

Rejected rows go to the quarantine: they are counted and written to `quarantine.csv` with reason and line number (a
dead-letter file). Too many of them are an error.

A quote that opens a field and is never closed swallows the rows after it. A CSV reader does not notice, because these
rows are valid text of one field up to the next quote. `UnclosedQuoteDetector` therefore follows the quotes, and raises
if a quoted field spans several lines and its closing quote is not at the end of a field, or is missing.
"""

import csv
import gzip
import io
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numba import njit
from numpy.typing import NDArray

from nestrec.base.errors import DataError
from nestrec.data.dataset_card import DataFile, describe_file
from nestrec.data.prepare.list_cells import event_signatures, is_bytes, is_value_or_list
from nestrec.data.prepare.parse import AHEAD, NOT_A_NUMBER, TIME_REASONS
from nestrec.data.prepare.text_encoding import MARKING_HANDLER, UNDECODABLE, Utf8Stream

_FIELD_START, _IN_FIELD, _IN_QUOTES, _AFTER_QUOTE = range(4)
_STATE, _LINE, _OPENED, _WRONG_FROM, _WRONG_TO = range(5)


class UnclosedQuoteDetector:
    """Detector of unclosed quotes in a delimited text that is read in chunks."""

    def __init__(self, separator: str, num_header_lines: int):
        self._separator = ord(separator)
        self._num_header_lines = num_header_lines
        self._seen = np.array([_FIELD_START, 1, 0, 0, 0], dtype=np.int64)

    def feed(self, data: bytes) -> None:
        """Process the next chunk of the file."""
        if not data:
            return
        if self._seen[_STATE] in (_IN_QUOTES, _AFTER_QUOTE) or b'"' in data:
            _follow(np.frombuffer(data, np.uint8), self._seen, self._separator, self._num_header_lines)
            return
        self._seen[_LINE] += data.count(b"\n")
        is_start = data[-1] in (self._separator, ord("\n"), ord("\r"))
        self._seen[_STATE] = _FIELD_START if is_start else _IN_FIELD

    def check(self, path: Path, *, is_end: bool) -> None:
        """Raise if a quoted field spans several lines and its closing quote is misplaced or missing."""
        _, line, opened, first, last = self._seen.tolist()
        if is_end and self._seen[_STATE] == _IN_QUOTES and line > opened:
            first = opened
            last = line
        if first:
            remedy = (
                'write a quote inside a field as two ("") and enclose the field in quotes, or read quotes as plain '
                "characters (--log.has_quotes false with the format log)"
            )
            problem = f"the quote on line {first:,} is not closed before line {last:,}"
            raise DataError(
                f"{problem}, so the rows in between would be lost",
                option="input",
                value=str(path),
                remedy=remedy,
            )


class BlankLineFinder:
    """Finder of empty lines in a delimited text that is read in chunks.

    A quoted row that spans several lines counts as one line, as in the line numbers of rows.
    """

    def __init__(self, separator: str, num_header_lines: int, *, has_quotes: bool):
        self._separator = ord(separator)
        self._num_header_lines = num_header_lines
        self._has_quotes = has_quotes
        self._seen = np.array([_FIELD_START, 1, 1, 0], dtype=np.int64)
        self._found = [np.zeros(0, np.int64)]

    def feed(self, data: bytes) -> None:
        """Process the next chunk of the file."""
        lines = np.empty(data.count(b"\n") + data.count(b"\r"), dtype=np.int64)
        text_format = (self._separator, self._num_header_lines, self._has_quotes)
        num_found = _find_blank(np.frombuffer(data, np.uint8), self._seen, *text_format, lines)
        self._found.append(lines[:num_found])

    def lines(self) -> NDArray[np.int64]:
        """Return the numbers of the empty lines, from 1."""
        return np.concatenate(self._found)


@njit(cache=True, nogil=True)
def _find_blank(  # noqa: PLR0917
    data: NDArray[Any],
    state_array: NDArray[np.int64],
    separator: int,
    num_header_lines: int,
    has_quotes: bool,
    lines: NDArray[np.int64],
) -> int:
    """Find empty lines, and update the state: parser state, line, whether it is blank so far, whether a CR precedes."""
    state, line, is_blank, after_cr = state_array
    num_found = 0
    for byte in data:
        is_line_end = byte in (10, 13) and state != _IN_QUOTES
        if is_line_end and not (byte == 10 and after_cr):
            if is_blank:
                lines[num_found] = line
                num_found += 1
            line += 1
            is_blank = 1
            state = _FIELD_START
        elif not is_line_end:
            is_blank = 0
            can_open = state == _AFTER_QUOTE or (state == _FIELD_START and line > num_header_lines)
            if state == _IN_QUOTES:
                state = _AFTER_QUOTE if byte == 34 else _IN_QUOTES
            elif byte == separator:
                state = _FIELD_START
            else:
                state = _IN_QUOTES if has_quotes and byte == 34 and can_open else _IN_FIELD
        after_cr = byte == 13 and is_line_end
    state_array[:] = (state, line, is_blank, after_cr)
    return num_found


@njit(cache=True, nogil=True)
def _follow(data: NDArray[Any], state_array: NDArray[np.int64], separator: int, num_header_lines: int) -> None:
    """Follow quotes, and update the state: parser state, line, line of the last opening quote, first unclosed quote."""
    state, line, opened = state_array[_STATE], state_array[_LINE], state_array[_OPENED]
    for byte in data:
        is_line_end = byte in (10, 13)
        if state == _IN_QUOTES:
            if byte == 34:
                state = _AFTER_QUOTE
        elif byte == separator or is_line_end:
            state = _FIELD_START
        elif state == _AFTER_QUOTE and byte == 34:  # two quotes are one escaped quote
            state = _IN_QUOTES
        elif state == _AFTER_QUOTE:
            if line > opened and state_array[_WRONG_FROM] == 0:
                state_array[_WRONG_FROM] = opened
                state_array[_WRONG_TO] = line
            state = _IN_FIELD
        elif state == _FIELD_START and byte == 34 and line > num_header_lines:
            state = _IN_QUOTES
            opened = line
        else:
            state = _IN_FIELD
        line += byte == 10
    state_array[_STATE] = state
    state_array[_LINE] = line
    state_array[_OPENED] = opened


BLOCK_BYTES = 8 << 20
ROWS_PER_BATCH = 1 << 17
RAW_LINE = "{}"
"""Name of the column with the complete text of a row, for readers that parse only the requested columns."""
SIGNATURE = "{#}"
"""Name of the column with the hash of a complete row, for readers that parse only the requested columns."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A rejected input row."""

    line: int
    reason: str
    text: str


def bad_row(line: int, reason: str, text: str) -> BadRow:
    """Return a bad row; the marks of undecodable bytes in its text become replacement characters."""
    return BadRow(line, reason, text.replace(UNDECODABLE, "\ufffd"))


@dataclass(frozen=True, slots=True)
class RawBatch:
    """A batch of rows of one file.

    Attributes:
        file: Name of the file.
        lines: Line number of each row, from 1.
        columns: Cells by column name; text, or typed if the file is typed.
        bad: Rows that the reader rejected.
    """

    file: str
    lines: NDArray[np.int64]
    columns: dict[str, pa.Array]
    bad: tuple[BadRow, ...] = ()
    fraction_read: float = 0.0
    """Fraction of the file's bytes that have been read so far."""

    @property
    def num_rows(self) -> int:
        return int(self.lines.size)

    @property
    def names(self) -> list[str]:
        """Names of the columns of the file."""
        return [name for name in self.columns if name not in (RAW_LINE, SIGNATURE)]

    def row_text(self, row: int) -> str:
        """Return a row as text for messages."""
        if RAW_LINE in self.columns:
            return str(self.columns[RAW_LINE][row].as_py())
        return ",".join(str(self.columns[name][row].as_py()) for name in self.names)

    def reject_undecodable_rows(self) -> "RawBatch":
        """Return the batch with the rows whose text could not be decoded moved to the bad rows."""
        is_marked = np.zeros(self.num_rows, dtype=np.bool_)
        for column in (column for column in self.columns.values() if pa.types.is_string(column.type)):
            is_marked |= pc.match_substring(column, UNDECODABLE).to_numpy(zero_copy_only=False)
        if not is_marked.any():
            return self
        more = tuple(bad_row(int(self.lines[i]), "not UTF-8", self.row_text(int(i))) for i in np.flatnonzero(is_marked))
        remaining = {name: column.filter(pa.array(~is_marked)) for name, column in self.columns.items()}
        return RawBatch(self.file, self.lines[~is_marked], remaining, self.bad + more, self.fraction_read)


@dataclass(frozen=True, slots=True)
class DelimitedFormat:
    """Format of a delimited text file."""

    separator: str = ","
    """Field separator: one character, or `::`."""
    names: tuple[str, ...] = ()
    """Column names; empty if the first line is a header."""
    has_quotes: bool = True
    """Whether fields may be enclosed in double quotes."""
    encoding: str = "utf-8"
    """Character encoding of the file."""
    skip_lines: int = 0
    """Number of lines before the first row; used only if `names` are set."""

    @property
    def num_header_lines(self) -> int:
        return self.skip_lines if self.names else 1


@dataclass(slots=True)
class _LineNumbers:
    """Computes the line numbers of the good rows from those of the bad rows, because Arrow reports only the latter."""

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


def read_delimited(path: Path, text_format: DelimitedFormat) -> Iterator[RawBatch]:
    """Yield the rows of a delimited text file, plain or gzip.

    Rows with a wrong number of fields are bad rows; empty lines are skipped.

    Raises:
        DataError: The file cannot be read, has a duplicate column name, or has an unclosed quote.
    """
    names = text_format.names or header_names(first_line(path, text_format.encoding), text_format)
    _check_unique(path, names)
    if len(text_format.separator) > 1:  # Arrow's CSV reader supports only separators of one byte
        yield from _read_split(path, names, text_format)
        return
    lines = _LineNumbers(text_format.num_header_lines + 1)
    rejected: list[BadRow] = []

    def reject(row: pyarrow.csv.InvalidRow) -> str:
        line = row.number
        rejected.append(bad_row(line, "wrong number of fields", row.text))
        lines.bad_lines.append(line)
        return "skip"

    blank_lines: NDArray[np.int64] | None = None
    with pa.OSFile(str(path)) as file:
        binary = pa.CompressedInputStream(file, "gzip") if path.suffix == ".gz" else file
        quotes = (
            UnclosedQuoteDetector(text_format.separator, text_format.num_header_lines)
            if text_format.has_quotes
            else None
        )
        stream = Utf8Stream(binary, text_format.encoding, quotes.feed if quotes else None)
        for batch in _csv_batches(path, stream, names, text_format, reject, quotes):
            columns = dict(zip(names, batch.columns, strict=True))
            batch_lines = lines.take(batch.num_rows)
            is_blank = _has_no_text(columns)
            if is_blank.any():  # either an empty line, which is skipped, or a line of separators, which is a row
                blank_lines = _blank_lines(path, text_format) if blank_lines is None else blank_lines
                is_blank &= np.isin(batch_lines, blank_lines)
            remaining = {name: column.filter(pa.array(~is_blank)) for name, column in columns.items()}
            done = file.tell() / max(1, path.stat().st_size)
            batch_read = RawBatch(path.name, batch_lines[~is_blank], remaining, tuple(rejected), done)
            rejected.clear()
            if quotes:
                quotes.check(path, is_end=False)
            yield batch_read.reject_undecodable_rows() if stream.has_undecodable else batch_read
    if quotes:
        quotes.check(path, is_end=True)
    if rejected:
        yield RawBatch(path.name, np.zeros(0, np.int64), {n: pa.array([], pa.string()) for n in names}, tuple(rejected))


def read_parquet(path: Path, required: Collection[str] = (), *, has_signatures: bool = False) -> Iterator[RawBatch]:
    """Yield the rows of a Parquet file; line numbers are row numbers from 1.

    Args:
        path: The file.
        required: Columns that must contain values or lists of values.
        has_signatures: Whether batches get the column `SIGNATURE`; nulls do not count, empty texts do.
    """
    try:
        with pq.ParquetFile(path) as file:
            _check_unique(path, file.schema_arrow.names)
            start = 0
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, use_threads=False):
                lines = np.arange(start + 1, start + 1 + batch.num_rows, dtype=np.int64)
                start += batch.num_rows
                columns = {n: _decode(c) for n, c in zip(batch.schema.names, batch.columns, strict=True)}
                _check_types(path, columns, required)
                if has_signatures:
                    signatures = event_signatures(columns, batch.num_rows, is_typed=True)
                    columns[SIGNATURE] = pa.array(signatures.view(np.int64))
                yield RawBatch(path.name, lines, columns, fraction_read=start / max(1, file.metadata.num_rows))
    except (OSError, pa.ArrowException) as error:
        raise unreadable_file(path, error) from error


def read_lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[list[str], int, float]]:
    """Yield a text file in bounded blocks: lines, number of the first line, and fraction of the bytes read so far."""
    try:
        with path.open("rb") as file:
            binary: Any = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            text = io.TextIOWrapper(binary, encoding=encoding, errors=MARKING_HANDLER)
            start = 1
            while lines := text.readlines(BLOCK_BYTES):
                if start == 1:
                    lines[0] = lines[0].removeprefix("\ufeff")
                yield lines, start, file.tell() / max(1, path.stat().st_size)
                start += len(lines)
    except (OSError, EOFError) as error:
        raise unreadable_file(path, error) from error


def first_line(path: Path, encoding: str = "utf-8") -> str:
    """Return the first line without its line end; empty for an empty file."""
    for lines, _, _ in read_lines(path, encoding):
        return lines[0].rstrip("\r\n")
    return ""


def header_names(line: str, text_format: DelimitedFormat) -> tuple[str, ...]:
    """Return the column names of a header line."""
    if text_format.separator == "::" or not text_format.has_quotes:
        return tuple(line.split(text_format.separator))
    return tuple(next(csv.reader([line], delimiter=text_format.separator), []))


def _check_unique(path: Path, names: Sequence[str]) -> None:
    """Raise for duplicate column names, which are ambiguous."""
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                f"{names.count(name)} columns of {path.name} have this name",
                option="column",
                value=name,
                remedy="rename the columns so that each name is unique",
            )


def unreadable_file(path: Path, error: Exception) -> DataError:
    """Return the error for an input file that cannot be read."""
    remedy = "check that the file is complete and in this format (has_quotes=false if quotes are plain characters)"
    return DataError(f"the file cannot be read: {error}", option="input", value=str(path), remedy=remedy)


def _read_split(path: Path, names: tuple[str, ...], text_format: DelimitedFormat) -> Iterator[RawBatch]:
    """Yield the rows of a file with a separator of several characters, such as `::`; `a::b: c` has two fields."""
    skip = text_format.num_header_lines
    for lines, first, done in read_lines(path, text_format.encoding):
        text = pa.array([line.rstrip("\r\n") for line in lines[skip:]], pa.string())
        numbers = np.arange(first + skip, first + len(lines), dtype=np.int64)
        skip = 0
        fields = pc.split_pattern(text, text_format.separator)
        counts = pc.list_value_length(fields).to_numpy(zero_copy_only=False)
        is_blank = pc.binary_length(text).to_numpy(zero_copy_only=False) == 0
        is_good = counts == len(names)
        bad = [
            bad_row(int(numbers[i]), "wrong number of fields", text[i].as_py())
            for i in np.flatnonzero(~is_good & ~is_blank)
        ]
        flat = fields.filter(pa.array(is_good)).flatten()
        row_starts = np.arange(int(is_good.sum()), dtype=np.int64) * len(names)
        columns = {name: flat.take(pa.array(row_starts + i)) for i, name in enumerate(names)}
        yield RawBatch(path.name, numbers[is_good], columns, tuple(bad), done).reject_undecodable_rows()


def _csv_batches(  # noqa: PLR0917
    path: Path,
    stream: Any,
    fields: Sequence[str],
    text_format: DelimitedFormat,
    reject: Callable[[pyarrow.csv.InvalidRow], str],
    quotes: UnclosedQuoteDetector | None,
) -> Iterator[pa.RecordBatch]:
    try:
        reader = pyarrow.csv.open_csv(
            stream,
            read_options=pyarrow.csv.ReadOptions(
                block_size=BLOCK_BYTES,
                use_threads=False,
                column_names=list(fields),
                skip_rows=text_format.num_header_lines,
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=text_format.separator,
                quote_char='"' if text_format.has_quotes else False,
                ignore_empty_lines=False,
                newlines_in_values=text_format.has_quotes,
                invalid_row_handler=reject,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types={name: pa.string() for name in fields}, check_utf8=False, strings_can_be_null=False
            ),
        )
        yield from reader
    except (OSError, pa.ArrowException) as error:
        if quotes:
            quotes.check(path, is_end=True)  # an unclosed quote longer than a block makes Arrow fail
        if "Empty CSV file" not in str(error):
            raise unreadable_file(path, error) from error


def _has_no_text(columns: dict[str, pa.Array]) -> NDArray[np.bool_]:
    num_bytes = np.asarray(sum(np.diff(_offsets(column)) for column in columns.values()))
    return np.asarray(num_bytes == 0, dtype=np.bool_)


def _blank_lines(path: Path, text_format: DelimitedFormat) -> NDArray[np.int64]:
    """Return the numbers of empty lines by reading the file again; Arrow returns them as rows of empty cells."""
    blank = BlankLineFinder(text_format.separator, text_format.num_header_lines, has_quotes=text_format.has_quotes)
    with pa.OSFile(str(path)) as file:
        binary = pa.CompressedInputStream(file, "gzip") if path.suffix == ".gz" else file
        stream = Utf8Stream(binary, text_format.encoding, blank.feed)
        while stream.read(BLOCK_BYTES):
            pass
    return blank.lines()


def _decode(column: pa.Array) -> pa.Array:
    """Convert text of any Arrow type to plain strings, and UUIDs to text; bytes that are not text are unchanged."""
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


def _check_types(path: Path, columns: dict[str, pa.Array], required: Collection[str]) -> None:
    for name in required:
        kind = columns[name].type if name in columns else pa.null()
        if is_bytes(kind) or not is_value_or_list(kind):
            remedy = (
                "convert its values to text or numbers, or lists of them; columns of items and users can be excluded "
                "with ignored_columns"
            )
            raise DataError(f"unsupported type {kind} in {path.name}", option="column", value=name, remedy=remedy)


def _offsets(column: pa.Array) -> NDArray[np.int32]:
    return np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]


QUARANTINE_FILE = "quarantine.csv"
MAX_TEXT_CHARACTERS = 500
"""Maximum length of a row in the quarantine file; longer rows are truncated."""


class Quarantine:
    """Quarantine of the rejected rows of all input files.

    Attributes:
        reasons: Number of rejected rows per reason.
    """

    def __init__(self, folder: Path):
        self.reasons: Counter[str] = Counter()
        self._path = folder / QUARANTINE_FILE
        self._example = ""

    @property
    def num_rows(self) -> int:
        return self.reasons.total()

    def add(self, file: str, rows: Sequence[BadRow]) -> None:
        if not rows:
            return
        with self._path.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            if not self.num_rows:
                writer.writerow(["file", "line", "reason", "text"])
                self._example = f"{file}, line {rows[0].line}: {rows[0].reason}: {rows[0].text[:80]!r}"
            writer.writerows([file, row.line, row.reason, row.text[:MAX_TEXT_CHARACTERS]] for row in rows)
        self.reasons.update(row.reason for row in rows)

    def check(self, num_rows_read: int, max_bad_fraction: float, num_bad_before: int = 0, time_hint: str = "") -> None:
        """Raise if, after the first `num_bad_before` bad rows, more than `max_bad_fraction` of the rows read are bad.

        Args:
            num_rows_read: Number of rows read, including bad rows.
            max_bad_fraction: Maximum fraction of bad rows.
            num_bad_before: Number of bad rows that were counted by an earlier check.
            time_hint: Remedy if most rows are bad because of their times.
        """
        num_bad = self.num_rows - num_bad_before
        if num_bad <= max_bad_fraction * num_rows_read:
            return
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.reasons.most_common())
        raise DataError(
            f"{num_bad:,} of {num_rows_read:,} rows are bad ({reasons}); the first is {self._example}",
            option="max_bad_fraction",
            value=max_bad_fraction,
            remedy=self._remedy(time_hint),
        )

    def _remedy(self, time_hint: str) -> str:
        advice = "check the format and its columns"
        main_reason = self.reasons.most_common(1)[0][0]
        if main_reason in TIME_REASONS and time_hint:
            advice = time_hint
        elif main_reason == AHEAD:
            advice = "set the unit of the times (--log.time_unit), or allow later times (--log.max_future_s)"
        elif main_reason in TIME_REASONS:
            advice = (
                "set the unit of the times (--log.time_unit s, ms, us, ns, or iso for dates such as "
                "2026-10-25T12:00:00+02:00)"
            )
        elif main_reason.endswith(NOT_A_NUMBER):
            advice = "write numbers as 1234.5, without thousands separators, currencies and units"
        return f"{advice}, or allow more bad rows with --max_bad_fraction 1"

    def files(self) -> list[DataFile]:
        """Return the entry of the quarantine file; empty if no row was rejected."""
        if not self.num_rows:
            return []
        return [describe_file(self._path.parent, self._path, self.num_rows)]
