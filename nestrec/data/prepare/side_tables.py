"""Side tables: features of users or items from files of their own, joined by key through partitions on disk."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nestrec.base.errors import DataError
from nestrec.data.dataset_card import DataFile, Feature, FeatureKind, Owner
from nestrec.data.dataset_schema import COUNTS_SUFFIX, list_of
from nestrec.data.flat_arrays import offsets_of_lengths
from nestrec.data.prepare.event_parser import encode_category, is_missing
from nestrec.data.prepare.id_encoder import IdEncoder
from nestrec.data.prepare.list_cells import encode_lists, joined, vectors
from nestrec.data.prepare.parse import BAD, NOT_A_NUMBER, parse_days, parse_numbers
from nestrec.data.prepare.prepare_options import HashingConfig, NumberTransform
from nestrec.data.prepare.raw_rows import BadRow, Quarantine, RawBatch
from nestrec.data.prepare.spill_files import KeyPartitions, Records
from nestrec.data.prepare.transform_fitting import TransformFitter, VectorFile, bucket_labels
from nestrec.data.transform import Transform

SideKind = Literal["category", "number", "text", "categories", "date", "range", "bag", "vector"]
"""`range`: a number that becomes the category of the bucket in which it lies. `bag`: a text that models read."""
NUM_RANGES = 16
LEAST_FOUND = 0.9
"""A table that knows fewer of the items or users than this share is told of."""
_NUMERIC = ("number", "date", "range")
_LISTS = ("categories", "bag")
_FEATURE_KIND: dict[SideKind, FeatureKind] = {
    "category": "category",
    "number": "number",
    "text": "text",
    "categories": "categories",
    "date": "number",
    "range": "category",
    "bag": "bag",
    "vector": "vector",
}


@dataclass(frozen=True, slots=True)
class SideColumn:
    """A column of a side table that becomes a feature."""

    column: str
    kind: SideKind
    name: str = ""
    """Of the feature; the column's by default."""
    separator: str = ","
    """Between the values of `categories` and `vector`, where they are text."""
    transform: NumberTransform = "none"
    """What is learnt of a number; a `range` is always cut by quantiles."""
    num_buckets: int = NUM_RANGES
    """Of a range."""
    hashing: HashingConfig = field(default_factory=HashingConfig)
    """Of a bag."""

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

    notes: tuple[str, ...] = ()
    """What a person should know of its files."""

    def learns(self) -> bool:
        """Whether a column has a transform whose parameters come from the data."""
        return any(c.kind == "range" or c.transform != "none" for c in self.columns)


@dataclass(frozen=True, slots=True)
class Keyed:
    """Whose features a side table holds."""

    owner: Owner
    keys: IdEncoder
    row_of_code: NDArray[np.int64]
    """Row in the table of users or items; -1 for keys that were removed."""
    is_fit: NDArray[np.bool_]
    """Codes with events in the part that transforms are learnt from."""
    num_rows: int
    """Of vectors: items count from 1, and row 0 is none of them."""
    vocabularies: Mapping[str, pa.Array] = field(default_factory=dict)
    """Where a dataset grows: the keys that features have already, in order of id from 1."""
    features: Mapping[str, Feature] = field(default_factory=dict)
    """Where a dataset grows: its features; their transforms are not learnt again."""


class SideTable:
    """Features of one side table, in the partitions of the main table's keys. The first row of a key counts."""

    def __init__(self, source: SideSource, of: Keyed, folder: Path, name: str, bounds: NDArray[np.int64]):
        self._source = source
        self._of = of
        self._folder = folder
        self._tables = {c.feature: IdEncoder() for c in source.columns if c.kind in ("category", "categories", "text")}
        self._fittings = {
            c.feature: TransformFitter("quantiles" if c.kind == "range" else c.transform, c.num_buckets)
            for c in source.columns
            if c.kind in _NUMERIC
        }
        self._transforms: dict[str, Transform] = {
            c.feature: c.hashing.transform() for c in source.columns if c.kind == "bag"
        }
        for feature, keys in of.vocabularies.items():
            if feature in self._tables:
                self._tables[feature].encode(keys)
        self._vectors: dict[str, VectorFile] = {}
        self._is_seen = np.zeros(len(of.keys), dtype=np.bool_)
        self._num_repeated = 0
        fields: list[tuple[str, str]] = [("key", "i4")]
        for column in source.columns:
            if column.kind in _LISTS:
                fields.append((column.feature + COUNTS_SUFFIX, "i4"))
            elif column.kind != "vector":
                fields.append((column.feature, "f4" if column.kind in _NUMERIC else "i4"))
        self._dtype = np.dtype(fields)
        self._lists = [c.feature for c in source.columns if c.kind in _LISTS]
        lists = dict.fromkeys(self._lists, np.dtype(np.int32))
        self._partitions = KeyPartitions(folder, name, self._dtype, "key", bounds, lists)

    def read(self, quarantine: Quarantine, max_bad_share: float) -> None:
        """Read all files; rows of keys that have no events only add to the vocabularies."""
        num_bad_before = quarantine.num_rows
        num_rows = 0
        num_known = 0
        first_id = None
        for batch in self._source.batches():
            quarantine.add(batch.file, batch.bad)
            num_rows += batch.num_rows + len(batch.bad)
            found = self._find(batch)
            num_known += int((found >= 0).sum())
            is_first = self._first_of_keys(found)
            self._num_repeated += int((found >= 0).sum() - is_first.sum())
            first_id = first_id or next(map(str, batch.columns[self._source.key][:1].to_pylist()), None)
            records = self._parse(batch, found, is_first, quarantine).take(is_first)
            is_fit = self._of.is_fit[records.rows["key"]]
            for name, fitting in self._fittings.items():
                fitting.add(records.rows[name][is_fit])
            self._partitions.append(records)
        quarantine.check(num_rows, max_bad_share, num_bad_before)
        if num_rows and not num_known and self._source.must_match:
            in_log = self._of.keys.keys(np.zeros(1, np.int64))[0].as_py()
            remedy = (
                f"check its column of ids, {self._source.key!r}: one there is {first_id!r}, one in the log {in_log!r}"
            )
            raise DataError(
                "has no row of any id in the log", option="table", value=self._source.must_match, remedy=remedy
            )
        for name, fitting in self._fittings.items():
            known = self._of.features.get(name)
            self._transforms[name] = fitting.result() if known is None else known.transform

    def load(self, partition: int) -> dict[str, pa.Array]:
        """Features of the keys of one partition, in order of key; unknown where the side table has no row."""
        start, end = self._partitions.bounds[partition : partition + 2]
        records = self._partitions[partition].load()
        records = records.take(np.argsort(records.rows["key"], kind="stable"))
        dense = np.zeros(end - start, dtype=self._dtype)
        for column in self._source.columns:
            if column.kind in _NUMERIC:
                dense[column.feature] = np.nan
        dense[records.rows["key"] - start] = records.rows
        stored = [c for c in self._source.columns if c.kind != "vector"]
        return {c.feature: self._values(c, Records(dense, records.lists)) for c in stored}

    def notes(self) -> list[str]:
        """What a person should know of a table of its own, after `read`."""
        name = self._source.must_match
        owner = self._of.owner
        stays = self._of.row_of_code >= 0
        num_found, num_all = int((stays & self._is_seen).sum()), int(stays.sum())
        notes = list(self._source.notes)
        if name and self._num_repeated:
            notes.append(f"{self._num_repeated:,} rows of {name} repeat the id of an earlier row: the first one counts")
        if name and num_found < LEAST_FOUND * num_all:
            notes.append(
                f"{num_all - num_found:,} of {num_all:,} {owner}s have no row in {name}: their features are unknown "
                "(ids are compared as text: 7, 007 and 7.0 are three)"
            )
        return notes

    def features(self) -> tuple[Feature, ...]:
        return tuple(
            self._describe(c) for c in self._source.columns if c.kind != "vector" or c.feature in self._vectors
        )

    def vocabularies(self) -> dict[str, pa.Array]:
        """Keys of the category features, in order of id from 1."""
        found = {}
        for column in self._source.columns:
            if column.kind in ("category", "categories"):
                found[column.feature] = self._tables[column.feature].all_keys()
            elif column.kind == "range":
                found[column.feature] = pa.array(bucket_labels(self._transforms[column.feature]), pa.string())
        return found

    def files(self) -> list[DataFile]:
        """Vectors that were written."""
        return [file.entry() for file in self._vectors.values()]

    def delete(self) -> None:
        self._partitions.delete()

    def _find(self, batch: RawBatch) -> NDArray[np.int64]:
        ids = batch.columns[self._source.key]
        missing = is_missing(ids)
        codes = np.full(batch.num_rows, -1, dtype=np.int64)
        codes[~missing] = self._of.keys.find(ids.filter(pa.array(~missing)) if missing.any() else ids)
        return codes

    def _first_of_keys(self, codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Rows of known keys that came in no row before."""
        known = np.flatnonzero(codes >= 0)
        known = known[~self._is_seen[codes[known]]]
        chosen = known[np.unique(codes[known], return_index=True)[1]]
        self._is_seen[codes[chosen]] = True
        is_first = np.zeros(codes.size, dtype=np.bool_)
        is_first[chosen] = True
        return is_first

    def _parse(
        self, batch: RawBatch, codes: NDArray[np.int64], is_first: NDArray[np.bool_], quarantine: Quarantine
    ) -> Records:
        rows = np.zeros(batch.num_rows, dtype=self._dtype)
        rows["key"] = codes
        lists: dict[str, NDArray[Any]] = {}
        for column in self._source.columns:
            values = batch.columns[column.column]
            name = column.feature
            if column.kind == "date":
                rows[name] = parse_days(values)
            elif column.kind in ("number", "range"):
                rows[name], states = parse_numbers(values)
                _set_aside(batch, states == BAD, f"{column.column} {NOT_A_NUMBER}", quarantine)
            elif column.kind == "vector":
                self._write_vectors(batch, column, codes, is_first, quarantine)
            elif column.kind == "categories":
                lists[name], rows[name + COUNTS_SUFFIX] = encode_lists(self._tables[name], values, column.separator)
            elif column.kind == "bag":
                ids, rows[name + COUNTS_SUFFIX] = self._transforms[name].bags(joined(values))
                lists[name] = ids.astype(np.int32)
            else:
                rows[name] = encode_category(self._tables[name], joined(values))
        return Records(rows, lists)

    def _write_vectors(
        self,
        batch: RawBatch,
        column: SideColumn,
        codes: NDArray[np.int64],
        is_first: NDArray[np.bool_],
        quarantine: Quarantine,
    ) -> None:
        values, counts = vectors(batch.columns[column.column], column.separator)
        offsets = offsets_of_lengths(counts)
        file = self._vectors.get(column.feature)
        if file is None:
            if not counts.any():
                return
            width = int(counts[counts > 0][0])
            name = f"{self._of.owner}_{column.feature}"
            file = VectorFile(self._folder, name, self._of.num_rows, width, np.dtype(np.float32))
            self._vectors[column.feature] = file
        is_whole = counts == file.width
        whole = values[np.repeat(is_whole, counts)].reshape(-1, file.width)
        is_good = is_whole.copy()
        is_good[is_whole] = np.isfinite(whole).all(1)
        reason = f"{column.column} is no vector of {file.width} finite numbers, as the first one is"
        _set_aside(batch, (counts > 0) & ~is_good, reason, quarantine)
        rows = np.full(batch.num_rows, -1, dtype=np.int64)
        rows[is_first] = self._of.row_of_code[codes[is_first]]
        chosen = np.flatnonzero(is_good & (rows >= 0))
        places = offsets[:-1][chosen, None] + np.arange(file.width)
        file.write(rows[chosen], values[places])

    def _values(self, column: SideColumn, records: Records) -> pa.Array:
        name = column.feature
        if column.kind in _LISTS:
            offsets = offsets_of_lengths(records.counts(name)).astype(np.int32)
            ids = pa.array(records.lists[name].astype(np.int64))
            return pa.ListArray.from_arrays(pa.array(offsets), ids, type=list_of(pa.int64()))
        values = records.rows[name]
        if column.kind == "range":
            return pa.array(self._transforms[name].bucket_ids(values))
        if column.kind in ("number", "date"):
            return pa.array(values)
        if column.kind == "category":
            return pa.array(values.astype(np.int64))
        table = self._tables[name]
        texts = table.keys(np.maximum(values.astype(np.int64) - 1, 0)) if len(table) else pa.array([""] * values.size)
        return pc.if_else(pa.array(values > 0), texts, "")

    def _describe(self, column: SideColumn) -> Feature:
        name = column.feature
        kind = _FEATURE_KIND[column.kind]
        transform = self._transforms.get(name, Transform())
        file = self._vectors.get(name)
        size = len(self._tables[name]) + 1 if column.kind in ("category", "categories") else transform.buckets
        return Feature(
            name=name,
            kind=kind,
            owner=self._of.owner,
            vocabulary_size=len(transform.bounds) + 1 if column.kind == "range" else size,
            transform=transform,
            width=0 if file is None else file.width,
            file="" if file is None else file.relative,
        )


def _set_aside(batch: RawBatch, rows: NDArray[np.bool_], reason: str, quarantine: Quarantine) -> None:
    bad = [BadRow(int(batch.lines[i]), reason, batch.text_of(int(i))) for i in np.flatnonzero(rows)]
    quarantine.add(batch.file, bad)
