"""Reading of a prepared dataset: random access to rows by their global index."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nestrec.base.errors import DataError, did_you_mean
from nestrec.data.card import CARD_FILE, Card, Feature, describe_file
from nestrec.data.gather import copy_segments, offsets_of_lengths
from nestrec.data.row_groups import RowGroup, RowGroupCache, UsersFile, damaged
from nestrec.data.schema import LENGTH, USER_KEY

DEFAULT_CACHE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Rows:
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

    def take(self, places: NDArray[np.int64]) -> "Rows":
        """The rows at these places, in this order."""
        lists = {}
        for name, (values, offsets) in self.lists.items():
            out_offsets = offsets_of_lengths(np.diff(offsets)[places])
            out = np.empty(int(out_offsets[-1]), dtype=values.dtype)
            copy_segments(values, offsets, places, out, out_offsets, np.arange(places.size))
            lists[name] = (out, out_offsets)
        return Rows(self.indices[places], {name: column[places] for name, column in self.scalars.items()}, lists)


class Dataset:
    """A prepared dataset. Reading is thread safe, so a background thread may fetch the rows of the next batches."""

    def __init__(self, folder: Path, card: Card, parts: list[UsersFile], columns: list[str], cache_bytes: int):
        self.folder, self.card, self.columns = folder, card, columns
        self._parts = parts
        self._cache = RowGroupCache(parts, columns, cache_bytes)
        self.row_group_bounds = offsets_of_lengths(np.array([n for p in parts for n in p.group_rows()], dtype=np.int64))
        """(G + 1,) row group g holds the rows from `row_group_bounds[g]` to `row_group_bounds[g + 1]`."""
        self.lengths = self._load_lengths()
        """(num_samples,) int32 events a row; 1 for each labelled example of kind "rows"."""

    @staticmethod
    def open(
        path: Path | str, *, columns: Sequence[str] | None = None, cache_bytes: int = DEFAULT_CACHE_BYTES
    ) -> "Dataset":
        """Open a folder written by `prepare`. Files must be present and of the right size; `verify` checks their bytes.

        `columns` are those that `rows` returns; by default all but `user_key`, which is slow to decode.
        """
        folder = Path(path)
        card = Card.load(folder)
        _check_files(folder, card)
        parts = [UsersFile.open(folder / f.path) for f in card.files if f.path.startswith("users/")]
        available = [field.name for field in parts[0].metadata.schema.to_arrow_schema()]
        chosen = [name for name in available if name != USER_KEY] if columns is None else list(columns)
        for name in chosen:
            if name not in available:
                raise DataError(
                    "is no column of the dataset", field="columns", value=name, remedy=did_you_mean(name, available)
                )
        dataset = Dataset(folder, card, parts, chosen, cache_bytes)
        if dataset.num_samples != card.counts.users:
            raise damaged(folder / CARD_FILE, ValueError(f"{card.counts.users} users, but {dataset.num_samples} rows"))
        return dataset

    @property
    def num_samples(self) -> int:
        return int(self.row_group_bounds[-1])

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

    def rows(self, indices: NDArray[np.int64]) -> Rows:
        """The given rows; order and repeats are kept."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and (indices.min() < 0 or indices.max() >= self.num_samples):
            raise IndexError(f"row indices must lie in [0, {self.num_samples})")
        group_of = self.row_group_of(indices)
        places = []
        for group in np.unique(group_of):
            out_rows = np.flatnonzero(group_of == group)
            local = indices[out_rows] - self.row_group_bounds[group]
            places.append((self._cache.get(int(group)), local, out_rows))
        if not places:  # the columns and their types are those of any row group
            places.append((self._cache.get(0), indices, indices))
        return _gather(indices, places)

    def scan(self, columns: Sequence[str]) -> Iterator[tuple[int, RowGroup]]:
        """Row groups one after the other with the number of their first row: these columns alone, of which nothing is
        kept, however large the dataset is."""
        groups = ((part, g) for part in self._parts for g in range(part.metadata.num_row_groups))
        for (part, group), first in zip(groups, self.row_group_bounds[:-1], strict=True):
            yield int(first), part.read_group(group, list(columns))

    def user_keys(self, indices: NDArray[np.int64]) -> list[str]:
        """Ids of the given rows in the source."""
        return [str(self._user_keys[i]) for i in indices]

    def items(self) -> pa.Table:
        """The items table, in order of item id from 1."""
        if self.card.kind != "sequences":
            raise DataError(
                "has no items table", field="dataset", value=str(self.folder), remedy="use a dataset of sequences"
            )
        return self._items

    def vocabulary(self, column: str) -> pa.Table:
        """Ids and keys of a category column, such as `user_active_degree`."""
        path = self.folder / "vocabularies" / f"{column}.parquet"
        if not path.exists():
            known = [p.stem for p in path.parent.glob("*.parquet")] if path.parent.exists() else []
            raise DataError("has no vocabulary", field="column", value=column, remedy=did_you_mean(column, known))
        return _read_table(path)

    def vectors(self, feature: Feature) -> NDArray[Any]:
        """A feature of dense vectors, mapped into memory: (items + 1, W) rows by item id, or (users, W) by user id."""
        path = self.folder / feature.file
        if feature.kind != "vector":
            raise DataError("has no vectors", field="feature", value=feature.name, remedy="name one of kind vector")
        try:
            return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
        except (OSError, ValueError) as error:
            raise damaged(path, error) from error

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
        return _read_table(self.folder / "items.parquet")

    @cached_property
    def _user_keys(self) -> NDArray[Any]:
        return np.concatenate([part.read_column(USER_KEY) for part in self._parts])

    def _load_lengths(self) -> NDArray[np.int32]:
        if self.card.kind == "rows":
            return np.ones(self.num_samples, dtype=np.int32)
        return np.concatenate([part.read_column(LENGTH).astype(np.int32) for part in self._parts])


def _check_files(folder: Path, card: Card) -> None:
    for entry in card.files:
        path = folder / entry.path
        if not path.is_file():
            raise damaged(path, FileNotFoundError("the file is missing"))
        if path.stat().st_size != entry.num_bytes:
            raise damaged(path, ValueError(f"{path.stat().st_size} bytes, but the card says {entry.num_bytes}"))


def _read_table(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            return file.read()
    except (OSError, pa.ArrowException) as error:
        raise damaged(path, error) from error


def _gather(indices: NDArray[np.int64], places: list[tuple[RowGroup, NDArray[np.int64], NDArray[np.int64]]]) -> Rows:
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
    return Rows(indices, scalars, lists)


def _out_offsets(
    name: str, indices: NDArray[np.int64], places: list[tuple[RowGroup, NDArray[np.int64], NDArray[np.int64]]]
) -> NDArray[np.int64]:
    lengths = np.empty(indices.size, dtype=np.int64)
    for group, local, out_rows in places:
        lengths[out_rows] = np.diff(group.lists[name][1])[local]
    return offsets_of_lengths(lengths)
