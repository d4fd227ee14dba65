"""Reads side tables, the feature tables of users or items, and joins them to the log by id with partitions on disk."""

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
from nestrec.data.prepare.list_cells import as_display_text, encode_lists, parse_vectors
from nestrec.data.prepare.parse import BAD, NOT_A_NUMBER, parse_days, parse_numbers
from nestrec.data.prepare.prepare_options import HashingConfig, NumberTransform
from nestrec.data.prepare.raw_rows import BadRow, Quarantine, RawBatch
from nestrec.data.prepare.spill_files import KeyPartitions, Records
from nestrec.data.prepare.transform_fitting import TransformFitter, VectorFile, bucket_labels
from nestrec.data.transform import Transform

SideKind = Literal["category", "number", "text", "categories", "date", "range", "bag", "vector"]
"""Kind of a side column. `range`: a number that is replaced by its bucket id. `bag`: text that models read, hashed."""
NUM_RANGES = 16
MIN_MATCHED_FRACTION = 0.9
"""Minimum fraction of items or users with a row in a side table; a lower fraction adds a warning to the notes."""
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
    """Name of the column."""
    kind: SideKind
    """Kind of the column."""
    name: str = ""
    """Name of the feature; by default the name of the column."""
    separator: str = ","
    """Separator of the values of `categories` and `vector` columns that are text."""
    transform: NumberTransform = "none"
    """Transform of a number; a `range` always uses quantiles."""
    num_buckets: int = NUM_RANGES
    """Number of quantile buckets of a `range`."""
    hashing: HashingConfig = field(default_factory=HashingConfig)
    """Feature hashing of a `bag`."""

    @property
    def feature(self) -> str:
        return self.name or self.column


@dataclass(frozen=True, slots=True)
class SideSource:
    """A side table: its rows, key column and feature columns."""

    batches: Callable[[], Iterator[RawBatch]]
    """Function that reads the rows from the start."""
    key: str
    """Column of the user or item id."""
    columns: tuple[SideColumn, ...]
    """Columns that become features."""
    must_match: str = ""
    """Display name of a table that must have a row of at least one known id, for error messages; empty if a table
    without known ids is allowed."""
    notes: tuple[str, ...] = ()
    """Remarks on the files that are shown to the user and stored in the dataset card."""

    def has_fitted_transforms(self) -> bool:
        """Return whether a column has a transform that is fitted on the data."""
        return any(c.kind == "range" or c.transform != "none" for c in self.columns)


@dataclass(frozen=True, slots=True)
class SideTableOwner:
    """The users or items that a side table describes."""

    owner: Owner
    """Whether they are users or items."""
    keys: IdEncoder
    """Vocabulary of their ids."""
    row_of_code: NDArray[np.int64]
    """Row of each code in the table of users or items; -1 for codes that were filtered out."""
    is_training: NDArray[np.bool_]
    """Whether each code has events in the training subset that transforms are fitted on."""
    num_rows: int
    """Number of rows of vector files; item ids start at 1, so row 0 belongs to no item."""
    vocabularies: Mapping[str, pa.Array] = field(default_factory=dict)
    """Existing category values of each feature when events are appended to a dataset, in order of id from 1."""
    features: Mapping[str, Feature] = field(default_factory=dict)
    """Existing features when events are appended to a dataset; their transforms are not fitted again."""


class SideTable:
    """Features of one side table, in the same partitions as the users or items; the first row of an id is used."""

    def __init__(self, source: SideSource, owner: SideTableOwner, folder: Path, name: str, bounds: NDArray[np.int64]):
        self._source = source
        self._owner = owner
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
        for feature, keys in owner.vocabularies.items():
            if feature in self._tables:
                self._tables[feature].encode(keys)
        self._vectors: dict[str, VectorFile] = {}
        self._is_seen = np.zeros(len(owner.keys), dtype=np.bool_)
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

    def read(self, quarantine: Quarantine, max_bad_fraction: float) -> None:
        """Read all files; rows of ids without events only extend the vocabularies.

        Args:
            quarantine: Receives the bad rows.
            max_bad_fraction: Maximum fraction of bad rows of this table.

        Raises:
            DataError: There are too many bad rows, or no row has an id of the log.
        """
        num_bad_before = quarantine.num_rows
        num_rows = 0
        num_known = 0
        first_id = None
        for batch in self._source.batches():
            quarantine.add(batch.file, batch.bad)
            num_rows += batch.num_rows + len(batch.bad)
            codes = self._find(batch)
            num_known += int((codes >= 0).sum())
            is_first = self._first_of_keys(codes)
            self._num_repeated += int((codes >= 0).sum() - is_first.sum())
            first_id = first_id or next(map(str, batch.columns[self._source.key][:1].to_pylist()), None)
            records = self._parse(batch, codes, is_first, quarantine).take(is_first)
            is_fit = self._owner.is_training[records.rows["key"]]
            for name, fitting in self._fittings.items():
                fitting.add(records.rows[name][is_fit])
            self._partitions.append(records)
        quarantine.check(num_rows, max_bad_fraction, num_bad_before)
        if num_rows and not num_known and self._source.must_match:
            log_id = self._owner.keys.keys(np.zeros(1, np.int64))[0].as_py()
            remedy = (
                f"check its id column {self._source.key!r}: an id in the table is {first_id!r}, an id in the log is "
                f"{log_id!r}"
            )
            raise DataError(
                "the table has no row for any id in the log",
                option="table",
                value=self._source.must_match,
                remedy=remedy,
            )
        for name, fitting in self._fittings.items():
            known = self._owner.features.get(name)
            self._transforms[name] = fitting.result() if known is None else known.transform

    def load(self, partition: int) -> dict[str, pa.Array]:
        """Return the feature values of one partition in order of code; unknown values if the table has no row."""
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
        """Return warnings on the table; call this after `read`."""
        name = self._source.must_match
        owner = self._owner.owner
        is_selected = self._owner.row_of_code >= 0
        num_matched, num_total = int((is_selected & self._is_seen).sum()), int(is_selected.sum())
        notes = list(self._source.notes)
        if name and self._num_repeated:
            repeats = (
                "1 row of {} repeats" if self._num_repeated == 1 else f"{self._num_repeated:,} rows of {{}} repeat"
            )
            notes.append(f"{repeats.format(name)} the id of an earlier row: the first row is used")
        if name and num_matched < MIN_MATCHED_FRACTION * num_total:
            notes.append(
                f"{num_total - num_matched:,} of {num_total:,} {owner}s have no row in {name}: their features are "
                "unknown (ids are compared as text: 7, 007 and 7.0 are different ids)"
            )
        return notes

    def features(self) -> tuple[Feature, ...]:
        return tuple(
            self._describe(c) for c in self._source.columns if c.kind != "vector" or c.feature in self._vectors
        )

    def vocabularies(self) -> dict[str, pa.Array]:
        """Return the values of each category feature in order of id; the first has id 1."""
        vocabularies = {}
        for column in self._source.columns:
            if column.kind in ("category", "categories"):
                vocabularies[column.feature] = self._tables[column.feature].all_keys()
            elif column.kind == "range":
                vocabularies[column.feature] = pa.array(bucket_labels(self._transforms[column.feature]), pa.string())
        return vocabularies

    def files(self) -> list[DataFile]:
        """Return the entries of the vector files that were written."""
        return [file.describe() for file in self._vectors.values()]

    def delete(self) -> None:
        self._partitions.delete()

    def _find(self, batch: RawBatch) -> NDArray[np.int64]:
        ids = batch.columns[self._source.key]
        missing = is_missing(ids)
        codes = np.full(batch.num_rows, -1, dtype=np.int64)
        codes[~missing] = self._owner.keys.find(ids.filter(pa.array(~missing)) if missing.any() else ids)
        return codes

    def _first_of_keys(self, codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the rows that are the first row of a known id."""
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
                _quarantine_rows(batch, states == BAD, f"{column.column} {NOT_A_NUMBER}", quarantine)
            elif column.kind == "vector":
                self._write_vectors(batch, column, codes, is_first, quarantine)
            elif column.kind == "categories":
                lists[name], rows[name + COUNTS_SUFFIX] = encode_lists(self._tables[name], values, column.separator)
            elif column.kind == "bag":
                ids, rows[name + COUNTS_SUFFIX] = self._transforms[name].bags(as_display_text(values))
                lists[name] = ids.astype(np.int32)
            else:
                rows[name] = encode_category(self._tables[name], as_display_text(values))
        return Records(rows, lists)

    def _write_vectors(
        self,
        batch: RawBatch,
        column: SideColumn,
        codes: NDArray[np.int64],
        is_first: NDArray[np.bool_],
        quarantine: Quarantine,
    ) -> None:
        values, counts = parse_vectors(batch.columns[column.column], column.separator)
        offsets = offsets_of_lengths(counts)
        file = self._vectors.get(column.feature)
        if file is None:
            if not counts.any():
                return
            width = int(counts[counts > 0][0])
            name = f"{self._owner.owner}_{column.feature}"
            file = VectorFile(self._folder, name, self._owner.num_rows, width, np.dtype(np.float32))
            self._vectors[column.feature] = file
        has_width = counts == file.width
        complete = values[np.repeat(has_width, counts)].reshape(-1, file.width)
        is_good = has_width.copy()
        is_good[has_width] = np.isfinite(complete).all(1)
        reason = f"{column.column} is not a vector of {file.width} finite numbers like the first one"
        _quarantine_rows(batch, (counts > 0) & ~is_good, reason, quarantine)
        rows = np.full(batch.num_rows, -1, dtype=np.int64)
        rows[is_first] = self._owner.row_of_code[codes[is_first]]
        chosen = np.flatnonzero(is_good & (rows >= 0))
        value_indices = offsets[:-1][chosen, None] + np.arange(file.width)
        file.write(rows[chosen], values[value_indices])

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
            owner=self._owner.owner,
            vocabulary_size=len(transform.bounds) + 1 if column.kind == "range" else size,
            transform=transform,
            width=0 if file is None else file.width,
            file="" if file is None else file.relative,
        )


def _quarantine_rows(batch: RawBatch, rows: NDArray[np.bool_], reason: str, quarantine: Quarantine) -> None:
    bad = [BadRow(int(batch.lines[i]), reason, batch.row_text(int(i))) for i in np.flatnonzero(rows)]
    quarantine.add(batch.file, bad)
