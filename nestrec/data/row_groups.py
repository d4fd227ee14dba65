"""Row groups of the users table, decoded to numpy and kept in a cache bounded in bytes."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nestrec.base.errors import DamagedError

_TEXT_BYTES = 50
"""about what a short text takes"""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Columns of one row group: scalar columns, and list columns as (values, offsets)."""

    scalars: dict[str, NDArray[Any]]
    lists: dict[str, tuple[NDArray[Any], NDArray[np.int64]]]

    @property
    def num_bytes(self) -> int:
        shared = {id(offsets): offsets.nbytes for _, offsets in self.lists.values()}
        values = sum(values.nbytes for values, _ in self.lists.values())
        return values + sum(shared.values()) + sum(_scalar_bytes(s) for s in self.scalars.values())


@dataclass(frozen=True, slots=True)
class UsersFile:
    """A Parquet file of the users table, its footer read once."""

    path: Path
    metadata: pq.FileMetaData

    @staticmethod
    def open(path: Path) -> "UsersFile":
        try:
            return UsersFile(path, pq.read_metadata(path))
        except (OSError, pa.ArrowException) as error:
            raise damaged(path, error) from error

    def group_rows(self) -> list[int]:
        return [self.metadata.row_group(g).num_rows for g in range(self.metadata.num_row_groups)]

    def decoded_bytes(self, columns: Sequence[str]) -> int:
        """What these columns of numbers take in memory."""
        arrow, total = self.metadata.schema.to_arrow_schema(), 0
        for name in columns:
            kind = arrow.field(name).type
            element = kind.value_type if pa.types.is_list(kind) else kind
            size = element.bit_width // 8 if pa.types.is_primitive(element) else _TEXT_BYTES
            total += size * self._num_values(name)
        return total

    def _num_values(self, name: str) -> int:
        groups = (self.metadata.row_group(g) for g in range(self.metadata.num_row_groups))
        chunks = (group.column(c) for group in groups for c in range(group.num_columns))
        return sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.split(".")[0] == name)

    def read_column(self, name: str) -> NDArray[Any]:
        """A scalar column of the whole part."""
        return np.asarray(self.read_arrow(name).to_numpy(zero_copy_only=False))

    def read_arrow(self, name: str) -> pa.Array:
        """The same as Arrow has it."""
        try:
            # Not `pq.read_table`, which takes a folder called `a=b` for a column.
            with pq.ParquetFile(self.path, metadata=self.metadata) as file:
                column = file.read(columns=[name], use_threads=False).column(name)
        except (OSError, pa.ArrowException) as error:
            raise damaged(self.path, error) from error
        joined = column.combine_chunks()
        if isinstance(joined, pa.ChunkedArray):
            return pa.concat_arrays(joined.chunks) if joined.num_chunks else pa.array([], column.type)
        return joined

    def bounds(self, name: str) -> list[int]:
        """Values of a column of whole numbers that enclose all others, by the statistics of its row groups."""
        found: list[int] = []
        for group in range(self.metadata.num_row_groups):
            row_group = self.metadata.row_group(group)
            for index in range(row_group.num_columns):
                column = row_group.column(index)
                is_named = column.path_in_schema.partition(".")[0] == name
                if is_named and column.statistics is not None and column.statistics.has_min_max:
                    found += [int(column.statistics.min), int(column.statistics.max)]
        return found

    def read_group(self, group: int, columns: list[str]) -> RowGroup:
        try:
            # A file handle of its own: one ParquetFile must not be read by two threads at a time.
            with pq.ParquetFile(self.path, metadata=self.metadata) as file:
                table = file.read_row_group(group, columns=columns, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise damaged(self.path, error) from error
        return _decode(table)


class RowGroupCache:
    """Least recently used row groups up to a number of bytes. Threads may share it; each waits for the other's load."""

    def __init__(self, parts: list[UsersFile], columns: list[str], max_bytes: int):
        self._parts, self._columns, self._max_bytes = parts, columns, max_bytes
        self._place = [(part, g) for part in parts for g in range(part.metadata.num_row_groups)]
        self._entries: OrderedDict[int, RowGroup] = OrderedDict()
        self._loading: dict[int, Future[RowGroup]] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_loads = 0

    def get(self, group: int) -> RowGroup:
        """Row group by its number over all parts."""
        with self._lock:
            found = self._entries.get(group)
            if found is not None:
                self._entries.move_to_end(group)
                return found
            future = self._loading.get(group)
            is_mine = future is None
            if future is None:
                future = self._loading[group] = Future()
        if is_mine:
            self._load(group, future)
        return future.result()

    def _load(self, group: int, future: "Future[RowGroup]") -> None:
        part, index = self._place[group]
        try:
            loaded = part.read_group(index, self._columns)
        except BaseException as error:
            with self._lock:
                del self._loading[group]
            future.set_exception(error)
            return
        with self._lock:
            del self._loading[group]
            self._entries[group] = loaded
            self.num_bytes += loaded.num_bytes
            self.num_loads += 1
            while self.num_bytes > self._max_bytes and len(self._entries) > 1:
                self.num_bytes -= self._entries.popitem(last=False)[1].num_bytes
        future.set_result(loaded)


def damaged(path: Path, error: Exception) -> DamagedError:
    """The error for a file of a dataset that is missing or cannot be read."""
    return DamagedError(
        f"cannot be read: {error}", field="dataset file", value=str(path), remedy="prepare the dataset again"
    )


def _decode(table: pa.Table) -> RowGroup:
    scalars: dict[str, NDArray[Any]] = {}
    lists: dict[str, tuple[NDArray[Any], NDArray[np.int64]]] = {}
    event_offsets: NDArray[np.int64] | None = None
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        if not pa.types.is_list(column.type):
            scalars[name] = column.to_numpy(zero_copy_only=False)
            continue
        offsets = column.offsets.to_numpy().astype(np.int64)
        offsets -= offsets[0]
        if event_offsets is not None and np.array_equal(event_offsets, offsets):
            offsets = event_offsets
        event_offsets = offsets
        lists[name] = (column.flatten().to_numpy(zero_copy_only=False), offsets)
    return RowGroup(scalars, lists)


def _scalar_bytes(column: NDArray[Any]) -> int:
    return sum(len(text) + 50 for text in column) if column.dtype == object else column.nbytes
