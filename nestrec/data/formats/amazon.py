"""Reads Amazon reviews: CSV of user, item, rating and time (with or without a header), or reviews as JSON lines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nestrec.base.config import config
from nestrec.base.errors import DataError
from nestrec.data.formats.format_spec import log_format
from nestrec.data.prepare.event_parser import EventColumns
from nestrec.data.prepare.log_source import LogSource, delimited_files, name_without_gz, over_files, require_input
from nestrec.data.prepare.prepare_options import LogColumns, PrepareOptions, TimeUnit
from nestrec.data.prepare.raw_rows import BadRow, DelimitedFormat, RawBatch, first_line, header_names, read_lines
from nestrec.data.prepare.text_encoding import check_unicode

NAMES_OF = {
    "user": ("user", "user_id", "reviewerID", "userId"),
    "item": ("item", "parent_asin", "asin", "item_id", "productId"),
    "rating": ("rating", "overall", "score"),
    "timestamp": ("timestamp", "unixReviewTime", "time"),
}
"""Field names in the editions of 2014, 2018 and 2023."""
FIRST_MS = 100_000_000_000
"""Times from this number on are in milliseconds (the edition of 2023), smaller ones in seconds."""


@config
class AmazonOptions(PrepareOptions):
    """Options for Amazon reviews."""

    min_rating: float | None = None
    """Minimum rating of an event; events with a lower rating are removed. None keeps all events."""
    positive_rating: float | None = 4.0
    """Minimum rating at which an event gets the action `positive`; none does not derive this action."""
    review_columns: tuple[str, ...] = ("user", "item", "rating", "timestamp")
    """Column names, in order, of a file without a header (in the edition of 2018 the first column is the item)."""


def open_amazon(path: Path, options: AmazonOptions) -> LogSource:
    """Open a file of reviews; the time unit (seconds or milliseconds) is inferred from the first review."""
    first = first_line(require_input(path))
    if first.startswith("{"):
        batches = over_files([path], _read_json)
        unit = _time_unit(str(_fields(_parse(first) or {})[3]))
        log = LogColumns(rating="rating", time="timestamp", time_unit=unit)
    else:
        text_format, log = _csv_columns(path, first, options)
        batches = delimited_files([path], text_format)
    columns = EventColumns.of(log, min_rating=options.min_rating, positive_rating=options.positive_rating)
    return LogSource(name_without_gz(path), "amazon_csv", columns, batches, files=(path,))


def _csv_columns(path: Path, first: str, options: AmazonOptions) -> tuple[DelimitedFormat, LogColumns]:
    cells = header_names(first, DelimitedFormat())
    known = {name for names in NAMES_OF.values() for name in names}
    has_header = bool(known & set(cells))
    names = cells if has_header else options.review_columns
    if len(cells) != len(names):
        remedy = "name the columns in order with --review_columns"
        raise DataError(
            f"the file has {len(cells)} columns, expected {len(names)}", option="input", value=str(path), remedy=remedy
        )
    columns_found = {what: next((n for n in options_ if n in names), None) for what, options_ in NAMES_OF.items()}
    for what in ("user", "item", "timestamp"):
        if columns_found[what] is None:
            remedy = f"name this column {' or '.join(NAMES_OF[what])}"
            raise DataError(f"the file has no {what} column", option="input", value=str(path), remedy=remedy)
    position = list(names).index(str(columns_found["timestamp"]))
    second = _second_line(path) if has_header else first
    unit = _time_unit(header_names(second, DelimitedFormat())[position] if second.count(",") >= position else "")
    log = LogColumns(
        user=str(columns_found["user"]),
        item=str(columns_found["item"]),
        rating=columns_found["rating"],
        time=columns_found["timestamp"],
        time_unit=unit,
    )
    return DelimitedFormat(names=() if has_header else names), log


def _time_unit(first_time: str) -> TimeUnit:
    return "ms" if first_time.strip().isdigit() and int(first_time) >= FIRST_MS else "s"


def _second_line(path: Path) -> str:
    for lines, _, _ in read_lines(path):
        return lines[1].rstrip("\r\n") if len(lines) > 1 else ""
    return ""


def _read_json(path: Path) -> Iterator[RawBatch]:
    for lines, first, done in read_lines(path):
        rows, numbers, bad = [], [], []
        for number, line in enumerate(lines, start=first):
            review = _parse(line)
            if review is not None:
                rows.append(_fields(review))
                numbers.append(number)
            elif line.strip():
                bad.append(BadRow(number, "not a JSON object", line.strip()))
        cells = list(zip(*rows, strict=True)) or [(), (), (), ()]
        columns = {name: pa.array(column, pa.string()) for name, column in zip(NAMES_OF, cells, strict=True)}
        batch = RawBatch(path.name, np.array(numbers, dtype=np.int64), columns, tuple(bad), done)
        yield batch.reject_undecodable_rows()


def _parse(line: str) -> dict[str, Any] | None:
    try:
        review = json.loads(line)
        if not isinstance(review, dict):
            return None
        check_unicode(_fields(review))
    except (ValueError, RecursionError):
        return None
    return review


def _fields(review: dict[str, Any]) -> tuple[str, ...]:
    """Return user, item, rating and time as text; missing values are empty."""
    return tuple(str(next((review[n] for n in names if review.get(n) is not None), "")) for names in NAMES_OF.values())


FORMAT = log_format("Amazon reviews of 2014, 2018 or 2023: CSV or JSON lines.", AmazonOptions, open_amazon)
