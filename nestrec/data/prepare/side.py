"""Side tables: features of users or items from files of their own, joined by key through partitions on disk."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nestrec.base.errors import DataError
from nestrec.data.card import Feature, FeatureKind
from nestrec.data.prepare.events import encode_category
from nestrec.data.prepare.keys import KeyTable
from nestrec.data.prepare.parse import BAD, parse_days, parse_numbers
from nestrec.data.prepare.quarantine import Quarantine
from nestrec.data.prepare.ranges import Ranges
from nestrec.data.prepare.raw import BadRow, RawBatch
from nestrec.data.prepare.spill import Partitions
from nestrec.data.schema import list_of

SideKind = Literal["category", "number", "text", "categories", "date", "range"]
"""`range`: a number that becomes the category of the range in which it lies; ranges hold about equally many rows."""
NUM_RANGES = 16
_NUMERIC = ("number", "date", "range")
_FEATURE_KIND: dict[SideKind, FeatureKind] = {
    "category": "category",
    "number": "number",
    "text": "text",
    "categories": "categories",
    "date": "number",
    "range": "category",
}


@dataclass(frozen=True, slots=True)
class SideColumn:
    """A column of a side table that becomes a feature."""

    column: str
    kind: SideKind
    name: str = ""
    """Of the feature; the column's by default."""
    separator: str = ","
    """Between the values of `categories`."""

    @property
    def feature(self) -> str:
        return self.name or self.column


@dataclass(frozen=True, slots=True)
class SideSource:
    """Files of a side table."""

    batches: Callable[[], Iterator[RawBatch]]
    key: str
    """Column of the user's or item's id."""
    columns: tuple[SideColumn, ...]
    must_match: str = ""
    """How to name the table in the error where it has no row of any known key; empty where that is no error."""


class SideTable:
    """Features of one side table, in the partitions of the main table's keys. The first row of a key counts."""

    def __init__(self, source: SideSource, keys: KeyTable, folder: Path, name: str, bounds: NDArray[np.int64]):
        self._source, self._keys = source, keys
        self._tables = {c.feature: KeyTable() for c in source.columns if c.kind not in _NUMERIC}
        self._ranges = {c.feature: Ranges(NUM_RANGES) for c in source.columns if c.kind == "range"}
        self._lists: dict[str, _Lists] = {
            c.feature: _Lists(c.separator) for c in source.columns if c.kind == "categories"
        }
        kinds = [(c.feature, "f4" if c.kind in _NUMERIC else "i4") for c in source.columns]
        self._dtype = np.dtype([("key", "i4"), *kinds])
        self._partitions = Partitions(folder, name, self._dtype, "key", bounds)

    def read(self, quarantine: Quarantine, max_bad_share: float) -> None:
        """Read all files; rows of keys that have no events only add to the vocabularies."""
        num_bad_before, num_rows, num_known = quarantine.num_rows, 0, 0
        for batch in self._source.batches():
            quarantine.add(batch.file, batch.bad)
            num_rows += batch.num_rows + len(batch.bad)
            records = self._parse(batch, quarantine)
            known = records[records["key"] >= 0]
            num_known += known.size
            for name, ranges in self._ranges.items():
                ranges.add(known[name])
            self._partitions.append(known)
        quarantine.check(num_rows, max_bad_share, num_bad_before)
        if num_rows and not num_known and self._source.must_match:
            remedy = f"check its column of ids, {self._source.key!r}"
            raise DataError(
                "has no row of any id in the log", field="table", value=self._source.must_match, remedy=remedy
            )
        for ranges in self._ranges.values():
            ranges.settle()
        for name, lists in self._lists.items():
            lists.fill(self._tables[name])

    def load(self, partition: int) -> dict[str, pa.Array]:
        """Features of the keys of one partition, in order of key; unknown where the side table has no row."""
        start, end = self._partitions.bounds[partition : partition + 2]
        records = self._partitions[partition].load()
        first = np.unique(records["key"], return_index=True)[1]
        dense = np.zeros(end - start, dtype=self._dtype)
        for column in self._source.columns:
            if self._dtype[column.feature].kind == "f":
                dense[column.feature] = np.nan
        dense[records["key"][first] - start] = records[first]
        return {c.feature: self._values(c, dense[c.feature]) for c in self._source.columns}

    def features(self) -> tuple[Feature, ...]:
        return tuple(self._describe(c) for c in self._source.columns)

    def vocabularies(self) -> dict[str, KeyTable]:
        """Tables of the category features."""
        return {
            c.feature: self._vocabulary(c)
            for c in self._source.columns
            if c.kind in ("category", "categories", "range")
        }

    def _vocabulary(self, column: SideColumn) -> KeyTable:
        if column.kind == "range":
            return self._ranges[column.feature].labels
        return self._lists[column.feature].table if column.kind == "categories" else self._tables[column.feature]

    def delete(self) -> None:
        self._partitions.delete()

    def _parse(self, batch: RawBatch, quarantine: Quarantine) -> NDArray[Any]:
        records = np.zeros(batch.num_rows, dtype=self._dtype)
        records["key"] = self._keys.find(batch.columns[self._source.key])
        for column in self._source.columns:
            values = batch.columns[column.column]
            if column.kind == "date":
                records[column.feature] = parse_days(values)
            elif column.kind in ("number", "range"):
                records[column.feature], states = parse_numbers(values)
                reason = f"{column.column} is not a number"
                bad = [
                    BadRow(int(batch.lines[i]), reason, batch.text_of(int(i))) for i in np.flatnonzero(states == BAD)
                ]
                quarantine.add(batch.file, bad)
            else:
                records[column.feature] = encode_category(self._tables[column.feature], _joined(values))
        return records

    def _values(self, column: SideColumn, ids: NDArray[Any]) -> pa.Array:
        if column.kind == "range":
            return pa.array(self._ranges[column.feature].of(ids))
        if column.kind in ("number", "date"):
            return pa.array(ids)
        if column.kind == "category":
            return pa.array(ids.astype(np.int64))
        if column.kind == "categories":
            return self._lists[column.feature].take(ids)
        texts = (
            self._tables[column.feature].keys(np.maximum(ids.astype(np.int64) - 1, 0))
            if len(self._tables[column.feature])
            else pa.array([""] * ids.size)
        )
        return pc.if_else(pa.array(ids > 0), texts, "")

    def _describe(self, column: SideColumn) -> Feature:
        kind = _FEATURE_KIND[column.kind]
        size = len(self.vocabularies()[column.feature]) + 1 if kind in ("category", "categories") else 0
        return Feature(name=column.feature, kind=kind, vocabulary_size=size)


def _joined(column: pa.Array) -> pa.Array:
    """Cells of a typed file that hold several values, as text."""
    if not pa.types.is_nested(column.type):
        return column
    return pa.array([",".join(str(part) for part in cell or ()) for cell in column.to_pylist()], pa.string())


class _Lists:
    """Lists of categories: whole cells are coded first, and each distinct cell is split once."""

    def __init__(self, separator: str):
        self.table = KeyTable()
        self._separator = separator
        self._of_cell = pa.array([[]], list_of(pa.int64()))

    def fill(self, cells: KeyTable) -> None:
        split = [[p for p in cell.split(self._separator) if p] for cell in cells.all_keys().to_pylist()]
        flat = [part for parts in split for part in parts]
        ids = iter((self.table.encode(pa.array(flat, pa.string())) + 1).tolist() if flat else [])
        coded = [[], *([next(ids) for _ in parts] for parts in split)]
        self._of_cell = pa.array(coded, list_of(pa.int64()))

    def take(self, cells: NDArray[Any]) -> pa.Array:
        return self._of_cell.take(pa.array(cells.astype(np.int64)))
