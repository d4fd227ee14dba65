"""Reads JSON lines, plain or gzip: one object per line; nested fields have dotted names (`user.id`).

Every value is converted to text, as in a delimited file. A list becomes text with a mark before each of its values.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestrec.base.errors import DataError, did_you_mean
from nestrec.data.prepare.list_cells import as_cell_text, signatures_of_objects
from nestrec.data.prepare.raw_rows import RAW_LINE, SIGNATURE, BadRow, RawBatch, bad_row, first_line, read_lines
from nestrec.data.prepare.text_encoding import check_unicode

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")


class JsonLinesReader:
    """Reader of JSON lines; `check_columns` raises for columns that occurred in no line of any file."""

    def __init__(self, columns: Sequence[str], encoding: str = "utf-8"):
        self._columns = tuple(dict.fromkeys(columns))
        self._encoding = encoding
        self._seen: dict[str, None] = {}
        self._file = ""

    def read(self, path: Path) -> Iterator[RawBatch]:
        """Yield batches with the requested columns, the raw line and the row hash."""
        check_lines(path, self._encoding)
        self._file = path.name
        for lines, first, done in read_lines(path, self._encoding):
            yield self.parse_lines(path.name, lines, np.arange(first, first + len(lines)), done)

    def parse_lines(self, file: str, lines: Sequence[str], numbers: NDArray[np.int64], done: float = 1.0) -> RawBatch:
        """Parse lines into a batch.

        Args:
            file: Name of the file, for messages.
            lines: Text of the lines.
            numbers: Line numbers, for messages.
            done: Fraction of the file that has been read.
        """
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
        columns = {name: pa.array([row.get(name, "") for row in rows], pa.string()) for name in self._columns}
        columns[RAW_LINE] = pa.array(texts, pa.string())
        columns[SIGNATURE] = pa.array(signatures_of_objects(rows).view(np.int64))
        return RawBatch(file, np.array(good, dtype=np.int64), columns, tuple(bad), done).reject_undecodable_rows()

    def check_columns(self) -> None:
        """Raise for a requested column that no line had; a mistyped name would otherwise look like an empty column."""
        for name in self._columns:
            if self._seen and name not in self._seen:
                remedy = did_you_mean(name, self._seen)
                raise DataError(f"no line of {self._file} has this field", option="column", value=name, remedy=remedy)


def field_names(path: Path, encoding: str = "utf-8") -> tuple[str, ...]:
    """Return the fields of the first block of lines in order of appearance."""
    check_lines(path, encoding)
    for lines, _, _ in read_lines(path, encoding):
        return tuple(dict.fromkeys(name for line in lines for name in parse_line(line.strip()) or ()))
    return ()


def parse_line(line: str) -> dict[str, str] | None:
    """Return the values of a line as text by dotted name; None if the line is not a JSON object."""
    try:
        return _texts_of_line(line)
    except (ValueError, RecursionError):
        return None


def _texts_of_line(line: str) -> dict[str, str]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    texts = dict(_texts(value, ""))
    if "\\u" in line:  # only an escape sequence can contain an unpaired surrogate, which UTF-8 cannot encode
        check_unicode(text for pair in texts.items() for text in pair)
    return texts


def is_json(path: Path, encoding: str = "utf-8") -> bool:
    """Return whether a file contains JSON lines, by its name, or by its first line if the name is ambiguous."""
    name = path.name.removesuffix(".gz")
    if name.endswith(JSON_LINES_SUFFIXES):
        return True
    return not name.endswith((".csv", ".tsv", ".parquet")) and parse_line(first_line(path, encoding)) is not None


def check_lines(path: Path, encoding: str = "utf-8") -> None:
    """Raise for a file that is a single JSON value spread over several lines."""
    first = first_line(path, encoding).strip()
    if first in ("[", "{", "[{") or first.startswith("["):
        remedy = "write one object per line, for example with jq -c '.[]' FILE > FILE.jsonl"
        raise DataError(
            "the file is one JSON value, not one object per line", option="input", value=str(path), remedy=remedy
        )


def _texts(value: dict[str, Any], where: str) -> Iterator[tuple[str, str]]:
    for name, inner in value.items():
        path = f"{where}.{name}" if where else name
        if isinstance(inner, dict):
            yield from _texts(inner, path)
        else:
            yield path, as_cell_text(inner)
