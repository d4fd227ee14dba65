"""Reading of a prepared dataset: random access to rows by their global index."""

import copy
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nestrec.base.errors import DataError, did_you_mean
from nestrec.data.dataset_card import CARD_FILE, DatasetCard, Feature, describe_file
from nestrec.data.dataset_schema import ITEM_IDS, TIMESTAMPS_MS, USER_KEY
from nestrec.data.event_layers import (
    EventLayer,
    LayerRows,
    MergedRows,
    RowGroup,
    RowGroupCache,
    damaged,
    merge,
    merged_items,
    merged_vectors,
    merged_vocabulary,
    needed_to_merge,
    ragged_columns,
)
from nestrec.data.flat_arrays import copy_segments, offsets_of_lengths

DEFAULT_CACHE_BYTES = 2 << 30
_ROWS_AT_A_TIME = 1024
SHUFFLED_WHOLE_BYTES = 1 << 30
"""Larger datasets are shuffled by blocks: rows of a batch then lie in few row groups, which memory holds."""
BLOCK_BYTES = 1 << 28
"""Several blocks fit in the cache: batches are made ahead over the border of two."""


@dataclass(frozen=True, slots=True)
class DatasetRows:
    """Some rows of a dataset, in the order they were asked for. The arrays belong to the caller."""

    indices: NDArray[np.int64]
    """Global row indices."""
    scalars: dict[str, NDArray[Any]]
    """One value a row."""
    lists: dict[str, tuple[NDArray[Any], NDArray[np.int64]]]
    """List columns as (values, offsets): row b is `values[offsets[b]:offsets[b + 1]]`."""

    @property
    def num_rows(self) -> int:
        return int(self.indices.size)

    def take(self, places: NDArray[np.int64]) -> "DatasetRows":
        """The rows at these places, in this order."""
        lists = {}
        for name, (values, offsets) in self.lists.items():
            out_offsets = offsets_of_lengths(np.diff(offsets)[places])
            out = np.empty(int(out_offsets[-1]), dtype=values.dtype)
            copy_segments(values, offsets, places, out, out_offsets, np.arange(places.size))
            lists[name] = (out, out_offsets)
        return DatasetRows(self.indices[places], {name: column[places] for name, column in self.scalars.items()}, lists)


class Dataset:
    """A prepared dataset. Reading is thread safe, so a background thread may fetch the rows of the next batches."""

    def __init__(self, folder: Path, card: DatasetCard, layers: list[EventLayer], columns: list[str], cache_bytes: int):
        self.folder = folder
        self.card = card
        self.columns = columns
        self._layers = layers
        self._cache_bytes = cache_bytes
        self._cache = self._cache_of(columns)
        self._first_group = offsets_of_lengths(np.array([layer.group_bounds.size - 1 for layer in layers]))
        self._ragged = ragged_columns(card.event_features)
        self.row_group_bounds = layers[0].group_bounds
        """(G + 1,) row group g of the first layer holds the rows from `row_group_bounds[g]` to the next of these."""
        self.num_samples = max([layers[0].num_rows, *(int(u[-1]) + 1 for u in self._users_of_layers() if u.size)])
        """Rows: users, or labelled examples."""
        self.lengths = self._load_lengths()
        """(num_samples,) int32 events a row; 1 for each labelled example of kind "rows"."""

    @staticmethod
    def open(
        path: Path | str,
        *,
        columns: Sequence[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        generation: int | None = None,
    ) -> "Dataset":
        """Open a folder written by `prepare`. Files must be present and of the right size; `verify` checks their bytes.

        `columns` are those that `rows` returns; by default all but `user_key`, which is slow to decode. `generation`:
        as it was before more was appended.
        """
        folder = Path(path)
        card = DatasetCard.load(folder, generation)
        _check_kept(folder, card, generation)
        _check_files(folder, card)
        layers = [EventLayer(folder, card, entry, is_base=i == 0) for i, entry in enumerate(card.all_layers)]
        available = [field.name for field in layers[0].parts[0].metadata.schema.to_arrow_schema()]
        chosen = [name for name in available if name != USER_KEY] if columns is None else list(columns)
        for name in chosen:
            if name not in available:
                raise DataError(
                    "is no column of the dataset", option="columns", value=name, remedy=did_you_mean(name, available)
                )
        dataset = Dataset(folder, card, layers, chosen, cache_bytes)
        if dataset.num_samples != card.counts.users:
            raise damaged(folder / CARD_FILE, ValueError(f"{card.counts.users} users, but {dataset.num_samples} rows"))
        return dataset

    @property
    def num_items(self) -> int:
        """Size of the catalogue; item ids run from 1 to it."""
        return self.card.counts.items

    @property
    def num_row_groups(self) -> int:
        return int(self.row_group_bounds.size - 1)

    @cached_property
    def digest(self) -> str:
        """Identity of the dataset: the digest of its card, which holds the digest of every file."""
        return hashlib.sha256((self.folder / CARD_FILE).read_bytes()).hexdigest()

    def row_group_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row group of each row; a shuffle that stays inside blocks of row groups reads each of them once."""
        return np.searchsorted(self.row_group_bounds, indices, side="right").astype(np.int64) - 1

    def rows(self, indices: NDArray[np.int64]) -> DatasetRows:
        """The given rows; order and repeats are kept."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and (indices.min() < 0 or indices.max() >= self.num_samples):
            raise IndexError(f"row indices must lie in [0, {self.num_samples})")
        if len(self._layers) == 1:
            return self._rows_of_layer(0, indices)
        merged = self._merged(indices)
        scalars = {name: values for name, values in merged.scalars.items() if name in self.columns}
        return DatasetRows(
            indices, scalars, {name: values for name, values in merged.lists.items() if name in self.columns}
        )

    def newest_events(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(users, places in their sequences, times) of the events that were appended last, by user and place."""
        newest = self._layers[-1].users
        if newest is None:
            none = np.zeros(0, np.int64)
            return none, none, none
        merged = self._merged(newest)
        _, offsets = merged.lists[ITEM_IDS]
        chosen = np.flatnonzero(merged.layer_of_event == len(self._layers) - 1)
        row = np.repeat(np.arange(newest.size), np.diff(offsets))[chosen]
        times = merged.lists[TIMESTAMPS_MS][0][chosen] if TIMESTAMPS_MS in merged.lists else np.zeros(chosen.size)
        return newest[row], chosen - offsets[row], times.astype(np.int64)

    def _merged(self, indices: NDArray[np.int64]) -> MergedRows:
        found = []
        for number, layer in enumerate(self._layers):
            places, rows = layer.find(indices)
            read = self._rows_of_layer(number, rows)
            found.append(LayerRows(places, read.scalars, read.lists))
        return merge(found, indices, self._ragged)

    def _rows_of_layer(self, number: int, indices: NDArray[np.int64]) -> DatasetRows:
        bounds = self._layers[number].group_bounds
        first = int(self._first_group[number])
        group_of = np.searchsorted(bounds, indices, side="right") - 1
        places = []
        for group in np.unique(group_of):
            out_rows = np.flatnonzero(group_of == group)
            places.append((self._cache.get(first + int(group)), indices[out_rows] - bounds[group], out_rows))
        if not places:  # the columns and their types are those of any row group
            places.append((self._cache.get(0), indices, indices))
        return _gather(indices, places)

    def only(self, columns: Sequence[str]) -> "Dataset":
        """The same rows with these columns alone: nothing else is decoded, or kept in memory."""
        narrow = copy.copy(self)
        narrow.columns = [name for name in self.columns if name in columns]
        narrow._cache = self._cache_of(narrow.columns)
        narrow.__dict__.pop("decoded_bytes", None)
        return narrow

    def _cache_of(self, columns: list[str]) -> RowGroupCache:
        needed = [*needed_to_merge(self.card), *columns] if len(self._layers) > 1 else columns
        parts = [part for layer in self._layers for part in layer.parts]
        return RowGroupCache(parts, list(dict.fromkeys(needed)), self._cache_bytes)

    @cached_property
    def decoded_bytes(self) -> int:
        """What all rows take in memory, with the columns that are read."""
        return sum(part.decoded_bytes(self.columns) for layer in self._layers for part in layer.parts)

    def shuffle_block(self, num_samples: int) -> int | None:
        """So many of the samples, consecutive ones, take about `BLOCK_BYTES`; none where all rows fit in memory.

        A function of the data and of what is read of it: every rank, and a run that goes on, has the same.
        """
        if self.decoded_bytes <= SHUFFLED_WHOLE_BYTES:
            return None
        return max(1, num_samples * BLOCK_BYTES // self.decoded_bytes)

    def scan(self, columns: Sequence[str]) -> Iterator[tuple[int, RowGroup]]:
        """Row groups one after the other with the number of their first row: these columns alone, of which nothing is
        kept, however large the dataset is."""
        if len(self._layers) == 1:
            groups = ((part, g) for part in self._layers[0].parts for g in range(part.metadata.num_row_groups))
            for (part, group), first in zip(groups, self.row_group_bounds[:-1], strict=True):
                yield int(first), part.read_group(group, list(columns))
            return
        reader = Dataset(self.folder, self.card, self._layers, list(columns), cache_bytes=64 << 20)
        appended = np.arange(self._layers[0].num_rows, self.num_samples, _ROWS_AT_A_TIME)
        bounds = np.concatenate([self.row_group_bounds[:-1], appended, [self.num_samples]])
        for first, end in itertools.pairwise(bounds.tolist()):
            rows = reader.rows(np.arange(first, end))
            yield first, RowGroup(rows.scalars, rows.lists)

    def user_keys(self, indices: NDArray[np.int64]) -> list[str]:
        """Ids of the given rows in the source."""
        return [str(self._user_keys[i]) for i in indices]

    def all_user_keys(self) -> pa.Array:
        """Ids of all rows in the source."""
        keys = []
        known = 0
        for layer in self._layers:
            texts = layer.texts(USER_KEY)
            is_new = None if layer.users is None else layer.users >= known
            keys.append(texts if is_new is None else texts.filter(pa.array(is_new)))
            known += len(keys[-1])
        return pa.concat_arrays(keys)

    def last_ms(self) -> int:
        """The time of the latest event, by the statistics of the files; 0 where events have no times."""
        return max(self._bounds_ms(), default=0)

    def first_ms(self) -> int:
        """The time of the earliest event, likewise."""
        return min(self._bounds_ms(), default=0)

    def _bounds_ms(self) -> list[int]:
        return [time_ms for layer in self._layers for part in layer.parts for time_ms in part.bounds(TIMESTAMPS_MS)]

    def schema(self) -> pa.Schema:
        """Columns of the users table with their types."""
        return self._layers[0].parts[0].metadata.schema.to_arrow_schema()

    def items(self) -> pa.Table:
        """The items table, in order of item id from 1."""
        if self.card.kind != "sequences":
            raise DataError(
                "has no items table", option="dataset", value=str(self.folder), remedy="use a dataset of sequences"
            )
        return self._items

    def has_vocabulary(self, column: str) -> bool:
        """Whether ids of a category column have keys."""
        return any(f"vocabularies/{column}.parquet" in layer.names for layer in self._layers)

    def vocabulary(self, column: str) -> pa.Table:
        """Ids and keys of a category column, such as `user_active_degree`."""
        found = merged_vocabulary(self._layers, column)
        if found is None:
            names = {name for layer in self._layers for name in layer.names if name.startswith("vocabularies/")}
            known = [Path(name).stem for name in names]
            raise DataError("has no vocabulary", option="column", value=column, remedy=did_you_mean(column, known))
        return found

    def vectors(self, feature: Feature) -> NDArray[Any]:
        """A feature of dense vectors, mapped into memory: (items + 1, W) rows by item id, or (users, W) by user id."""
        if feature.kind != "vector":
            raise DataError("has no vectors", option="feature", value=feature.name, remedy="name one of kind vector")
        num_rows = self.num_items + 1 if feature.owner == "item" else self.num_samples
        return merged_vectors(self._layers, feature.file, num_rows, feature.width)

    def item_lists(self, feature: Feature) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids of a feature with several of them, as (values, offsets) by item id; item 0 has none."""
        column = self.items().column(feature.column).combine_chunks()
        lengths = np.asarray(pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False))
        offsets = np.concatenate([[0], offsets_of_lengths(lengths)])
        return column.flatten().to_numpy(zero_copy_only=False).astype(np.int64), offsets

    def item_texts(self) -> list[str]:
        """What people call each item, by the first text that items have; empty where they have none."""
        texts = [feature.name for feature in self.card.item_features if feature.kind == "text"]
        return [text or "" for text in self.items().column(f"item_{texts[0]}").to_pylist()] if texts else []

    def verify(self) -> None:
        """Read every file and compare its digest with the card."""
        for entry in self.card.files:
            found = describe_file(self.folder, self.folder / entry.path)
            if found.sha256 != entry.sha256:
                raise damaged(self.folder / entry.path, ValueError("its digest differs from the card"))

    @cached_property
    def _items(self) -> pa.Table:
        return merged_items(self._layers)

    @cached_property
    def _user_keys(self) -> NDArray[Any]:
        keys = np.empty(self.num_samples, dtype=object)
        for layer in reversed(self._layers):
            keys[slice(layer.num_rows) if layer.users is None else layer.users] = layer.column(USER_KEY)
        return keys

    def _users_of_layers(self) -> list[NDArray[np.int64]]:
        return [layer.users for layer in self._layers if layer.users is not None]

    def _load_lengths(self) -> NDArray[np.int32]:
        if self.card.kind == "rows":
            return np.ones(self.num_samples, dtype=np.int32)
        lengths = np.zeros(self.num_samples, dtype=np.int32)
        for layer in self._layers:
            lengths[slice(layer.num_rows) if layer.users is None else layer.users] += layer.lengths()
        return lengths


def _check_kept(folder: Path, card: DatasetCard, generation: int | None) -> None:
    """Of an earlier generation the card may be gone, or the files that it names: newer ones are not damaged by that."""
    is_there = card.generation == generation and all((folder / entry.path).is_file() for entry in card.files)
    if generation is not None and not is_there and generation != (newest := DatasetCard.load(folder).generation):
        remedy = f"open a later one, up to {newest}; a run that stands there goes on by `nestrec train --from RUN`"
        raise DataError("is no generation that is kept", option="generation", value=generation, remedy=remedy)


def _check_files(folder: Path, card: DatasetCard) -> None:
    for entry in card.files:
        path = folder / entry.path
        if not path.is_file():
            raise damaged(path, FileNotFoundError("the file is missing"))
        if path.stat().st_size != entry.num_bytes:
            raise damaged(path, ValueError(f"{path.stat().st_size} bytes, but the card says {entry.num_bytes}"))


def _gather(
    indices: NDArray[np.int64], places: list[tuple[RowGroup, NDArray[np.int64], NDArray[np.int64]]]
) -> DatasetRows:
    first = places[0][0]
    scalars = {}
    for name, column in first.scalars.items():
        out = np.empty(indices.size, dtype=column.dtype)
        for group, local, out_rows in places:
            out[out_rows] = group.scalars[name][local]
        scalars[name] = out
    lists = {}
    out_offsets_of: dict[int, NDArray[np.int64]] = {}
    for name, (values, first_offsets) in first.lists.items():
        # Event columns of a row group share one offsets array, and so do the results.
        out_offsets = out_offsets_of.setdefault(id(first_offsets), _out_offsets(name, indices, places))
        out = np.empty(int(out_offsets[-1]), dtype=values.dtype)
        for group, local, out_rows in places:
            copy_segments(*group.lists[name], local, out, out_offsets, out_rows)
        lists[name] = (out, out_offsets)
    return DatasetRows(indices, scalars, lists)


def _out_offsets(
    name: str, indices: NDArray[np.int64], places: list[tuple[RowGroup, NDArray[np.int64], NDArray[np.int64]]]
) -> NDArray[np.int64]:
    lengths = np.empty(indices.size, dtype=np.int64)
    for group, local, out_rows in places:
        lengths[out_rows] = np.diff(group.lists[name][1])[local]
    return offsets_of_lengths(lengths)
