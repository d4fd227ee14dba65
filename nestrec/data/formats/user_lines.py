"""Reads the dataset files of SASRec and S3Rec.

SASRec: `user item` on each line, in time order per user. S3Rec: one line per user with the user id and then the item
ids from oldest to newest, and optionally a file with attributes of items.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nestrec.base.config import config
from nestrec.base.errors import DataError
from nestrec.data.formats.format_spec import log_format
from nestrec.data.prepare.event_parser import EventColumns
from nestrec.data.prepare.log_source import (
    LogSource,
    delimited_files,
    find_file,
    name_without_gz,
    over_files,
    require_input,
)
from nestrec.data.prepare.prepare_options import LogColumns, PrepareOptions
from nestrec.data.prepare.raw_rows import BadRow, DelimitedFormat, RawBatch, first_line, read_lines, unreadable_file
from nestrec.data.prepare.side_tables import SideColumn, SideSource
from nestrec.data.prepare.text_encoding import check_unicode


def open_pairs(path: Path, options: PrepareOptions) -> LogSource:
    """Open a SASRec file; fields are separated by a space or a tab, and events keep the order of the file."""
    separator = "\t" if "\t" in first_line(require_input(path)) else " "
    text_format = DelimitedFormat(separator=separator, names=("user", "item"), has_quotes=False)
    columns = EventColumns.of(LogColumns())
    batches = delimited_files([path], text_format)
    return LogSource(name_without_gz(path), "sasrec_pairs", columns, batches, files=(path,))


SASREC_PAIRS_FORMAT = log_format("SASRec files: `user item` on each line, in time order.", PrepareOptions, open_pairs)


@config
class UserLinesOptions(PrepareOptions):
    """Options for S3Rec files."""

    item_attributes: str | None = None
    """JSON file that maps item ids to lists of attribute ids; by default found by name in the folder of the input."""


def open_user_lines(path: Path, options: UserLinesOptions) -> LogSource:
    """Open an S3Rec file; events keep the order of the line."""
    require_input(path)
    attributes = _attributes_file(path, options)
    items = (
        (SideSource(_attribute_rows(attributes), "item", (SideColumn("attributes", "categories"),)),)
        if attributes
        else ()
    )
    return LogSource(
        name_without_gz(path),
        "user_lines",
        EventColumns.of(LogColumns()),
        over_files([path], _read),
        items=items,
        files=(path,),
    )


def _read(path: Path) -> Iterator[RawBatch]:
    for lines, first_number, done in read_lines(path):
        text = pc.utf8_trim_whitespace(pa.array([line.rstrip("\r\n") for line in lines], pa.string()))
        words = pc.utf8_split_whitespace(text)
        counts = pc.list_value_length(words).to_numpy(zero_copy_only=False).astype(np.int64)
        is_blank = pc.binary_length(text).to_numpy(zero_copy_only=False) == 0
        numbers = first_number + np.arange(len(lines), dtype=np.int64)
        bad = [
            BadRow(int(numbers[i]), "user without items", lines[i].strip())
            for i in np.flatnonzero(counts == 1)
            if not is_blank[i]
        ]
        starts = np.cumsum(counts) - counts
        is_item = np.ones(int(counts.sum()), dtype=np.bool_)
        is_item[starts] = False
        flat = words.flatten()
        row_of_item = np.repeat(np.arange(len(lines)), counts - 1)
        users = flat.take(pa.array(starts)).take(pa.array(row_of_item))
        columns = {"user": users, "item": flat.filter(pa.array(is_item))}
        yield RawBatch(path.name, numbers[row_of_item], columns, tuple(bad), done).reject_undecodable_rows()


def _attributes_file(path: Path, options: UserLinesOptions) -> Path | None:
    if options.item_attributes is not None:
        return require_input(Path(options.item_attributes))
    stem = name_without_gz(path).removesuffix(".txt")
    return find_file(path.parent, f"{stem}_item2attributes.json", f"{stem.removesuffix('_lines')}_item2attributes.json")


def _attribute_rows(path: Path) -> Callable[[], Iterator[RawBatch]]:
    def batches() -> Iterator[RawBatch]:
        try:
            text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            attributes = json.loads(text)
            check_unicode([json.dumps(attributes, ensure_ascii=False)])
        except (OSError, ValueError, EOFError) as error:
            raise unreadable_file(path, error) from error
        if not isinstance(attributes, dict):
            raise DataError(
                "the file must contain a JSON object that maps item ids to lists",
                option="item_attributes",
                value=str(path),
                remedy="check the file",
            )
        joined = [",".join(str(a) for a in values) for values in attributes.values()]
        lines = np.ones(len(joined), dtype=np.int64)
        yield RawBatch(
            path.name,
            lines,
            {"item": pa.array(list(attributes), pa.string()), "attributes": pa.array(joined, pa.string())},
        )

    return batches


USER_LINES_FORMAT = log_format(
    "S3Rec files: one line per user, the user id and then the item ids in order.", UserLinesOptions, open_user_lines
)
