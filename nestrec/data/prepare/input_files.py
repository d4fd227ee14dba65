"""The files of a log or a table of one's own: found by name, folder or pattern, and read by their kind.

JSON lines, plain or gzip: one object a line. Fields of objects inside are named with dots (`user.id`).

Every value becomes text, as in a delimited file; a list has a mark before each of its values. Lines need not have the
same fields, so the reader is told which columns are wanted: where a line lacks one, it is blank there.
"""

import codecs
import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestrec.base.errors import DataError, did_you_mean
from nestrec.data.prepare.list_cells import signatures_of_objects, text_of
from nestrec.data.prepare.log_source import plain_name, require_input
from nestrec.data.prepare.raw_rows import (
    SIGNATURE,
    WHOLE_LINE,
    BadRow,
    Delimited,
    RawBatch,
    bad_row,
    check_unicode,
    first_line,
    header_names,
    read_delimited,
    read_lines,
    read_parquet,
)

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")


class JsonLines:
    """Reads files one after another; `check` then tells of columns that no line of any of them had."""

    def __init__(self, wanted: Sequence[str], encoding: str = "utf-8"):
        self._wanted, self._encoding = tuple(dict.fromkeys(wanted)), encoding
        self._seen: dict[str, None] = {}
        self._file = ""

    def read(self, path: Path) -> Iterator[RawBatch]:
        """Rows with the wanted columns, and one with the whole line."""
        check_lines(path, self._encoding)
        self._file = path.name
        for lines, first, done in read_lines(path, self._encoding):
            yield self.rows(path.name, lines, np.arange(first, first + len(lines)), done)

    def rows(self, file: str, lines: Sequence[str], numbers: NDArray[np.int64], done: float = 1.0) -> RawBatch:
        """Rows of lines from anywhere; numbers: of each, for people."""
        rows: list[dict[str, str]] = []
        good: list[int] = []
        bad: list[BadRow] = []
        texts: list[str] = []
        for number, line in zip(numbers.tolist(), lines, strict=True):
            text = line.strip().removeprefix("\ufeff")
            if not text:
                continue
            try:
                rows.append(_texts_of_line(text))
                texts.append(text)
                good.append(number)
            except UnicodeError:
                bad.append(bad_row(number, "not Unicode: half of a surrogate pair", text))
            except (ValueError, RecursionError):
                bad.append(bad_row(number, "not a JSON object", text))
        for row in rows:
            self._seen |= dict.fromkeys(row)
        columns = {name: pa.array([row.get(name, "") for row in rows], pa.string()) for name in self._wanted}
        columns[WHOLE_LINE] = pa.array(texts, pa.string())
        columns[SIGNATURE] = pa.array(signatures_of_objects(rows).view(np.int64))
        return RawBatch(file, np.array(good, dtype=np.int64), columns, tuple(bad), done).without_marked_rows()

    def check(self) -> None:
        """Raise for a wanted column that no line had: nothing would tell a mistyped name from an empty column."""
        for name in self._wanted:
            if self._seen and name not in self._seen:
                remedy = did_you_mean(name, self._seen)
                raise DataError(f"is a field of no line of {self._file}", field="column", value=name, remedy=remedy)


def field_names(path: Path, encoding: str = "utf-8") -> tuple[str, ...]:
    """Fields of the first block of lines, in order of appearance."""
    check_lines(path, encoding)
    for lines, _, _ in read_lines(path, encoding):
        return tuple(dict.fromkeys(name for line in lines for name in parse_line(line.strip()) or ()))
    return ()


def parse_line(line: str) -> dict[str, str] | None:
    """Returns texts by dotted name; None if the line is not an object."""
    try:
        return _texts_of_line(line)
    except (ValueError, RecursionError):
        return None


def _texts_of_line(line: str) -> dict[str, str]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    texts = dict(_texts(value, ""))
    if "\\u" in line:  # only an escape can hold half of a surrogate pair, which no other part can store
        check_unicode(text for pair in texts.items() for text in pair)
    return texts


def is_json(path: Path, encoding: str = "utf-8") -> bool:
    """By its name, or where that says nothing by its first line."""
    name = path.name.removesuffix(".gz")
    if name.endswith(JSON_LINES_SUFFIXES):
        return True
    return not name.endswith((".csv", ".tsv", ".parquet")) and parse_line(first_line(path, encoding)) is not None


def check_lines(path: Path, encoding: str = "utf-8") -> None:
    """Refuse a file that is one JSON value over many lines."""
    first = first_line(path, encoding).strip()
    if first in ("[", "{", "[{") or first.startswith("["):
        remedy = "write one object a line: jq -c '.[]' FILE > FILE.jsonl"
        raise DataError("is one JSON value, not an object a line", field="input", value=str(path), remedy=remedy)


def _texts(value: dict[str, Any], where: str) -> Iterator[tuple[str, str]]:
    for name, inner in value.items():
        path = f"{where}.{name}" if where else name
        if isinstance(inner, dict):
            yield from _texts(inner, path)
        else:
            yield path, text_of(inner)


SUFFIXES = (".csv", ".tsv", ".txt", ".dat", ".inter", ".log", ".parquet", *JSON_LINES_SUFFIXES)


_WHAT_IS_READ = f"names end in {', '.join(SUFFIXES)}, also with .gz; folders are read if they are called column=value"
_SKIPPED_NAMED = 10


def find_files(path: Path) -> tuple[str, list[Path]]:
    """A name for people, and a file, all files of a folder, or those that a pattern fits, in order of name."""
    if path.is_file():
        return plain_name(path), [path]
    if path.is_dir():
        files = sorted(entry for entry in _in_folder(path) if is_log_file(entry))
        return path.resolve().name, _some(path, files, _remedy_of_folder(path))
    if not glob.has_magic(str(path)):
        require_input(path)
    files = sorted(Path(found) for found in glob.glob(str(path), recursive=True) if Path(found).is_file())
    fixed = [part for part in path.parts[:-1] if not glob.has_magic(part)]
    return (fixed[-1] if fixed else path.name), _some(path, files, "check the pattern; ** goes through folders")


def notes_on_skipped(path: Path) -> tuple[str, ...]:
    """Returns a note that lists what `find_files` leaves out of a folder or a pattern, if there is anything."""
    if path.is_file():
        return ()
    found = _in_folder(path) if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    skipped = sorted(entry for entry in found if path.is_dir() or not entry.exists())
    names = [skipped_name(entry, path) for entry in skipped if not (path.is_dir() and is_log_file(entry))]
    if not names:
        return ()
    more = f" and {len(names) - _SKIPPED_NAMED:,} more" if len(names) > _SKIPPED_NAMED else ""
    return (f"skipped in {path}: {', '.join(names[:_SKIPPED_NAMED])}{more}; {_WHAT_IS_READ}",)


def skipped_name(entry: Path, folder: Path) -> str:
    """Returns the name of an entry of a folder, with the reason if the name is not the reason."""
    name = str(entry.relative_to(folder)) if entry.is_relative_to(folder) else str(entry)
    if entry.is_dir():
        return f"{name}/"
    return name if entry.exists() else f"{name} (a link to a file that does not exist)"


def is_log_file(path: Path) -> bool:
    """Returns whether a file of a folder is read, by its name."""
    return path.is_file() and plain_name(path).endswith(SUFFIXES)


def _in_folder(folder: Path) -> Iterator[Path]:
    """Yields what is in a folder and its partitions: folders called `column=value`, as Spark writes them.

    Names that begin with a dot or an underscore are those of files that programs write about their own work.
    """
    for inner in folder.iterdir():
        if inner.is_dir() and "=" in inner.name:
            yield from _in_folder(inner)
        elif not inner.name.startswith((".", "_")):
            yield inner


def _remedy_of_folder(folder: Path) -> str:
    below = next((f for f in sorted(folder.rglob("*")) if f.is_file() and plain_name(f).endswith(SUFFIXES)), None)
    if below is None:
        return f"files end in {', '.join(SUFFIXES)}, also with .gz"
    return f"they lie in folders below it: name them with a pattern, such as '{folder}/**/*{below.suffix}'"


_SIGNATURES = {
    b"\x1f\x8b": "is compressed by gzip",
    b"BZh": "is compressed by bzip2",
    b"PK\x03\x04": "is a zip archive or a spreadsheet",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd",
    b"\xfd7zXZ": "is compressed by xz",
    b"PAR1": "is a Parquet file",
    b"\xff\xfe": "is text of 16 bits a character",
    b"\xfe\xff": "is text of 16 bits a character",
}
_REMEDIES = {
    b"\x1f\x8b": "give it a name that ends in .gz",
    b"PAR1": "give it a name that ends in .parquet",
    b"\xff\xfe": "say so: --log.encoding utf-16",
    b"\xfe\xff": "say so: --log.encoding utf-16",
}


def check_text(file: Path, encoding: str) -> None:
    """Refuse a file that its name calls text, plain or gzip, and its first bytes do not."""
    if file.suffix == ".gz" or codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
        return
    with require_input(file).open("rb") as stream:
        start = stream.read(8)
    for signature, what in _SIGNATURES.items():
        if start.startswith(signature):
            remedy = _REMEDIES.get(signature, "unpack it, or pack it with gzip")
            raise DataError(f"{what}, not a log as text", field="input", value=str(file), remedy=remedy)


class LogFiles:
    """Reads files of any kind; JSON lines give the wanted columns, the others all that they have."""

    def __init__(self, how: Delimited, wanted: Sequence[str], *, signs_rows: bool = False):
        """signs_rows: whether duplicates are looked for, among files of all kinds."""
        self._how, self._wanted, self._json = how, tuple(wanted), JsonLines(wanted, how.encoding)
        self._signs_rows = signs_rows

    def read(self, file: Path) -> Iterator[RawBatch]:
        if file.suffix == ".parquet":
            return read_parquet(file, self._wanted, signs_rows=self._signs_rows)
        check_text(file, self._how.encoding)
        if is_json(file, self._how.encoding):
            return self._json.read(file)
        return read_delimited(file, delimited(file, self._how))

    def check(self) -> None:
        """After all files: raise for a wanted column that no JSON line had."""
        self._json.check()


def column_names(file: Path, how: Delimited) -> tuple[str, ...]:
    """Of a file of any kind."""
    if file.suffix == ".parquet":
        return tuple(next((batch.columns for batch in read_parquet(file)), {}))
    check_text(file, how.encoding)
    if is_json(file, how.encoding):
        return field_names(file, how.encoding)
    return how.names or header_names(first_line(file, how.encoding), delimited(file, how))


def delimited(file: Path, how: Delimited) -> Delimited:
    """`how`, with a tab for a .tsv file where nothing else was said."""
    if how.separator != "," or not plain_name(file).endswith(".tsv"):
        return how
    return Delimited("\t", how.names, how.has_quotes, how.encoding, how.skip_lines)


def _some(path: Path, files: list[Path], remedy: str) -> list[Path]:
    if not files:
        raise DataError("holds no log files", field="input", value=str(path), remedy=remedy)
    return files
