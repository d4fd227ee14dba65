"""Reader of prepared datasets: random access to rows by their global index."""

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
    columns_needed_to_merge,
    corrupt_file_error,
    merge,
    merged_items,
    merged_vectors,
    merged_vocabulary,
    ragged_columns,
)
from nestrec.data.flat_arrays import copy_segments, offsets_of_lengths

DEFAULT_CACHE_BYTES = 2 << 30
_ROWS_PER_SCAN = 1024
FULL_SHUFFLE_BYTES = 1 << 30
"""Largest dataset, in decoded bytes, that is shuffled as a whole. Larger ones are shuffled in blocks, so that the rows
of a batch are in few row groups, which fit in the cache."""
SHUFFLE_BLOCK_BYTES = 1 << 28
"""Decoded size of a shuffle block. Several blocks fit in the cache, because prefetching crosses block borders."""


@dataclass(frozen=True, slots=True)
class DatasetRows:
    """Rows of a dataset, in the requested order. The arrays belong to the caller."""

    indices: NDArray[np.int64]
    """Global row indices."""
    scalars: dict[str, NDArray[Any]]
    """Scalar columns: one value per row."""
    lists: dict[str, tuple[NDArray[Any], NDArray[np.int64]]]
    """List columns as (values, offsets): row b is `values[offsets[b]:offsets[b + 1]]`."""

    @property
    def num_rows(self) -> int:
        return int(self.indices.size)

    def take(self, selection: NDArray[np.int64]) -> "DatasetRows":
        """Return the rows with these indices into this object, in this order."""
        lists = {}
        for name, (values, offsets) in self.lists.items():
            out_offsets = offsets_of_lengths(np.diff(offsets)[selection])
            out = np.empty(int(out_offsets[-1]), dtype=values.dtype)
            copy_segments(values, offsets, selection, out, out_offsets, np.arange(selection.size))
            lists[name] = (out, out_offsets)
        return DatasetRows(
            self.indices[selection], {name: column[selection] for name, column in self.scalars.items()}, lists
        )


class Dataset:
    """A prepared dataset. Reading is thread-safe, so background threads can prefetch rows."""

    def __init__(self, folder: Path, card: DatasetCard, layers: list[EventLayer], columns: list[str], cache_bytes: int):
        self.folder = folder
        self.card = card
        self.columns = columns
        self._layers = layers
        self._cache_bytes = cache_bytes
        self._cache = self._make_cache(columns)
        self._first_group = offsets_of_lengths(np.array([layer.group_bounds.size - 1 for layer in layers]))
        self._ragged = ragged_columns(card.event_features)
        self.row_group_bounds = layers[0].group_bounds
        """(G + 1,) bounds of the row groups: row group g of the base layer contains the rows from `row_group_bounds[g]`
        to `row_group_bounds[g + 1]`."""
        self.num_samples = max([layers[0].num_rows, *(int(u[-1]) + 1 for u in self._users_of_layers() if u.size)])
        """Number of rows: users, or labeled examples."""
        self.lengths = self._load_lengths()
        """(num_samples,) int32 number of events per row; 1 for each labeled example of kind "rows"."""

    @staticmethod
    def open(
        path: Path | str,
        *,
        columns: Sequence[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        generation: int | None = None,
    ) -> "Dataset":
        """Open a folder written by `nestrec prepare`. Checks that all files exist and have the right size.

        Args:
            path: Folder of the dataset.
            columns: Columns that `rows` returns; by default all except `user_key`, which is slow to decode.
            cache_bytes: Size limit of the cache of decoded row groups.
            generation: Generation to open; by default the latest.

        Raises:
            DataError: If the folder is not a dataset, or a column or generation does not exist.
            CorruptFileError: If a file is missing or has the wrong size. `verify` also checks digests.
        """
        folder = Path(path)
        card = DatasetCard.load(folder, generation)
        _check_generation(folder, card, generation)
        _check_files(folder, card)
        layers = [EventLayer(folder, card, entry, is_base=i == 0) for i, entry in enumerate(card.all_layers)]
        available = [field.name for field in layers[0].parts[0].metadata.schema.to_arrow_schema()]
        selected = [name for name in available if name != USER_KEY] if columns is None else list(columns)
        for name in selected:
            if name not in available:
                raise DataError(
                    "the dataset does not have this column",
                    option="columns",
                    value=name,
                    remedy=did_you_mean(name, available),
                )
        dataset = Dataset(folder, card, layers, selected, cache_bytes)
        if dataset.num_samples != card.counts.users:
            raise corrupt_file_error(
                folder / CARD_FILE,
                ValueError(f"the card lists {card.counts.users} users, but there are {dataset.num_samples} rows"),
            )
        return dataset

    @property
    def num_items(self) -> int:
        """Size of the catalog; item ids are 1..num_items."""
        return self.card.counts.items

    @property
    def num_row_groups(self) -> int:
        return int(self.row_group_bounds.size - 1)

    @cached_property
    def digest(self) -> str:
        """Identity of the dataset: the digest of its card, which contains the digest of every file."""
        return hashlib.sha256((self.folder / CARD_FILE).read_bytes()).hexdigest()

    def row_group_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row group of each row; a shuffle within blocks of row groups reads each of them once."""
        return np.searchsorted(self.row_group_bounds, indices, side="right").astype(np.int64) - 1

    def rows(self, indices: NDArray[np.int64]) -> DatasetRows:
        """Read rows by their indices; order and repetitions are preserved."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and (indices.min() < 0 or indices.max() >= self.num_samples):
            raise IndexError(f"row indices must be in [0, {self.num_samples})")
        if len(self._layers) == 1:
            return self._read_layer(0, indices)
        merged = self._read_merged(indices)
        scalars = {name: values for name, values in merged.scalars.items() if name in self.columns}
        return DatasetRows(
            indices, scalars, {name: values for name, values in merged.lists.items() if name in self.columns}
        )

    def newest_events(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the events of the last append: (users, positions in their sequences, times), by user and position."""
        newest = self._layers[-1].users
        if newest is None:
            empty = np.zeros(0, np.int64)
            return empty, empty, empty
        merged = self._read_merged(newest)
        _, offsets = merged.lists[ITEM_IDS]
        selected = np.flatnonzero(merged.layer_of_event == len(self._layers) - 1)
        row = np.repeat(np.arange(newest.size), np.diff(offsets))[selected]
        times = merged.lists[TIMESTAMPS_MS][0][selected] if TIMESTAMPS_MS in merged.lists else np.zeros(selected.size)
        return newest[row], selected - offsets[row], times.astype(np.int64)

    def _read_merged(self, indices: NDArray[np.int64]) -> MergedRows:
        layer_rows = []
        for number, layer in enumerate(self._layers):
            user_indices, rows = layer.find(indices)
            read = self._read_layer(number, rows)
            layer_rows.append(LayerRows(user_indices, read.scalars, read.lists))
        return merge(layer_rows, indices, self._ragged)

    def _read_layer(self, number: int, indices: NDArray[np.int64]) -> DatasetRows:
        bounds = self._layers[number].group_bounds
        first = int(self._first_group[number])
        group_of = np.searchsorted(bounds, indices, side="right") - 1
        chunks = []
        for group in np.unique(group_of):
            out_rows = np.flatnonzero(group_of == group)
            chunks.append((self._cache.get(first + int(group)), indices[out_rows] - bounds[group], out_rows))
        if not chunks:  # without rows, take the columns and their types from any row group
            chunks.append((self._cache.get(0), indices, indices))
        return _gather(indices, chunks)

    def select_columns(self, columns: Sequence[str]) -> "Dataset":
        """Return a view of the dataset with only these columns; other columns are neither decoded nor cached."""
        narrow = copy.copy(self)
        narrow.columns = [name for name in self.columns if name in columns]
        narrow._cache = self._make_cache(narrow.columns)
        narrow.__dict__.pop("decoded_bytes", None)
        return narrow

    def _make_cache(self, columns: list[str]) -> RowGroupCache:
        needed = [*columns_needed_to_merge(self.card), *columns] if len(self._layers) > 1 else columns
        parts = [part for layer in self._layers for part in layer.parts]
        return RowGroupCache(parts, list(dict.fromkeys(needed)), self._cache_bytes)

    @cached_property
    def decoded_bytes(self) -> int:
        """Memory that all rows occupy with the columns that are read, in bytes."""
        return sum(part.decoded_bytes(self.columns) for layer in self._layers for part in layer.parts)

    def shuffle_block(self, num_samples: int) -> int | None:
        """Return the number of samples in a shuffle block of about `SHUFFLE_BLOCK_BYTES`; None shuffles all samples.

        It depends on the data and the selected columns only, so it is the same on every rank and after a resume.
        """
        if self.decoded_bytes <= FULL_SHUFFLE_BYTES:
            return None
        return max(1, num_samples * SHUFFLE_BLOCK_BYTES // self.decoded_bytes)

    def scan(self, columns: Sequence[str]) -> Iterator[tuple[int, RowGroup]]:
        """Yield row groups with the index of their first row, in order; reads only these columns, without a cache."""
        if len(self._layers) == 1:
            groups = ((part, g) for part in self._layers[0].parts for g in range(part.metadata.num_row_groups))
            for (part, group), first in zip(groups, self.row_group_bounds[:-1], strict=True):
                yield int(first), part.read_group(group, list(columns))
            return
        reader = Dataset(self.folder, self.card, self._layers, list(columns), cache_bytes=64 << 20)
        appended = np.arange(self._layers[0].num_rows, self.num_samples, _ROWS_PER_SCAN)
        bounds = np.concatenate([self.row_group_bounds[:-1], appended, [self.num_samples]])
        for first, end in itertools.pairwise(bounds.tolist()):
            rows = reader.rows(np.arange(first, end))
            yield first, RowGroup(rows.scalars, rows.lists)

    def user_keys(self, indices: NDArray[np.int64]) -> list[str]:
        """Return the source ids of these rows."""
        return [str(self._user_keys[i]) for i in indices]

    def all_user_keys(self) -> pa.Array:
        """Return the source ids of all rows."""
        keys = []
        known = 0
        for layer in self._layers:
            texts = layer.texts(USER_KEY)
            is_new = None if layer.users is None else layer.users >= known
            keys.append(texts if is_new is None else texts.filter(pa.array(is_new)))
            known += len(keys[-1])
        return pa.concat_arrays(keys)

    def last_ms(self) -> int:
        """Return the time of the latest event from file statistics; 0 if events have no times."""
        return max(self._bounds_ms(), default=0)

    def first_ms(self) -> int:
        """Return the time of the earliest event from file statistics; 0 if events have no times."""
        return min(self._bounds_ms(), default=0)

    def _bounds_ms(self) -> list[int]:
        return [time_ms for layer in self._layers for part in layer.parts for time_ms in part.bounds(TIMESTAMPS_MS)]

    def schema(self) -> pa.Schema:
        """Return the columns of the users table with their types."""
        return self._layers[0].parts[0].metadata.schema.to_arrow_schema()

    def items(self) -> pa.Table:
        """Return the items table, ordered by item id from 1."""
        if self.card.kind != "sequences":
            raise DataError(
                "the dataset does not have an items table",
                option="dataset",
                value=str(self.folder),
                remedy="use a dataset of user sequences",
            )
        return self._items

    def has_vocabulary(self, column: str) -> bool:
        """Return whether a category column has a vocabulary."""
        return any(f"vocabularies/{column}.parquet" in layer.names for layer in self._layers)

    def vocabulary(self, column: str) -> pa.Table:
        """Return the vocabulary (ids and source keys) of a category column, such as `user_active_degree`."""
        table = merged_vocabulary(self._layers, column)
        if table is None:
            names = {name for layer in self._layers for name in layer.names if name.startswith("vocabularies/")}
            known = [Path(name).stem for name in names]
            raise DataError(
                "the column does not have a vocabulary",
                option="column",
                value=column,
                remedy=did_you_mean(column, known),
            )
        return table

    def vectors(self, feature: Feature) -> NDArray[Any]:
        """Return a vector feature as a memory-mapped array: (items + 1, W) by item id, or (users, W) by user id."""
        if feature.kind != "vector":
            raise DataError(
                "the feature is not a vector",
                option="feature",
                value=feature.name,
                remedy="name a feature of kind vector",
            )
        num_rows = self.num_items + 1 if feature.owner == "item" else self.num_samples
        return merged_vectors(self._layers, feature.file, num_rows, feature.width)

    def item_lists(self, feature: Feature) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return a list-valued item feature as (values, offsets) by item id; the list of item 0 is empty."""
        column = self.items().column(feature.column).combine_chunks()
        lengths = np.asarray(pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False))
        offsets = np.concatenate([[0], offsets_of_lengths(lengths)])
        return column.flatten().to_numpy(zero_copy_only=False).astype(np.int64), offsets

    def item_texts(self) -> list[str]:
        """Return a display text for each item, from the first text feature of items; empty if there is none."""
        texts = [feature.name for feature in self.card.item_features if feature.kind == "text"]
        return [text or "" for text in self.items().column(f"item_{texts[0]}").to_pylist()] if texts else []

    def verify(self) -> None:
        """Read every file and compare its digest with the card.

        Raises:
            CorruptFileError: If a digest differs.
        """
        for entry in self.card.files:
            actual = describe_file(self.folder, self.folder / entry.path)
            if actual.sha256 != entry.sha256:
                raise corrupt_file_error(
                    self.folder / entry.path, ValueError("its digest differs from the one on the card")
                )

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


def _check_generation(folder: Path, card: DatasetCard, generation: int | None) -> None:
    """Raise an error if an earlier generation is no longer available.

    The card of an earlier generation, or files that it lists, may have been deleted; later generations are still
    intact.
    """
    is_available = card.generation == generation and all((folder / entry.path).is_file() for entry in card.files)
    if generation is not None and not is_available and generation != (newest := DatasetCard.load(folder).generation):
        remedy = (
            f"open a later one, up to {newest}; continue a run of this generation with `nestrec train --warm-start RUN`"
        )
        raise DataError("this generation is not available", option="generation", value=generation, remedy=remedy)


def _check_files(folder: Path, card: DatasetCard) -> None:
    for entry in card.files:
        path = folder / entry.path
        if not path.is_file():
            raise corrupt_file_error(path, FileNotFoundError("the file is missing"))
        if path.stat().st_size != entry.num_bytes:
            raise corrupt_file_error(
                path, ValueError(f"{path.stat().st_size} bytes, but the card lists {entry.num_bytes}")
            )


def _gather(
    indices: NDArray[np.int64], chunks: list[tuple[RowGroup, NDArray[np.int64], NDArray[np.int64]]]
) -> DatasetRows:
    first = chunks[0][0]
    scalars = {}
    for name, column in first.scalars.items():
        out = np.empty(indices.size, dtype=column.dtype)
        for group, local, out_rows in chunks:
            out[out_rows] = group.scalars[name][local]
        scalars[name] = out
    lists = {}
    out_offsets_of: dict[int, NDArray[np.int64]] = {}
    for name, (values, first_offsets) in first.lists.items():
        # Event columns of a row group share one offsets array, and so do the results.
        out_offsets = out_offsets_of.setdefault(id(first_offsets), _out_offsets(name, indices, chunks))
        out = np.empty(int(out_offsets[-1]), dtype=values.dtype)
        for group, local, out_rows in chunks:
            copy_segments(*group.lists[name], local, out, out_offsets, out_rows)
        lists[name] = (out, out_offsets)
    return DatasetRows(indices, scalars, lists)


def _out_offsets(
    name: str, indices: NDArray[np.int64], chunks: list[tuple[RowGroup, NDArray[np.int64], NDArray[np.int64]]]
) -> NDArray[np.int64]:
    lengths = np.empty(indices.size, dtype=np.int64)
    for group, local, out_rows in chunks:
        lengths[out_rows] = np.diff(group.lists[name][1])[local]
    return offsets_of_lengths(lengths)
