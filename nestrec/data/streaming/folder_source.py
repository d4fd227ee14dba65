"""A folder into which files are dropped: Parquet, CSV or JSON lines, read one after the other in order of name.

Files must appear whole: write them under a name that begins with a dot, and rename them. A file that was read is done,
by its name (with or without .gz: it may be packed then); one that comes later is read whatever its name.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nestrec.base.errors import DataError, UserError
from nestrec.data.prepare.input_files import SUFFIXES, LogReader, is_log_file, skipped_name
from nestrec.data.prepare.log_source import plain_name
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.prepare.raw_rows import DelimitedFormat, RawBatch
from nestrec.data.streaming.stream_source import (
    StreamChunk,
    StreamPosition,
    StreamRows,
    StreamSource,
    StreamSourceSpec,
    no_rows,
)

NUM_SIZES = 16
"""Of so many files that were read last it is known whether they have changed since."""
_WHAT_IS_READ = f"names of files end in {', '.join(SUFFIXES)}, also with .gz"
_WHOLE = "files must appear whole (write them under a name that begins with a dot, then rename them)"


@dataclass(slots=True)
class _OpenFile:
    """A file that is read in part."""

    name: str
    row: int
    """Rows that were read"""
    batches: Iterator[RawBatch]
    left: RawBatch | None = None
    """What was read of the file and not given out yet"""
    num_left: int = 0
    """Rows of the batch that `left` is the rest of"""
    done: float = 0.0
    """Share of the file's bytes before that batch"""
    done_with_left: float = 0.0
    """Share of the file's bytes with it"""

    def next_batch(self) -> RawBatch | None:
        """Read another batch into `left`."""
        batch = next(self.batches, None)
        if batch is not None:
            self.done, self.done_with_left, self.num_left = self.done_with_left, batch.done, batch.num_rows
        self.left = batch
        return batch

    @property
    def share_left(self) -> float:
        """Share of the file's bytes that is still to be given out, as if all rows of a batch were of one size."""
        rows = 0 if self.left is None else self.left.num_rows
        return 1.0 - self.done_with_left + (self.done_with_left - self.done) * rows / max(1, self.num_left)


class FolderSource(StreamSource):
    """Position: names of the files that are done, the file that is not, how many of its rows were read, and the sizes
    of the last files."""

    def __init__(self, folder: Path, log: LogColumns, wanted: tuple[str, ...]):
        self._folder = folder
        self._wanted = wanted
        self._how = DelimitedFormat(
            separator=log.separator.replace("\\t", "\t"),
            names=log.names,
            has_quotes=log.has_quotes,
            encoding=log.encoding,
        )
        self._open: _OpenFile | None = None

    def read(self, position: StreamPosition, max_rows: int) -> StreamRows | None:
        while pieces := self.pieces(position, max_rows, 1):
            rows = self.fetch(pieces[0])
            if not rows.is_empty:
                return rows
            position = rows.position
        return None

    def pieces(self, position: StreamPosition, max_rows: int, number: int) -> list[StreamChunk]:
        done = list(position.get("done", ()))
        row = int(position.get("row", 0))
        waiting = self._waiting(done)
        found = list[StreamChunk]()
        if (current := position.get("file")) is not None:  # whatever has come before it by name
            waiting = [current, *(name for name in waiting if name != current)]
        sizes = self._checked(position.get("sizes", {}))
        for name in waiting[:number]:
            with self._told():
                sizes = _newest({**sizes, name: (self._folder / name).stat().st_size})
            at = row if name == current else 0
            where = {"done": done, "sizes": sizes, "file": name, "row": at, "max_rows": max_rows}
            found.append(StreamChunk(len(done), where))
            done = sorted([*done, name])
        return found

    def fetch(self, piece: StreamChunk) -> StreamRows:
        done, sizes, name, row = (piece.what[part] for part in ("done", "sizes", "file", "row"))
        with self._told():
            batch = self._next(name, row, piece.what["max_rows"])
            came = (self._folder / name).stat()
        if came.st_size != sizes[name]:
            raise self._changed(name, sizes[name], came.st_size)
        # When it was written is what its writer says; when it came here is known.
        came_ms = np.full(batch.num_rows, round(1000 * max(came.st_mtime, came.st_ctime)))
        with self._told():
            is_over = not batch.num_rows or self._is_over()
        if is_over:
            self._open = None
            return StreamRows(batch, {"done": sorted([*done, name]), "sizes": sizes}, came.st_mtime, came_ms=came_ms)
        behind = {"done": done, "sizes": sizes, "file": name, "row": row + batch.num_rows}
        return StreamRows(batch, behind, came.st_mtime, False, came_ms)

    def identity(self) -> str:
        return f"folder:{self._folder.resolve()}"

    def lag(self, position: StreamPosition) -> dict[str, float]:
        waiting = self._waiting(list(position.get("done", ())))
        sizes = []
        for name in waiting:
            with contextlib.suppress(FileNotFoundError):  # taken away meanwhile
                sizes.append((self._folder / name).stat().st_size * self._share_left(name, position))
        return {"files": float(len(sizes)), "bytes": float(sum(sizes))}

    def _share_left(self, name: str, position: StreamPosition) -> float:
        """Return the share of a file that is still to be read; 1 if another rank reads the file."""
        is_open = self._open is not None and (self._open.name, self._open.row) == (name, position.get("row"))
        return self._open.share_left if self._open is not None and is_open else 1.0

    def skipped(self) -> dict[str, str]:
        """Returns one entry for each ending of names that are not read."""
        with self._told():
            others = [path for path in self._folder.iterdir() if not path.name.startswith((".", "_"))]
        others = [path for path in others if not is_log_file(path)]
        return {path.suffix: f"{skipped_name(path, self._folder)} is skipped; {_WHAT_IS_READ}" for path in others}

    def _waiting(self, done: list[str]) -> list[str]:
        """Files that are not done, in order of name."""
        known = {plain_name(Path(name)) for name in done}
        with self._told():
            found = [path for path in self._folder.iterdir() if not path.name.startswith(".") and is_log_file(path)]
        return sorted(path.name for path in found if plain_name(path) not in known)

    def _checked(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes of files that were read, where those that are still there have them."""
        for name, before in sizes.items():
            with contextlib.suppress(FileNotFoundError):  # done, and taken away
                now = (self._folder / name).stat().st_size
                if now != before:
                    raise self._changed(name, before, now)
        return dict(sizes)

    def _changed(self, name: str, before: int, now: int) -> UserError:
        return UserError(
            f"had {before:,} bytes when it was read and has {now:,} now: what came later would be lost",
            option="SOURCE",
            value=str(self._folder / name),
            remedy=f"{_WHOLE}; put what is new into a file of its own, and make this one as it was, or take it away "
            "where all of it was read",
        )

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What the system says against it is an error for people, on all ranks."""
        try:
            yield
        except DataError as error:
            remedy = f"{error.remedy}; {_WHOLE}; started again, it goes on where it stood"
            raise DataError(error.problem, option=error.option, value=error.value, remedy=remedy) from error
        except OSError as error:
            remedy = "put it back: files stay until they have been read; started again, it goes on where it stood"
            where = str(error.filename or self._folder)
            raise UserError(
                f"cannot be read: {error.strerror or error}", option="SOURCE", value=where, remedy=remedy
            ) from error

    def _next(self, name: str, row: int, max_rows: int) -> RawBatch:
        """At most so many rows of a file behind the first `row`, with the bad ones before them; none at its end, where
        bad ones may be left."""
        if self._open is None or (self._open.name, self._open.row) != (name, row):
            batches = LogReader(self._how, self._wanted, signs_rows=True).read(self._folder / name)
            self._open = _OpenFile(name, row, batches)
            _skip(self._open, row)
        file = self._open
        left = file.next_batch() if file.left is None else file.left
        while left is not None and not left.num_rows:  # a position counts rows: bad ones come with those behind them
            after = file.next_batch()
            if after is None:
                return left
            left = replace(after, bad=left.bad + after.bad)
        if left is None:
            return no_rows(name)
        part, file.left = cut(left, max_rows)
        file.row = row + part.num_rows
        return part

    def _is_over(self) -> bool:
        """Whether the file that is open has no more rows."""
        assert self._open is not None
        return self._open.left is None and self._open.next_batch() is None


def _newest(sizes: dict[str, int]) -> dict[str, int]:
    return dict(list(sizes.items())[-NUM_SIZES:])


def _skip(file: _OpenFile, row: int) -> None:
    """Leave out the first `row` rows of a file."""
    while row > 0 and (batch := file.next_batch()) is not None:
        file.left = cut(batch, row)[1]
        row -= batch.num_rows


def cut(batch: RawBatch, number: int) -> tuple[RawBatch, RawBatch | None]:
    """The first rows of a batch, with the bad ones, and the others."""
    if batch.num_rows <= number:
        return batch, None
    first = {name: column.slice(0, number) for name, column in batch.columns.items()}
    rest = {name: column.slice(number) for name, column in batch.columns.items()}
    return (
        RawBatch(batch.file, batch.lines[:number], first, batch.bad, batch.done),
        RawBatch(batch.file, batch.lines[number:], rest, (), batch.done),
    )


def _open_folder(address: str, log: LogColumns, wanted: tuple[str, ...]) -> StreamSource:
    return FolderSource(Path(address), log, wanted)


SOURCE = StreamSourceSpec("a folder into which files are dropped", lambda address: Path(address).is_dir(), _open_folder)
