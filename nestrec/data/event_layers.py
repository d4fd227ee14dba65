"""Layers of a dataset: the prepared files (the base layer), and one layer per append.

A layer has one row for each user with events in it. A user's sequence is the union of all layers, sorted by time;
events with equal times, or without times, are in layer order, which is the order of arrival.

Row groups of the users table are decoded to numpy arrays and kept in an LRU cache with a size limit in bytes.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nestrec.base.errors import CorruptFileError
from nestrec.data.dataset_card import DatasetCard, Feature, LayerEntry
from nestrec.data.dataset_schema import ACTIONS, COUNTS_SUFFIX, EVENT_PREFIX, ITEM_IDS, LENGTH, TIMESTAMPS_MS, USER_ID
from nestrec.data.flat_arrays import copy_segments, offsets_of_lengths, order_events

_TEXT_BYTES = 50
"""Approximate memory of a short text, in bytes."""


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
    """A Parquet file of the users table; its footer is read once."""

    path: Path
    metadata: pq.FileMetaData

    @staticmethod
    def open(path: Path) -> "UsersFile":
        try:
            return UsersFile(path, pq.read_metadata(path))
        except (OSError, pa.ArrowException) as error:
            raise corrupt_file_error(path, error) from error

    def group_rows(self) -> list[int]:
        return [self.metadata.row_group(g).num_rows for g in range(self.metadata.num_row_groups)]

    def decoded_bytes(self, columns: Sequence[str]) -> int:
        """Return the decoded size of these columns in bytes."""
        arrow = self.metadata.schema.to_arrow_schema()
        total = 0
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
        """Read a scalar column of the complete file."""
        return np.asarray(self.read_arrow(name).to_numpy(zero_copy_only=False))

    def read_arrow(self, name: str) -> pa.Array:
        """Read a scalar column of the complete file as an Arrow array."""
        try:
            # `pq.read_table` would interpret a folder named `a=b` as a partition column.
            with pq.ParquetFile(self.path, metadata=self.metadata) as file:
                column = file.read(columns=[name], use_threads=False).column(name)
        except (OSError, pa.ArrowException) as error:
            raise corrupt_file_error(self.path, error) from error
        joined = column.combine_chunks()
        if isinstance(joined, pa.ChunkedArray):
            return pa.concat_arrays(joined.chunks) if joined.num_chunks else pa.array([], column.type)
        return joined

    def bounds(self, name: str) -> list[int]:
        """Return values that bound an integer column, from the statistics of the row groups."""
        values: list[int] = []
        for group in range(self.metadata.num_row_groups):
            row_group = self.metadata.row_group(group)
            for index in range(row_group.num_columns):
                column = row_group.column(index)
                is_named = column.path_in_schema.partition(".")[0] == name
                if is_named and column.statistics is not None and column.statistics.has_min_max:
                    values += [int(column.statistics.min), int(column.statistics.max)]
        return values

    def read_group(self, group: int, columns: list[str]) -> RowGroup:
        try:
            # Open a separate file handle: a ParquetFile must not be read by two threads at a time.
            with pq.ParquetFile(self.path, metadata=self.metadata) as file:
                table = file.read_row_group(group, columns=columns, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise corrupt_file_error(self.path, error) from error
        return _decode(table)


class RowGroupCache:
    """LRU cache of row groups with a size limit in bytes. Thread-safe; concurrent requests share one load."""

    def __init__(self, parts: list[UsersFile], columns: list[str], max_bytes: int):
        self._parts = parts
        self._columns = columns
        self._max_bytes = max_bytes
        self._locations = [(part, g) for part in parts for g in range(part.metadata.num_row_groups)]
        self._entries: OrderedDict[int, RowGroup] = OrderedDict()
        self._loading: dict[int, Future[RowGroup]] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_loads = 0

    def get(self, group: int) -> RowGroup:
        """Return a row group by its index over all files."""
        with self._lock:
            cached = self._entries.get(group)
            if cached is not None:
                self._entries.move_to_end(group)
                return cached
            future = self._loading.get(group)
            is_loader = future is None
            if future is None:
                future = self._loading[group] = Future()
        if is_loader:
            self._load(group, future)
        return future.result()

    def _load(self, group: int, future: "Future[RowGroup]") -> None:
        part, index = self._locations[group]
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


def corrupt_file_error(path: Path, error: Exception) -> CorruptFileError:
    """Return the error for a dataset file that is missing or cannot be read."""
    return CorruptFileError(
        f"the file cannot be read: {error}", option="dataset file", value=str(path), remedy="prepare the dataset again"
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


Ints = NDArray[np.int64]
Lists = dict[str, tuple[NDArray[Any], Ints]]
COUNTS_FILE, ITEMS_FILE = "counts.parquet", "items.parquet"
_PART = re.compile(r"users/part-\d+\.parquet")


class EventLayer:
    """The files of one layer; their footers are read once."""

    def __init__(self, folder: Path, card: DatasetCard, entry: LayerEntry, *, is_base: bool):
        self.folder = folder / entry.folder
        self.entry = entry
        self._card = card
        names = [file.path.removeprefix(entry.folder) for file in card.files_of(entry)]
        self.names = frozenset(names)
        self.parts = [UsersFile.open(self.folder / name) for name in names if _PART.fullmatch(name)]
        self.group_bounds = offsets_of_lengths(np.array([n for p in self.parts for n in p.group_rows()], np.int64))
        """(G + 1,) first row of each row group, followed by the number of rows."""
        self.users: Ints | None = None if is_base else self.column(USER_ID).astype(np.int64)
        """User ids of the rows, ascending; None if row numbers are user ids (base layer)."""

    @property
    def num_rows(self) -> int:
        return int(self.group_bounds[-1])

    def column(self, name: str) -> NDArray[Any]:
        """Read a scalar column of all rows."""
        return np.concatenate([part.read_column(name) for part in self.parts])

    def texts(self, name: str) -> pa.Array:
        """Read a text column of all rows as an Arrow array."""
        return pa.concat_arrays([part.read_arrow(name) for part in self.parts])

    def lengths(self) -> NDArray[np.int32]:
        return self.column(LENGTH).astype(np.int32)

    def find(self, users: Ints) -> tuple[Ints, Ints]:
        """Return (indices into `users`, rows of the layer) of the users that have a row in this layer."""
        if self.users is None:
            user_indices = np.flatnonzero(users < self.num_rows)
            return user_indices, users[user_indices]
        rows = np.searchsorted(self.users, users)
        within = np.flatnonzero(rows < self.users.size)
        user_indices = within[self.users[rows[within]] == users[within]]
        return user_indices, rows[user_indices]

    def table(self, name: str) -> pa.Table | None:
        """Read one of the small tables of the layer; None if the layer does not have it."""
        return read_table(self.folder / name) if name in self.names else None


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of one layer for some of the requested users."""

    user_indices: Ints
    """Indices of the rows' users among the requested users."""
    scalars: dict[str, NDArray[Any]]
    lists: Lists


@dataclass(frozen=True, slots=True)
class MergedRows:
    """Rows merged from several layers."""

    scalars: dict[str, NDArray[Any]]
    lists: Lists
    layer_of_event: NDArray[np.int64]
    """Index of the layer of each event."""


def merge(layers: Sequence[LayerRows], users: Ints, ragged: frozenset[str]) -> MergedRows:
    """Merge the rows of users over layers. User features are taken from the first layer that contains the user.

    Args:
        layers: Rows of each layer, oldest layer first.
        users: Requested users.
        ragged: Columns with several values per event.
    """
    num = users.size
    width = len(layers)
    lengths = np.zeros((num, width), np.int64)
    for number, layer in enumerate(layers):
        lengths[layer.user_indices, number] = np.diff(layer.lists[ITEM_IDS][1])
    segments = offsets_of_lengths(lengths.ravel())
    offsets = np.ascontiguousarray(segments[::width]) if num else np.zeros(1, np.int64)
    row_of_event = np.repeat(np.arange(num), lengths.sum(axis=1))
    joined = {
        name: _concat_layers(layers, name, segments, width) for name in layers[0].lists if is_event_column(name, ragged)
    }
    layer_of_event = np.repeat(np.tile(np.arange(width), num), lengths.ravel())
    order = None
    if TIMESTAMPS_MS in joined:
        order = order_events(row_of_event, num, [joined[TIMESTAMPS_MS]])
        order = None if np.array_equal(order, np.arange(order.size)) else order
    lists: Lists = {}
    for name in ragged & set(layers[0].lists):
        lists[name] = _merge_ragged(layers, name, joined[name + COUNTS_SUFFIX], offsets, order, (num, width))
    for name, values in joined.items():
        lists[name] = (values if order is None else values[order], offsets)
    scalars, user_lists = _merge_user_columns(layers, users, ragged)
    scalars |= {LENGTH: np.diff(offsets).astype(np.int32)} if LENGTH in scalars else {}
    merged_lists = {name: (lists | user_lists)[name] for name in layers[0].lists}
    return MergedRows(scalars, merged_lists, layer_of_event if order is None else layer_of_event[order])


def is_event_column(name: str, ragged: frozenset[str]) -> bool:
    """Return whether a list column has one value per event."""
    return name in (ITEM_IDS, TIMESTAMPS_MS, ACTIONS) or (name.startswith(EVENT_PREFIX) and name not in ragged)


def ragged_columns(features: Sequence[Feature]) -> frozenset[str]:
    """Return the columns with several values per event."""
    return frozenset(feature.column for feature in features if feature.is_list)


def columns_needed_to_merge(card: DatasetCard) -> list[str]:
    """Return the columns that are required to merge rows of several layers."""
    times = [TIMESTAMPS_MS] if card.has_timestamps else []
    return [ITEM_IDS, *times, *(name + COUNTS_SUFFIX for name in sorted(ragged_columns(card.event_features)))]


def _concat_layers(layers: Sequence[LayerRows], name: str, segments: Ints, width: int) -> NDArray[Any]:
    """Concatenate the values of all layers per row, in layer order."""
    out = np.empty(int(segments[-1]), dtype=layers[0].lists[name][0].dtype)
    for number, layer in enumerate(layers):
        values, offsets = layer.lists[name]
        copy_segments(
            values, offsets, np.arange(layer.user_indices.size), out, segments, layer.user_indices * width + number
        )
    return out


def _merge_ragged(  # noqa: PLR0917
    layers: Sequence[LayerRows],
    name: str,
    counts: NDArray[Any],
    offsets: Ints,
    order: Ints | None,
    shape: tuple[int, int],
) -> tuple[NDArray[Any], Ints]:
    """Merge a column with several values per event; `counts` are values per event, before sorting by time."""
    lengths = np.zeros(shape, np.int64)
    for number, layer in enumerate(layers):
        lengths[layer.user_indices, number] = np.diff(layer.lists[name][1])
    values = _concat_layers(layers, name, offsets_of_lengths(lengths.ravel()), shape[1])
    starts = offsets_of_lengths(counts)
    if order is not None:
        out = np.empty_like(values)
        out_starts = offsets_of_lengths(counts[order])
        copy_segments(values, starts, order, out, out_starts, np.arange(order.size))
        values = out
        starts = out_starts
    return values, starts[offsets]


def _merge_user_columns(
    layers: Sequence[LayerRows], users: Ints, ragged: frozenset[str]
) -> tuple[dict[str, NDArray[Any]], Lists]:
    """Merge the columns that describe users instead of events."""
    first = layers[0]
    scalars = {name: np.empty(users.size, dtype=column.dtype) for name, column in first.scalars.items()}
    for layer in reversed(layers):
        for name, out in scalars.items():
            out[layer.user_indices] = layer.scalars[name]
    lists: Lists = {}
    for name in first.lists:
        if is_event_column(name, ragged) or name in ragged:
            continue
        lengths = np.zeros(users.size, np.int64)
        source = np.full(users.size, -1)
        for number, layer in reversed(list(enumerate(layers))):
            lengths[layer.user_indices] = np.diff(layer.lists[name][1])
            source[layer.user_indices] = number
        offsets = offsets_of_lengths(lengths)
        out = np.empty(int(offsets[-1]), dtype=first.lists[name][0].dtype)
        for number, layer in enumerate(layers):
            rows = np.flatnonzero(source[layer.user_indices] == number)
            copy_segments(*layer.lists[name], rows, out, offsets, layer.user_indices[rows])
        lists[name] = (out, offsets)
    return scalars, lists


def merged_items(layers: Sequence[EventLayer]) -> pa.Table:
    """Return the items table of all layers: new items are appended, and event counts are summed."""
    tables = [table for layer in layers if (table := layer.table(ITEMS_FILE)) is not None]
    if len(layers) == 1:
        return tables[0]
    items = pa.concat_tables([tables[0], *(table.cast(tables[0].schema) for table in tables[1:])])
    counts = np.array(items.column("count").to_numpy(), dtype=np.int64)
    first = items.column("item_id")[0].as_py() if items.num_rows else 1
    for layer in layers:
        if (layer_counts := layer.table(COUNTS_FILE)) is not None:
            ids = layer_counts.column("item_id").to_numpy()
            np.add.at(counts, ids[ids >= first] - first, layer_counts.column("count").to_numpy()[ids >= first])
    return items.set_column(items.schema.get_field_index("count"), "count", pa.array(counts))


def merged_vocabulary(layers: Sequence[EventLayer], column: str) -> pa.Table | None:
    """Return the vocabulary of a category column over all layers; None if no layer has one."""
    tables = [table for layer in layers if (table := layer.table(f"vocabularies/{column}.parquet")) is not None]
    return pa.concat_tables(tables) if tables else None


def merged_vectors(layers: Sequence[EventLayer], file: str, num_rows: int, width: int) -> NDArray[Any]:
    """Return the rows of a vector array over all layers, by id; rows of later layers are appended."""
    base = _load_vectors(layers[0].folder / file)
    if len(layers) == 1 or len(base) == num_rows:
        return base
    out = np.zeros((num_rows, width), dtype=base.dtype)
    out[: len(base)] = base
    for layer in layers[1:]:
        if file in layer.names:
            rows = _load_vectors(layer.folder / file)
            start = first_row(layer, file)
            out[start : start + len(rows)] = rows
    return out


def first_row(layer: EventLayer, file: str) -> int:
    """Return the row of a layer's first vector: the id of its first new item or user."""
    if file.startswith("vectors/item_"):
        table = layer.table(ITEMS_FILE)
        assert table is not None
        return int(pc.min(table.column("item_id")).as_py())
    assert layer.users is not None
    return int(layer.users[-1]) + 1 - len(_load_vectors(layer.folder / file))


def _load_vectors(path: Path) -> NDArray[Any]:
    try:
        return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise corrupt_file_error(path, error) from error


def read_table(path: Path) -> pa.Table:
    """Read a small Parquet file."""
    try:
        with pq.ParquetFile(path) as file:
            return file.read()
    except (OSError, pa.ArrowException) as error:
        raise corrupt_file_error(path, error) from error
