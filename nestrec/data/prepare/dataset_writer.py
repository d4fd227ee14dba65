"""Writes the Parquet files of a dataset (users and items) and its card with statistics.

`UsersWriter` takes rows in blocks of any size and writes Parquet row groups whose boundaries depend on the rows only.
So the same events give the same bytes, whatever memory limit the dataset was prepared with.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nestrec.data.dataset_card import (
    DataFile,
    DatasetCard,
    describe_file,
    length_statistics,
    log_histogram,
    popularity_statistics,
)
from nestrec.data.dataset_schema import COUNTS_SUFFIX
from nestrec.data.flat_arrays import offsets_of_lengths


def write_items(folder: Path, batches: Iterable[pa.Table]) -> DataFile:
    """Write `items.parquet` from tables in order of item id; at least one table is required, which may be empty."""
    path = folder / "items.parquet"
    num_rows = 0
    writer: pq.ParquetWriter | None = None
    for batch in batches:
        writer = writer or pq.ParquetWriter(path, batch.schema, compression="zstd")
        writer.write_table(batch)
        num_rows += batch.num_rows
    assert writer is not None
    writer.close()
    return describe_file(folder, path, num_rows)


def finish_sequences(
    folder: Path, card: DatasetCard, lengths: NDArray[Any], item_counts: NDArray[np.int64], files: list[DataFile]
) -> DatasetCard:
    """Add statistics and files to the card of a dataset of sequences, and save it.

    Args:
        folder: Folder of the dataset.
        card: Card without statistics and files.
        lengths: Number of events per user.
        item_counts: Number of events per item.
        files: All files of the dataset.
    """
    complete = dataclasses.replace(
        card,
        lengths=length_statistics(lengths),
        popularity=popularity_statistics(item_counts),
        length_histogram=log_histogram(lengths),
        popularity_histogram=log_histogram(item_counts),
        files=tuple(files),
    )
    complete.save(folder)
    return complete


ROWS_PER_GROUP = 1024
EVENTS_PER_GROUP = 1 << 18
GROUPS_PER_PART = 256


@dataclass(frozen=True, slots=True)
class UserBlock:
    """A block of consecutive rows of the users table."""

    lengths: NDArray[np.int32]
    """Number of events per row."""
    scalars: dict[str, pa.Array]
    """Columns with one value per row."""
    lists: dict[str, NDArray[Any]]
    """List columns with one value per event, as the concatenated values of all rows."""
    ragged: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    """List columns with several values per event; `<name>_counts` in `lists` has the number of values per event."""

    @property
    def num_rows(self) -> int:
        return int(self.lengths.size)

    def ragged_offsets(self, name: str) -> NDArray[np.int64]:
        """Return the offset of each row's first value in a ragged column, followed by the number of values."""
        return offsets_of_lengths(self.lists[name + COUNTS_SUFFIX])[offsets_of_lengths(self.lengths)]


class UsersWriter:
    """Writer of `users/part-*.parquet`; the bytes depend on the rows only, not on their division into blocks."""

    def __init__(self, folder: Path, fields: list[pa.Field], list_sizes: dict[str, int] | None = None):
        """Create the folder `users`.

        Args:
            folder: Folder of the dataset.
            fields: Columns of the table.
            list_sizes: Number of values per row of the list columns with a fixed size; other lists have one value per
                event.
        """
        self._folder = folder
        self._schema = pa.schema(fields)
        self._list_sizes = list_sizes or {}
        self._pending: list[UserBlock] = []
        self._writer: pq.ParquetWriter | None = None
        self._parts: list[tuple[Path, int]] = []
        self._groups_in_part = 0
        (folder / "users").mkdir()

    def append(self, block: UserBlock) -> None:
        self._pending.append(block)
        if sum(b.num_rows for b in self._pending) >= ROWS_PER_GROUP or self._pending_events() >= EVENTS_PER_GROUP:
            self._write_groups(is_last=False)

    def close(self) -> list[DataFile]:
        """Write the remaining rows and return the entries of all files."""
        self._write_groups(is_last=True)
        if not self._parts:
            self._open_part()
        self._close_part()
        return [describe_file(self._folder, path, num_rows) for path, num_rows in self._parts]

    def _pending_events(self) -> int:
        return sum(int(b.lengths.sum()) for b in self._pending)

    def _write_groups(self, *, is_last: bool) -> None:
        if not self._pending:
            return
        block = concat_blocks(self._pending)
        offsets = offsets_of_lengths(block.lengths)
        start = 0
        while start < block.num_rows:
            end, is_full = _group_end(offsets, start)
            if not is_full and not is_last:
                break
            self._write_group(_slice_block(block, offsets, start, end, self._list_sizes))
            start = end
        rest = _slice_block(block, offsets, start, block.num_rows, self._list_sizes)
        self._pending = [rest] if rest.num_rows else []

    def _write_group(self, block: UserBlock) -> None:
        if self._writer is None or self._groups_in_part == GROUPS_PER_PART:
            self._close_part()
            self._open_part()
        assert self._writer is not None
        self._writer.write_table(self._table(block), row_group_size=block.num_rows)
        path, num_rows = self._parts[-1]
        self._parts[-1] = (path, num_rows + block.num_rows)
        self._groups_in_part += 1

    def _table(self, block: UserBlock) -> pa.Table:
        event_offsets = offsets_of_lengths(block.lengths).astype(np.int32)
        columns = []
        for field in self._schema:
            if field.name in block.scalars:
                columns.append(block.scalars[field.name].cast(field.type))
                continue
            size = self._list_sizes.get(field.name)
            offsets = event_offsets if size is None else np.arange(block.num_rows + 1, dtype=np.int32) * np.int32(size)
            if field.name in block.ragged:
                offsets = block.ragged_offsets(field.name).astype(np.int32)
            values = pa.array({**block.lists, **block.ragged}[field.name], type=field.type.value_type)
            columns.append(pa.ListArray.from_arrays(pa.array(offsets), values, type=field.type))
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _open_part(self) -> None:
        path = self._folder / "users" / f"part-{len(self._parts):05d}.parquet"
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd", use_dictionary=False)
        self._parts.append((path, 0))
        self._groups_in_part = 0

    def _close_part(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def concat_blocks(blocks: list[UserBlock]) -> UserBlock:
    """Concatenate blocks."""
    if len(blocks) == 1:
        return blocks[0]
    return UserBlock(
        lengths=np.concatenate([b.lengths for b in blocks]),
        scalars={name: pa.concat_arrays([b.scalars[name] for b in blocks]) for name in blocks[0].scalars},
        lists={name: np.concatenate([b.lists[name] for b in blocks]) for name in blocks[0].lists},
        ragged={name: np.concatenate([b.ragged[name] for b in blocks]) for name in blocks[0].ragged},
    )


def _group_end(offsets: NDArray[np.int64], start: int) -> tuple[int, bool]:
    """Return the end of the row group that starts at `start`, and whether it has reached a size limit."""
    by_events = int(np.searchsorted(offsets, offsets[start] + EVENTS_PER_GROUP))
    end = min(start + ROWS_PER_GROUP, max(by_events, start + 1))
    return min(end, offsets.size - 1), end <= offsets.size - 1


def _slice_block(
    block: UserBlock, offsets: NDArray[np.int64], start: int, end: int, list_sizes: dict[str, int]
) -> UserBlock:
    lists = {}
    for name, values in block.lists.items():
        size = list_sizes.get(name)
        bounds = (offsets[start], offsets[end]) if size is None else (start * size, end * size)
        lists[name] = values[bounds[0] : bounds[1]]
    ragged = {}
    for name, values in block.ragged.items():
        starts = block.ragged_offsets(name)
        ragged[name] = values[starts[start] : starts[end]]
    scalars = {name: column.slice(start, end - start) for name, column in block.scalars.items()}
    return UserBlock(block.lengths[start:end], scalars, lists, ragged)
