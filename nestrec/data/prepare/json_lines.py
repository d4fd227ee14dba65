"""Reads JSON lines: one object per line, nested fields by their dotted names."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestrec.base.errors import DataError, did_you_mean
from nestrec.data.prepare.list_cells import signatures_of_objects, text_of
from nestrec.data.prepare.raw_rows import SIGNATURE, WHOLE_LINE, BadRow, RawBatch, bad_row, first_line, read_lines
from nestrec.data.prepare.text_encoding import check_unicode

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")


class JsonLinesReader:
    """Reads files one after another; `check` then tells of columns that no line of any of them had."""

    def __init__(self, wanted: Sequence[str], encoding: str = "utf-8"):
        self._wanted = tuple(dict.fromkeys(wanted))
        self._encoding = encoding
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
                raise DataError(f"is a field of no line of {self._file}", option="column", value=name, remedy=remedy)


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
        raise DataError("is one JSON value, not an object a line", option="input", value=str(path), remedy=remedy)


def _texts(value: dict[str, Any], where: str) -> Iterator[tuple[str, str]]:
    for name, inner in value.items():
        path = f"{where}.{name}" if where else name
        if isinstance(inner, dict):
            yield from _texts(inner, path)
        else:
            yield path, text_of(inner)
