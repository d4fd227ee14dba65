"""Reads raw rows of delimited files and Parquet in batches; bad rows go to the quarantine.

A quote that opens a field and is not closed takes in the rows behind it: they would be lost without being counted.

A reader of CSV cannot tell: to it the rows are text of one field, up to the next quote in the file. What can be told is
that this one does not stand where a field ends, or that the file ended first.

Raw rows of an input file, in batches of text columns with their line numbers.

Bad input rows: written to `quarantine.csv` with reason and line, counted, and an error when there are too many.
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
from nestrec.data.prepare.list_cells import event_signatures, is_bytes, is_readable
from nestrec.data.prepare.parse import ABOUT_TIME, AHEAD, NOT_A_NUMBER
from nestrec.data.prepare.text_encoding import MARK, MARKING, Utf8Stream

_FIELD_START, _IN_FIELD, _IN_QUOTES, _AFTER_QUOTE = range(4)
_STATE, _LINE, _OPENED, _WRONG_FROM, _WRONG_TO = range(5)


class QuoteWatch:
    """Follows the quotes of a delimited text as it is read, piece by piece."""

    def __init__(self, separator: str, num_header_lines: int):
        self._separator = ord(separator)
        self._num_header_lines = num_header_lines
        self._seen = np.array([_FIELD_START, 1, 0, 0, 0], dtype=np.int64)

    def see(self, data: bytes) -> None:
        """The next piece of the file."""
        if not data:
            return
        if self._seen[_STATE] in (_IN_QUOTES, _AFTER_QUOTE) or b'"' in data:
            _follow(np.frombuffer(data, np.uint8), self._seen, self._separator, self._num_header_lines)
            return
        self._seen[_LINE] += data.count(b"\n")
        is_start = data[-1] in (self._separator, ord("\n"), ord("\r"))
        self._seen[_STATE] = _FIELD_START if is_start else _IN_FIELD

    def check(self, path: Path, *, is_end: bool) -> None:
        """Raise where a field in quotes has taken in the end of its line and ended where no field ends."""
        _, line, opened, first, last = self._seen.tolist()
        if is_end and self._seen[_STATE] == _IN_QUOTES and line > opened:
            first = opened
            last = line
        if first:
            remedy = (
                'write a quote inside a field as two ("") and put the field in quotes, or say that quotes are plain '
                "characters (of a log of your own: --log.has_quotes false)"
            )
            problem = f"has a quote on line {first:,} that is not closed before line {last:,}"
            raise DataError(
                f"{problem}: the rows between would be lost",
                option="input",
                value=str(path),
                remedy=remedy,
            )


class BlankLines:
    """Finds the lines of a delimited text without a character, as it is read piece by piece.

    A row in quotes that goes over several lines counts as one line, as in the line numbers of rows.
    """

    def __init__(self, separator: str, num_header_lines: int, *, has_quotes: bool):
        self._separator = ord(separator)
        self._num_header_lines = num_header_lines
        self._has_quotes = has_quotes
        self._seen = np.array([_FIELD_START, 1, 1, 0], dtype=np.int64)
        self._found = [np.zeros(0, np.int64)]

    def see(self, data: bytes) -> None:
        """Takes the next piece of the file."""
        lines = np.empty(data.count(b"\n") + data.count(b"\r"), dtype=np.int64)
        how = (self._separator, self._num_header_lines, self._has_quotes)
        num_found = _find_blank(np.frombuffer(data, np.uint8), self._seen, *how, lines)
        self._found.append(lines[:num_found])

    def lines(self) -> NDArray[np.int64]:
        """Returns their numbers, from 1."""
        return np.concatenate(self._found)


@njit(cache=True, nogil=True)
def _find_blank(  # noqa: PLR0917
    data: NDArray[Any],
    seen: NDArray[np.int64],
    separator: int,
    num_header_lines: int,
    has_quotes: bool,
    lines: NDArray[np.int64],
) -> int:
    """Continue in `seen`: the state, the line, whether it is blank so far, whether the last byte was a CR."""
    state, line, is_blank, after_cr = seen
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
    seen[:] = (state, line, is_blank, after_cr)
    return num_found


@njit(cache=True, nogil=True)
def _follow(data: NDArray[Any], seen: NDArray[np.int64], separator: int, num_header_lines: int) -> None:
    """Go on in `seen`: the state, the line, where the last field in quotes opened, and the first one that is wrong."""
    state, line, opened = seen[_STATE], seen[_LINE], seen[_OPENED]
    for byte in data:
        is_line_end = byte in (10, 13)
        if state == _IN_QUOTES:
            if byte == 34:
                state = _AFTER_QUOTE
        elif byte == separator or is_line_end:
            state = _FIELD_START
        elif state == _AFTER_QUOTE and byte == 34:  # two quotes are one that is text
            state = _IN_QUOTES
        elif state == _AFTER_QUOTE:
            if line > opened and seen[_WRONG_FROM] == 0:
                seen[_WRONG_FROM] = opened
                seen[_WRONG_TO] = line
            state = _IN_FIELD
        elif state == _FIELD_START and byte == 34 and line > num_header_lines:
            state = _IN_QUOTES
            opened = line
        else:
            state = _IN_FIELD
        line += byte == 10
    seen[_STATE] = state
    seen[_LINE] = line
    seen[_OPENED] = opened


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
class DelimitedFormat:
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


def read_delimited(path: Path, how: DelimitedFormat) -> Iterator[RawBatch]:
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


def header_names(line: str, how: DelimitedFormat) -> tuple[str, ...]:
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
                option="column",
                value=name,
                remedy="give each column a name of its own",
            )


def unreadable(path: Path, error: Exception) -> DataError:
    """The error for an input file that cannot be read."""
    remedy = "check that the file is whole and of the named format (has_quotes=false if a quote is a plain character)"
    return DataError(f"cannot be read: {error}", option="input", value=str(path), remedy=remedy)


def _read_split(path: Path, names: tuple[str, ...], how: DelimitedFormat) -> Iterator[RawBatch]:
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
    how: DelimitedFormat,
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


def _blank_lines(path: Path, how: DelimitedFormat) -> NDArray[np.int64]:
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
            raise DataError(f"is of type {kind} in {path.name}", option="column", value=name, remedy=remedy)


def _offsets(column: pa.Array) -> NDArray[np.int32]:
    return np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]


QUARANTINE_FILE = "quarantine.csv"
TEXT_CHARACTERS = 500
"""Longer rows are cut in the file."""


class Quarantine:
    """Collects bad rows of all input files."""

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
            writer.writerows([file, row.line, row.reason, row.text[:TEXT_CHARACTERS]] for row in rows)
        self.reasons.update(row.reason for row in rows)

    def check(self, num_rows_read: int, max_bad_share: float, num_bad_before: int = 0, time_hint: str = "") -> None:
        """Raise if, after the first `num_bad_before` bad rows, more than `max_bad_share` of the rows read are bad.

        time_hint: what to do about times, where most of the rows are bad because of theirs.
        """
        num_bad = self.num_rows - num_bad_before
        if num_bad <= max_bad_share * num_rows_read:
            return
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.reasons.most_common())
        raise DataError(
            f"{num_bad:,} of {num_rows_read:,} rows are bad ({reasons}); the first is {self._example}",
            option="max_bad_share",
            value=max_bad_share,
            remedy=self._remedy(time_hint),
        )

    def _remedy(self, time_hint: str) -> str:
        check = "check the format and its columns"
        most = self.reasons.most_common(1)[0][0]
        if most in ABOUT_TIME and time_hint:
            check = time_hint
        elif most == AHEAD:
            check = "say what the times are (--log.time_unit), or let later ones pass (--log.max_ahead_s)"
        elif most in ABOUT_TIME:
            check = (
                "say what the times of a log are (--log.time_unit s, ms, us, ns, or iso for dates such as "
                "2026-10-25T12:00:00+02:00)"
            )
        elif most.endswith(NOT_A_NUMBER):
            check = "write numbers as 1234.5, without signs of thousands, currencies and units"
        return f"{check}, or allow more bad rows with --max_bad_share 1"

    def files(self) -> list[DataFile]:
        """The entry of the file, if there is one."""
        if not self.num_rows:
            return []
        return [describe_file(self._path.parent, self._path, self.num_rows)]
