"""What a format gives to `write_dataset`: raw rows, the meaning of their columns, and side tables."""

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
from nestrec.base.files import given_path
from nestrec.data.prepare.event_parser import EventColumns
from nestrec.data.prepare.raw_rows import DelimitedFormat, RawBatch, read_delimited, read_parquet
from nestrec.data.prepare.side_tables import SideSource

Batches = Callable[[], Iterator[tuple[RawBatch, float]]]
"""A pass over the input: batches with the share of the whole input that has been read."""


@dataclass(frozen=True, slots=True)
class LogSource:
    """A log of events in some format."""

    name: str
    format: str
    columns: EventColumns
    batches: Batches
    drops_duplicates: bool = False
    users: tuple[SideSource, ...] = ()
    items: tuple[SideSource, ...] = ()
    files: tuple[Path, ...] = ()
    """That hold the events."""
    notes: tuple[str, ...] = ()
    """What a person should know of the input."""

    def checked_batches(self) -> Iterator[tuple[RawBatch, float]]:
        """The batches; a UserError at the first that is none. (Which columns it has, `EventParser` checks.)"""
        given: Any
        for given in self.batches():
            if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], RawBatch)):
                remedy = "let them give (RawBatch, share of the input)"
                raise self._mistake(f"its batches give {type(given).__name__}", remedy)
            batch = given[0]
            for column, values in batch.columns.items():
                if not isinstance(values, pa.Array | pa.ChunkedArray):
                    problem = f"column {column!r} of {batch.file} is a {type(values).__name__}"
                    raise self._mistake(problem, "give columns as pyarrow arrays")
                if len(values) != batch.num_rows:
                    problem = f"column {column!r} of {batch.file} has {len(values)} values for {batch.num_rows} lines"
                    raise self._mistake(problem, "give each row its line and a value in every column")
            yield given

    def _mistake(self, problem: str, remedy: str) -> UserError:
        return UserError(problem, option="format", value=self.format, remedy=f"mend the format: {remedy}")

    def digests(self, *, of_rows: bool = False) -> dict[str, str]:
        """Of the files that hold the events, by name: below the folder of all, where files of several have one name.

        of_rows: only of those that have any, since files without are all the same.
        """
        folder = os.path.commonpath([path.absolute().parent for path in self.files]) if self.files else ""
        has_header = self.format == "log" and not self.columns.log.names
        files = [path for path in self.files if not of_rows or _has_rows(path, has_header=has_header)]
        return {str(path.absolute().relative_to(folder)): sha256_of_file(path) for path in files}


def _has_rows(path: Path, *, has_header: bool) -> bool:
    """Whether there is more in a file than a header. Of what cannot be read, whoever reads it tells."""
    try:
        if path.suffix == ".parquet":
            return bool(pq.read_metadata(path).num_rows)
        # As text, so that a line may end as on any system; of any encoding, since nobody reads what it says.
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="latin-1") as stream:
            lines = list(itertools.islice((line for line in stream if line.strip()), 2))
    except (OSError, EOFError, zlib.error, pa.ArrowInvalid):
        return True
    is_json = bool(lines) and lines[0].lstrip().startswith("{")
    return len(lines) > int(has_header and not is_json)


def sha256_of_file(path: Path) -> str:
    """Digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def over_files(files: Sequence[Path], read: Callable[[Path], Iterator[RawBatch]]) -> Batches:
    """A pass over several files in order; progress is by their bytes."""

    def batches() -> Iterator[tuple[RawBatch, float]]:
        sizes = [max(1, path.stat().st_size) for path in files]
        for i, path in enumerate(files):
            for batch in read(path):
                yield batch, (sum(sizes[:i]) + batch.done * sizes[i]) / sum(sizes)

    return batches


def delimited_files(files: Sequence[Path], how: DelimitedFormat) -> Batches:
    """A pass over delimited text files."""
    return over_files(files, lambda path: read_delimited(path, how))


def side_files(files: Sequence[Path], how: DelimitedFormat) -> Callable[[], Iterator[RawBatch]]:
    """The rows of the files of a side table."""

    def batches() -> Iterator[RawBatch]:
        for path in files:
            yield from (read_parquet(path) if path.suffix == ".parquet" else read_delimited(path, how))

    return batches


class ArrowTable(Protocol):
    """A table in memory, of pyarrow, pandas, Polars or another library with Arrow's C interface."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


@contextlib.contextmanager
def given_input(value: Any, field: str) -> Iterator[Path]:
    """Yields the path that a script names; a table in memory becomes a Parquet file for as long as it is read."""
    if not hasattr(value, "__arrow_c_stream__"):
        yield given_path(value, field)
        return
    with tempfile.TemporaryDirectory(prefix="nestrec-") as folder:
        path = Path(folder) / "table.parquet"
        try:
            pq.write_table(pa.table(value), path)
        except pa.ArrowException as error:
            remedy = "give columns of text, numbers, times, or lists of them"
            raise DataError(
                f"cannot be written as Parquet: {error}", option=field, value=type(value).__name__, remedy=remedy
            ) from error
        yield path


def plain_name(path: Path) -> str:
    """File name without `.gz`."""
    return path.name.removesuffix(".gz")


def find_file(folder: Path, *names: str) -> Path | None:
    """The first of the names that exists in the folder, plain or gzip."""
    for name in names:
        for candidate in (folder / name, folder / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    return None


def require_input(path: Path) -> Path:
    """The path, or an error if nothing is there."""
    if not path.exists():
        raise DataError("does not exist", option="input", value=str(path), remedy="name a file or folder that exists")
    return path
