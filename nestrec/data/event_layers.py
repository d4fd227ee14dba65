"""A dataset in layers: as it was prepared, and on top of it the events that were appended, a layer of them at a time.

A layer has a row for each user with events in it. A user's sequence is that of all layers: in the order of time, and
of layers where times are equal or there are none, which is the order in which the events came.

Row groups of the users table, decoded to numpy and kept in a cache bounded in bytes.
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
        self._parts = parts
        self._columns = columns
        self._max_bytes = max_bytes
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


def damaged(path: Path, error: Exception) -> CorruptFileError:
    """The error for a file of a dataset that is missing or cannot be read."""
    return CorruptFileError(
        f"cannot be read: {error}", option="dataset file", value=str(path), remedy="prepare the dataset again"
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
    """The files of one layer, their footers read once."""

    def __init__(self, folder: Path, card: DatasetCard, entry: LayerEntry, *, is_base: bool):
        self.folder = folder / entry.folder
        self.entry = entry
        self._card = card
        names = [file.path.removeprefix(entry.folder) for file in card.files_of(entry)]
        self.names = frozenset(names)
        self.parts = [UsersFile.open(self.folder / name) for name in names if _PART.fullmatch(name)]
        self.group_bounds = offsets_of_lengths(np.array([n for p in self.parts for n in p.group_rows()], np.int64))
        """(G + 1,) first rows of its row groups, and its number of rows"""
        self.users: Ints | None = None if is_base else self.column(USER_ID).astype(np.int64)
        """ids of its rows, ascending; none where a row's number is its id"""

    @property
    def num_rows(self) -> int:
        return int(self.group_bounds[-1])

    def column(self, name: str) -> NDArray[Any]:
        """A scalar column of all its rows."""
        return np.concatenate([part.read_column(name) for part in self.parts])

    def texts(self, name: str) -> pa.Array:
        """A column of texts, as Arrow has it."""
        return pa.concat_arrays([part.read_arrow(name) for part in self.parts])

    def lengths(self) -> NDArray[np.int32]:
        return self.column(LENGTH).astype(np.int32)

    def find(self, users: Ints) -> tuple[Ints, Ints]:
        """(places among the given users, rows of the layer) of those that have a row."""
        if self.users is None:
            places = np.flatnonzero(users < self.num_rows)
            return places, users[places]
        at = np.searchsorted(self.users, users)
        within = np.flatnonzero(at < self.users.size)
        places = within[self.users[at[within]] == users[within]]
        return places, at[places]

    def table(self, name: str) -> pa.Table | None:
        """One of its small files; none where it has no such file."""
        return read_table(self.folder / name) if name in self.names else None


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Some rows of one layer, and the places of their users among those that were asked for."""

    places: Ints
    scalars: dict[str, NDArray[Any]]
    lists: Lists


@dataclass(frozen=True, slots=True)
class MergedRows:
    """Rows of several layers put together."""

    scalars: dict[str, NDArray[Any]]
    lists: Lists
    layer_of_event: NDArray[np.int64]
    """the number of the layer that each event comes from"""


def merge(layers: Sequence[LayerRows], users: Ints, ragged: frozenset[str]) -> MergedRows:
    """The sequences of the users. The first of the layers that has a user says what else is known of them.

    ragged: columns with several values an event.
    """
    num = users.size
    width = len(layers)
    lengths = np.zeros((num, width), np.int64)
    for number, layer in enumerate(layers):
        lengths[layer.places, number] = np.diff(layer.lists[ITEM_IDS][1])
    segments = offsets_of_lengths(lengths.ravel())
    offsets = np.ascontiguousarray(segments[::width]) if num else np.zeros(1, np.int64)
    row_of_event = np.repeat(np.arange(num), lengths.sum(axis=1))
    joined = {name: _joined(layers, name, segments, width) for name in layers[0].lists if is_of_events(name, ragged)}
    layer_of_event = np.repeat(np.tile(np.arange(width), num), lengths.ravel())
    order = None
    if TIMESTAMPS_MS in joined:
        order = order_events(row_of_event, num, [joined[TIMESTAMPS_MS]])
        order = None if np.array_equal(order, np.arange(order.size)) else order
    lists: Lists = {}
    for name in ragged & set(layers[0].lists):
        lists[name] = _ragged(layers, name, joined[name + COUNTS_SUFFIX], offsets, order, (num, width))
    for name, values in joined.items():
        lists[name] = (values if order is None else values[order], offsets)
    scalars, of_users = _of_users(layers, users, ragged)
    scalars |= {LENGTH: np.diff(offsets).astype(np.int32)} if LENGTH in scalars else {}
    named = {name: (lists | of_users)[name] for name in layers[0].lists}
    return MergedRows(scalars, named, layer_of_event if order is None else layer_of_event[order])


def is_of_events(name: str, ragged: frozenset[str]) -> bool:
    """Whether a list column has one value an event."""
    return name in (ITEM_IDS, TIMESTAMPS_MS, ACTIONS) or (name.startswith(EVENT_PREFIX) and name not in ragged)


def ragged_columns(features: Sequence[Feature]) -> frozenset[str]:
    """Columns with several values an event."""
    return frozenset(feature.column for feature in features if feature.is_list)


def needed_to_merge(card: DatasetCard) -> list[str]:
    """Columns without which rows of several layers cannot be put together."""
    times = [TIMESTAMPS_MS] if card.has_timestamps else []
    return [ITEM_IDS, *times, *(name + COUNTS_SUFFIX for name in sorted(ragged_columns(card.event_features)))]


def _joined(layers: Sequence[LayerRows], name: str, segments: Ints, width: int) -> NDArray[Any]:
    """Values of all layers: those of a row one layer after the other."""
    out = np.empty(int(segments[-1]), dtype=layers[0].lists[name][0].dtype)
    for number, layer in enumerate(layers):
        values, offsets = layer.lists[name]
        copy_segments(values, offsets, np.arange(layer.places.size), out, segments, layer.places * width + number)
    return out


def _ragged(  # noqa: PLR0917
    layers: Sequence[LayerRows],
    name: str,
    counts: NDArray[Any],
    offsets: Ints,
    order: Ints | None,
    shape: tuple[int, int],
) -> tuple[NDArray[Any], Ints]:
    """The same with several values an event. counts: of each event, before it is put into order."""
    lengths = np.zeros(shape, np.int64)
    for number, layer in enumerate(layers):
        lengths[layer.places, number] = np.diff(layer.lists[name][1])
    values = _joined(layers, name, offsets_of_lengths(lengths.ravel()), shape[1])
    starts = offsets_of_lengths(counts)
    if order is not None:
        out = np.empty_like(values)
        out_starts = offsets_of_lengths(counts[order])
        copy_segments(values, starts, order, out, out_starts, np.arange(order.size))
        values = out
        starts = out_starts
    return values, starts[offsets]


def _of_users(
    layers: Sequence[LayerRows], users: Ints, ragged: frozenset[str]
) -> tuple[dict[str, NDArray[Any]], Lists]:
    """What is known of the users themselves."""
    first = layers[0]
    scalars = {name: np.empty(users.size, dtype=column.dtype) for name, column in first.scalars.items()}
    for layer in reversed(layers):
        for name, out in scalars.items():
            out[layer.places] = layer.scalars[name]
    lists: Lists = {}
    for name in first.lists:
        if is_of_events(name, ragged) or name in ragged:
            continue
        lengths = np.zeros(users.size, np.int64)
        source = np.full(users.size, -1)
        for number, layer in reversed(list(enumerate(layers))):
            lengths[layer.places] = np.diff(layer.lists[name][1])
            source[layer.places] = number
        offsets = offsets_of_lengths(lengths)
        out = np.empty(int(offsets[-1]), dtype=first.lists[name][0].dtype)
        for number, layer in enumerate(layers):
            rows = np.flatnonzero(source[layer.places] == number)
            copy_segments(*layer.lists[name], rows, out, offsets, layer.places[rows])
        lists[name] = (out, offsets)
    return scalars, lists


def merged_items(layers: Sequence[EventLayer]) -> pa.Table:
    """The items table of all layers: new items come behind, and events of old ones are added to their counts."""
    tables = [table for layer in layers if (table := layer.table(ITEMS_FILE)) is not None]
    if len(layers) == 1:
        return tables[0]
    items = pa.concat_tables([tables[0], *(table.cast(tables[0].schema) for table in tables[1:])])
    counts = np.array(items.column("count").to_numpy(), dtype=np.int64)
    first = items.column("item_id")[0].as_py() if items.num_rows else 1
    for layer in layers:
        if (more := layer.table(COUNTS_FILE)) is not None:
            ids = more.column("item_id").to_numpy()
            np.add.at(counts, ids[ids >= first] - first, more.column("count").to_numpy()[ids >= first])
    return items.set_column(items.schema.get_field_index("count"), "count", pa.array(counts))


def merged_vocabulary(layers: Sequence[EventLayer], column: str) -> pa.Table | None:
    """Ids and keys of a category column; none where no layer has any."""
    tables = [table for layer in layers if (table := layer.table(f"vocabularies/{column}.parquet")) is not None]
    return pa.concat_tables(tables) if tables else None


def merged_vectors(layers: Sequence[EventLayer], file: str, num_rows: int, width: int) -> NDArray[Any]:
    """Rows by id; those of layers above the first begin behind the rows below them."""
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
    """Where the vectors of a layer begin: with its first new item or user."""
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
        raise damaged(path, error) from error


def read_table(path: Path) -> pa.Table:
    """A small Parquet file."""
    try:
        with pq.ParquetFile(path) as file:
            return file.read()
    except (OSError, pa.ArrowException) as error:
        raise damaged(path, error) from error
