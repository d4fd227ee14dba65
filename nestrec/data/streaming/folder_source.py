"""Stream source that reads files dropped into a folder: Parquet, CSV or JSON lines, in order of their names.

Files must appear atomically: write them under a name that starts with a dot, then rename them. A file counts as read by
its name (with or without .gz, so it may be compressed later); a file that appears later is read whatever its name.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nestrec.base.errors import DataError, UserError
from nestrec.data.prepare.input_files import SUFFIXES, LogReader, is_log_file, skipped_name
from nestrec.data.prepare.log_source import name_without_gz
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.prepare.raw_rows import DelimitedFormat, RawBatch
from nestrec.data.streaming.stream_source import (
    StreamChunk,
    StreamPosition,
    StreamRows,
    StreamSource,
    StreamSourceSpec,
    empty_batch,
)

NUM_SIZES = 16
"""Number of most recently read files whose sizes are checked for later changes."""
_SUPPORTED_NAMES = f"names of files end in {', '.join(SUFFIXES)}, also with .gz"
_ATOMIC_RENAME = "files must appear atomically (write them under a name that starts with a dot, then rename them)"


@dataclass(slots=True)
class _OpenFile:
    """A file that has been read partially."""

    name: str
    row: int
    """Number of rows that have been returned."""
    batches: Iterator[RawBatch]
    remaining: RawBatch | None = None
    """Rows that have been read from the file but not returned yet."""
    num_batch_rows: int = 0
    """Number of rows of the batch that `remaining` is the rest of."""
    fraction_before: float = 0.0
    """Fraction of the file's bytes before that batch."""
    fraction_after: float = 0.0
    """Fraction of the file's bytes up to the end of that batch."""

    def next_batch(self) -> RawBatch | None:
        """Read the next batch into `remaining`."""
        batch = next(self.batches, None)
        if batch is not None:
            self.fraction_before, self.fraction_after, self.num_batch_rows = (
                self.fraction_after,
                batch.fraction_read,
                batch.num_rows,
            )
        self.remaining = batch
        return batch

    @property
    def fraction_left(self) -> float:
        """Fraction of the file's bytes that has not been returned, assuming rows of equal size within a batch."""
        rows = 0 if self.remaining is None else self.remaining.num_rows
        return (
            1.0
            - self.fraction_after
            + (self.fraction_after - self.fraction_before) * rows / max(1, self.num_batch_rows)
        )


class FolderSource(StreamSource):
    """Stream source of a folder.

    Its position consists of the names of finished files, the current file, the number of rows read from it, and the
    sizes of the most recent files.
    """

    def __init__(self, folder: Path, log: LogColumns, columns: tuple[str, ...]):
        self._folder = folder
        self._columns = columns
        self._format = DelimitedFormat(
            separator=log.separator.replace("\\t", "\t"),
            names=log.column_names,
            has_quotes=log.has_quotes,
            encoding=log.encoding,
        )
        self._open_file: _OpenFile | None = None

    def read(self, position: StreamPosition, max_rows: int) -> StreamRows | None:
        while chunks := self.list_chunks(position, max_rows, 1):
            rows = self.fetch(chunks[0])
            if not rows.is_empty:
                return rows
            position = rows.position
        return None

    def list_chunks(self, position: StreamPosition, max_rows: int, num_ranks: int) -> list[StreamChunk]:
        done = list(position.get("done", ()))
        row = int(position.get("row", 0))
        waiting = self._list_waiting(done)
        chunks = list[StreamChunk]()
        if (current := position.get("file")) is not None:  # finish it first, even if earlier names have appeared
            waiting = [current, *(name for name in waiting if name != current)]
        sizes = self._check_sizes(position.get("sizes", {}))
        for name in waiting[:num_ranks]:
            with self._report_errors():
                sizes = _last_sizes({**sizes, name: (self._folder / name).stat().st_size})
            first_row = row if name == current else 0
            request = {"done": done, "sizes": sizes, "file": name, "row": first_row, "max_rows": max_rows}
            chunks.append(StreamChunk(len(done), request))
            done = sorted([*done, name])
        return chunks

    def fetch(self, chunk: StreamChunk) -> StreamRows:
        done, sizes, name, row = (chunk.request[part] for part in ("done", "sizes", "file", "row"))
        with self._report_errors():
            batch = self._read_batch(name, row, chunk.request["max_rows"])
            file_stat = (self._folder / name).stat()
        if file_stat.st_size != sizes[name]:
            raise self._changed_error(name, sizes[name], file_stat.st_size)
        # The writer can set the modification time, but not the time of the rename into the folder.
        arrived_ms = np.full(batch.num_rows, round(1000 * max(file_stat.st_mtime, file_stat.st_ctime)))
        with self._report_errors():
            is_finished = not batch.num_rows or self._is_at_end()
        if is_finished:
            self._open_file = None
            return StreamRows(
                batch, {"done": sorted([*done, name]), "sizes": sizes}, file_stat.st_mtime, arrived_ms=arrived_ms
            )
        next_position = {"done": done, "sizes": sizes, "file": name, "row": row + batch.num_rows}
        return StreamRows(batch, next_position, file_stat.st_mtime, False, arrived_ms)

    def identity(self) -> str:
        return f"folder:{self._folder.resolve()}"

    def lag(self, position: StreamPosition) -> dict[str, float]:
        waiting = self._list_waiting(list(position.get("done", ())))
        sizes = []
        for name in waiting:
            with contextlib.suppress(FileNotFoundError):  # deleted since the folder was listed
                sizes.append((self._folder / name).stat().st_size * self._fraction_left(name, position))
        return {"files": float(len(sizes)), "bytes": float(sum(sizes))}

    def _fraction_left(self, name: str, position: StreamPosition) -> float:
        """Return the fraction of a file that has not been read; 1 if another rank reads the file."""
        is_open = self._open_file is not None and (self._open_file.name, self._open_file.row) == (
            name,
            position.get("row"),
        )
        return self._open_file.fraction_left if self._open_file is not None and is_open else 1.0

    def skipped(self) -> dict[str, str]:
        """Return one message for each file name suffix that is not read."""
        with self._report_errors():
            others = [path for path in self._folder.iterdir() if not path.name.startswith((".", "_"))]
        others = [path for path in others if not is_log_file(path)]
        return {path.suffix: f"{skipped_name(path, self._folder)} is skipped; {_SUPPORTED_NAMES}" for path in others}

    def _list_waiting(self, done: list[str]) -> list[str]:
        """Return the names of files that have not been read completely, sorted."""
        known = {name_without_gz(Path(name)) for name in done}
        with self._report_errors():
            paths = [path for path in self._folder.iterdir() if not path.name.startswith(".") and is_log_file(path)]
        return sorted(path.name for path in paths if name_without_gz(path) not in known)

    def _check_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of files that were read, after checking that existing files still have them."""
        for name, before in sizes.items():
            with contextlib.suppress(FileNotFoundError):  # deleted after it was read
                now = (self._folder / name).stat().st_size
                if now != before:
                    raise self._changed_error(name, before, now)
        return dict(sizes)

    def _changed_error(self, name: str, before: int, now: int) -> UserError:
        return UserError(
            f"the file had {before:,} bytes when it was read and has {now:,} now; later rows would be lost",
            option="SOURCE",
            value=str(self._folder / name),
            remedy=f"{_ATOMIC_RENAME}; move new rows to a new file and restore this one, or delete it if it was read "
            "completely",
        )

    @contextlib.contextmanager
    def _report_errors(self) -> Iterator[None]:
        """Convert I/O errors to user errors, which are raised on all ranks."""
        try:
            yield
        except DataError as error:
            remedy = f"{error.remedy}; {_ATOMIC_RENAME}; a restart resumes from the last position"
            raise DataError(error.problem, option=error.option, value=error.value, remedy=remedy) from error
        except OSError as error:
            remedy = (
                "restore the file, since files must exist until they are read; a restart resumes from the last position"
            )
            path = str(error.filename or self._folder)
            raise UserError(
                f"the source cannot be read: {error.strerror or error}", option="SOURCE", value=path, remedy=remedy
            ) from error

    def _read_batch(self, name: str, row: int, max_rows: int) -> RawBatch:
        """Return at most `max_rows` rows of a file after the first `row` rows, with the bad rows before them.

        At the end of the file the batch has no rows, but may contain bad rows.
        """
        if self._open_file is None or (self._open_file.name, self._open_file.row) != (name, row):
            batches = LogReader(self._format, self._columns, has_signatures=True).read(self._folder / name)
            self._open_file = _OpenFile(name, row, batches)
            _skip_rows(self._open_file, row)
        file = self._open_file
        remaining = file.next_batch() if file.remaining is None else file.remaining
        while (
            remaining is not None and not remaining.num_rows
        ):  # positions count good rows, so bad rows are returned with the rows after them
            next_batch = file.next_batch()
            if next_batch is None:
                return remaining
            remaining = replace(next_batch, bad=remaining.bad + next_batch.bad)
        if remaining is None:
            return empty_batch(name)
        batch, file.remaining = split_batch(remaining, max_rows)
        file.row = row + batch.num_rows
        return batch

    def _is_at_end(self) -> bool:
        """Return whether the open file has no more rows."""
        assert self._open_file is not None
        return self._open_file.remaining is None and self._open_file.next_batch() is None


def _last_sizes(sizes: dict[str, int]) -> dict[str, int]:
    return dict(list(sizes.items())[-NUM_SIZES:])


def _skip_rows(file: _OpenFile, row: int) -> None:
    """Skip the first `row` rows of a file."""
    while row > 0 and (batch := file.next_batch()) is not None:
        file.remaining = split_batch(batch, row)[1]
        row -= batch.num_rows


def split_batch(batch: RawBatch, num_rows: int) -> tuple[RawBatch, RawBatch | None]:
    """Split a batch into its first `num_rows` rows, including all bad rows, and the rest."""
    if batch.num_rows <= num_rows:
        return batch, None
    first = {name: column.slice(0, num_rows) for name, column in batch.columns.items()}
    rest = {name: column.slice(num_rows) for name, column in batch.columns.items()}
    return (
        RawBatch(batch.file, batch.lines[:num_rows], first, batch.bad, batch.fraction_read),
        RawBatch(batch.file, batch.lines[num_rows:], rest, (), batch.fraction_read),
    )


def _open_folder(address: str, log: LogColumns, columns: tuple[str, ...]) -> StreamSource:
    return FolderSource(Path(address), log, columns)


SOURCE = StreamSourceSpec("files dropped into a folder", lambda address: Path(address).is_dir(), _open_folder)
