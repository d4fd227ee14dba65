"""Defines `LogSource`, the input of `write_dataset`: raw rows of an event log, its schema, and its side tables.

A format plugin returns a `LogSource`. The functions of this module create batches from files and in-memory tables.
"""

import contextlib
import gzip
import hashlib
import itertools
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from nestrec.base.errors import DataError, UserError
from nestrec.base.files import parse_path
from nestrec.data.prepare.event_parser import EventColumns
from nestrec.data.prepare.raw_rows import DelimitedFormat, RawBatch, read_delimited, read_parquet
from nestrec.data.prepare.side_tables import SideSource

Batches = Callable[[], Iterator[tuple[RawBatch, float]]]
"""Returns a new iterator over the input: batches with the fraction of the input that has been read so far."""


@dataclass(frozen=True, slots=True)
class LogSource:
    """An event log in any format, with its schema and side tables."""

    name: str
    """Name of the dataset."""
    format: str
    """Name of the format."""
    columns: EventColumns
    """Schema of the events."""
    batches: Batches
    """Function that reads the raw rows from the start."""
    drops_duplicates: bool = False
    """Whether exact duplicate rows are dropped by default."""
    users: tuple[SideSource, ...] = ()
    """Side tables with features of users."""
    items: tuple[SideSource, ...] = ()
    """Side tables with features of items."""
    files: tuple[Path, ...] = ()
    """Files that contain the events."""
    notes: tuple[str, ...] = ()
    """Remarks on the input that are shown to the user and stored in the dataset card."""

    def checked_batches(self) -> Iterator[tuple[RawBatch, float]]:
        """Yield the batches; `EventParser` checks their columns later.

        Raises:
            UserError: The format returned something that is not a valid batch.
        """
        item: Any
        for item in self.batches():
            if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], RawBatch)):
                remedy = "`batches` must yield (RawBatch, fraction of the input that has been read)"
                raise self._format_error(f"`batches` of the format yields {type(item).__name__}", remedy)
            batch = item[0]
            for column, values in batch.columns.items():
                if not isinstance(values, pa.Array | pa.ChunkedArray):
                    problem = f"column {column!r} of {batch.file} is a {type(values).__name__}"
                    raise self._format_error(problem, "columns must be pyarrow arrays")
                if len(values) != batch.num_rows:
                    problem = f"column {column!r} of {batch.file} has {len(values)} values for {batch.num_rows} lines"
                    raise self._format_error(problem, "each row needs a line number and a value in every column")
            yield item

    def _format_error(self, problem: str, remedy: str) -> UserError:
        return UserError(problem, option="format", value=self.format, remedy=f"fix the format plugin: {remedy}")

    def digests(self, *, of_rows: bool = False) -> dict[str, str]:
        """Return the SHA-256 digests of the event files, by path relative to their common parent folder.

        Args:
            of_rows: Whether files without rows are left out, since their digests are all equal.
        """
        folder = os.path.commonpath([path.absolute().parent for path in self.files]) if self.files else ""
        has_header = self.format == "log" and not self.columns.log.column_names
        files = [path for path in self.files if not of_rows or _has_rows(path, has_header=has_header)]
        return {str(path.absolute().relative_to(folder)): sha256_of_file(path) for path in files}


def _has_rows(path: Path, *, has_header: bool) -> bool:
    """Return whether a file has rows after its header; unreadable files count as non-empty and fail when read."""
    try:
        if path.suffix == ".parquet":
            return bool(pq.read_metadata(path).num_rows)
        # Text mode handles all kinds of line ends; latin-1 decodes any byte, and the characters do not matter.
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="latin-1") as stream:
            lines = list(itertools.islice((line for line in stream if line.strip()), 2))
    except (OSError, EOFError, zlib.error, pa.ArrowInvalid):
        return True
    is_json = bool(lines) and lines[0].lstrip().startswith("{")
    return len(lines) > int(has_header and not is_json)


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 digest of a file in hexadecimal form."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def over_files(files: Sequence[Path], read: Callable[[Path], Iterator[RawBatch]]) -> Batches:
    """Return batches that read several files in order; progress is measured in bytes."""

    def batches() -> Iterator[tuple[RawBatch, float]]:
        sizes = [max(1, path.stat().st_size) for path in files]
        for i, path in enumerate(files):
            for batch in read(path):
                yield batch, (sum(sizes[:i]) + batch.fraction_read * sizes[i]) / sum(sizes)

    return batches


def delimited_files(files: Sequence[Path], text_format: DelimitedFormat) -> Batches:
    """Return batches that read delimited text files."""
    return over_files(files, lambda path: read_delimited(path, text_format))


def side_files(files: Sequence[Path], text_format: DelimitedFormat) -> Callable[[], Iterator[RawBatch]]:
    """Return a function that reads the files of a side table."""

    def batches() -> Iterator[RawBatch]:
        for path in files:
            yield from (read_parquet(path) if path.suffix == ".parquet" else read_delimited(path, text_format))

    return batches


class ArrowTable(Protocol):
    """An in-memory table of pyarrow, pandas, Polars or another library with the Arrow C stream interface."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


@contextlib.contextmanager
def input_as_path(value: Any, field: str) -> Iterator[Path]:
    """Yield the path of an input; an in-memory table is written to a temporary Parquet file for the duration.

    Args:
        value: A path or an in-memory table.
        field: Name of the argument, for error messages.
    """
    if not hasattr(value, "__arrow_c_stream__"):
        yield parse_path(value, field)
        return
    with tempfile.TemporaryDirectory(prefix="nestrec-") as folder:
        path = Path(folder) / "table.parquet"
        try:
            pq.write_table(pa.table(value), path)
        except pa.ArrowException as error:
            remedy = "convert its columns to text, numbers, times, or lists of them"
            raise DataError(
                f"the table cannot be written as Parquet: {error}",
                option=field,
                value=type(value).__name__,
                remedy=remedy,
            ) from error
        yield path


def name_without_gz(path: Path) -> str:
    """Return the file name without `.gz`."""
    return path.name.removesuffix(".gz")


def find_file(folder: Path, *names: str) -> Path | None:
    """Return the first of the names that exists in the folder, plain or gzip; None if there is none."""
    for name in names:
        for candidate in (folder / name, folder / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    return None


def require_input(path: Path) -> Path:
    """Return the path.

    Raises:
        DataError: The path does not exist.
    """
    if not path.exists():
        raise DataError(
            "the path does not exist", option="input", value=str(path), remedy="name an existing file or folder"
        )
    return path
