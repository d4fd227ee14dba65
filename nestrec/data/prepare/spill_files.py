"""Stores records on disk for an external sort, and counts exact duplicates in bounded memory.

Records are appended to a file in input order, and then split by ranges of a key into partitions that fit in memory.
Records have a fixed size. The values of each list are concatenated in a separate file; the record contains the length
of its list (field `<name>_counts`).

`DuplicateCounter` counts exact duplicates over the complete input: it partitions row hashes into files by their top
bits, and counts each file in memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.data.dataset_schema import COUNTS_SUFFIX
from nestrec.data.flat_arrays import copy_segments, offsets_of_lengths

CHUNK_BYTES = 16 << 20
Selection = NDArray[np.int64] | NDArray[np.bool_] | slice


@dataclass(frozen=True, slots=True)
class Records:
    """Records with their lists."""

    rows: NDArray[Any]
    """Structured array with one element per record, and a field `<name>_counts` per list."""
    lists: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Concatenated values of the lists of all records, by name."""

    @property
    def size(self) -> int:
        return int(self.rows.size)

    def counts(self, name: str) -> NDArray[Any]:
        return np.ascontiguousarray(self.rows[name + COUNTS_SUFFIX])

    def take(self, selection: Selection) -> "Records":
        """Return the records at the indices, in this order, or those that a mask selects."""
        chosen = np.arange(self.size, dtype=np.int64)[selection]
        lists = {name: _take_lists(values, self.counts(name), chosen) for name, values in self.lists.items()}
        return Records(self.rows.take(chosen), lists)  # ten times as fast as indexing a structured array


def _take_lists(values: NDArray[Any], counts: NDArray[Any], indices: NDArray[np.int64]) -> NDArray[Any]:
    offsets, out_offsets = offsets_of_lengths(counts), offsets_of_lengths(counts[indices])
    out = np.empty(int(out_offsets[-1]), dtype=values.dtype)
    copy_segments(values, offsets, indices, out, out_offsets, np.arange(indices.size))
    return out


class RecordFile:
    """A file of fixed-size records that is appended to and then read in chunks; it is open only during each call."""

    def __init__(self, path: Path, dtype: np.dtype[Any]):
        self.path = path
        self.dtype = dtype
        self.num_records = 0
        path.write_bytes(b"")

    def append(self, records: NDArray[Any]) -> None:
        assert records.dtype == self.dtype
        with self.path.open("ab") as stream:
            np.ascontiguousarray(records).tofile(stream)
        self.num_records += records.size

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Yield all records in order, in bounded chunks."""
        count = max(1, CHUNK_BYTES // self.dtype.itemsize)
        with self.path.open("rb") as stream:
            while (chunk := np.fromfile(stream, dtype=self.dtype, count=count)).size:
                yield chunk

    def load(self) -> NDArray[Any]:
        """Return all records."""
        return np.fromfile(self.path, dtype=self.dtype)

    def replace(self, records: NDArray[Any]) -> None:
        """Replace all records."""
        self.path.write_bytes(b"")
        self.num_records = 0
        self.append(records)

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


class RaggedRecordFile:
    """Records with variable-length lists: a file of fixed-size records, and one file per list."""

    def __init__(self, path: Path, dtype: np.dtype[Any], lists: Mapping[str, np.dtype[Any]]):
        self._rows = RecordFile(path, dtype)
        self._lists = {
            n: RecordFile(path.with_name(f"{path.stem}.{i}.list"), t) for i, (n, t) in enumerate(lists.items())
        }

    @property
    def num_records(self) -> int:
        return self._rows.num_records

    @property
    def num_bytes(self) -> int:
        return sum(file.num_records * file.dtype.itemsize for file in (self._rows, *self._lists.values()))

    def append(self, records: Records) -> None:
        self._rows.append(records.rows)
        for name, file in self._lists.items():
            file.append(records.lists[name])

    def chunks(self) -> Iterator[Records]:
        """Yield all records in order, in bounded chunks."""
        starts = dict.fromkeys(self._lists, 0)
        for rows in self._rows.chunks():
            lists = {}
            for name, file in self._lists.items():
                count = int(rows[name + COUNTS_SUFFIX].sum())
                lists[name] = np.fromfile(file.path, file.dtype, count, offset=starts[name] * file.dtype.itemsize)
                starts[name] += count
            yield Records(rows, lists)

    def rows(self) -> Iterator[NDArray[Any]]:
        """Yield all records without their lists, in bounded chunks."""
        yield from self._rows.chunks()

    def load_rows(self) -> NDArray[Any]:
        """Return all records without their lists."""
        return self._rows.load()

    def load(self) -> Records:
        """Return all records."""
        return Records(self._rows.load(), {name: file.load() for name, file in self._lists.items()})

    def replace(self, records: Records) -> None:
        """Replace all records."""
        self._rows.replace(records.rows)
        for name, file in self._lists.items():
            file.replace(records.lists[name])

    def delete(self) -> None:
        for file in (self._rows, *self._lists.values()):
            file.delete()


class KeyPartitions:
    """Records partitioned by ranges of a key.

    Partition p contains the keys from bounds[p] to bounds[p + 1], in input order.
    """

    def __init__(  # noqa: PLR0917
        self,
        folder: Path,
        name: str,
        dtype: np.dtype[Any],
        key: str,
        bounds: NDArray[np.int64],
        lists: Mapping[str, np.dtype[Any]],
    ):
        self.bounds = bounds
        self._key = key
        self._files = [RaggedRecordFile(folder / f"{name}-{p:05d}.bin", dtype, lists) for p in range(bounds.size - 1)]

    def __len__(self) -> int:
        return len(self._files)

    def append(self, records: Records) -> None:
        if len(self) == 1:
            self._files[0].append(records)
            return
        indices = (np.searchsorted(self.bounds, records.rows[self._key], side="right") - 1).astype(np.uint16)
        order = np.argsort(indices, kind="stable")
        ends = np.cumsum(np.bincount(indices, minlength=len(self)))
        for p, (start, end) in enumerate(zip(ends - np.diff(ends, prepend=0), ends, strict=True)):
            if end > start:
                self._files[p].append(records.take(order[start:end]))

    def __getitem__(self, partition: int) -> RaggedRecordFile:
        return self._files[partition]

    def delete(self) -> None:
        for file in self._files:
            file.delete()


def balanced_bounds(weights: NDArray[np.int64], max_weight: int) -> NDArray[np.int64]:
    """Return bounds of consecutive key ranges with a total weight of about `max_weight` or less.

    A single key with a larger weight gets a range of its own.
    """
    total = np.cumsum(weights)
    bounds = [0]
    while bounds[-1] < weights.size:
        base = total[bounds[-1] - 1] if bounds[-1] else 0
        end = int(np.searchsorted(total, base + max_weight, side="right"))
        bounds.append(max(end, bounds[-1] + 1))
    return np.array(bounds if weights.size else [0, 0], dtype=np.int64)


def even_bounds(num_keys: int, keys_per_partition: int) -> NDArray[np.int64]:
    """Return bounds of ranges with the same number of keys."""
    inner = np.arange(0, num_keys, keys_per_partition, dtype=np.int64)
    return np.append(inner if inner.size else np.zeros(1, np.int64), num_keys)


NUM_BUCKETS = 64


class DuplicateCounter:
    """Counter of rows whose hash equals that of an earlier row."""

    def __init__(self, folder: Path):
        self._files = [RecordFile(folder / f"signatures-{b:02d}.bin", np.dtype(np.uint64)) for b in range(NUM_BUCKETS)]

    def add(self, signatures: NDArray[np.uint64]) -> None:
        buckets = (signatures >> np.uint64(58)).astype(np.uint8)
        for bucket in np.unique(buckets):
            self._files[bucket].append(signatures[buckets == bucket])

    def finish(self) -> int:
        """Return the number of duplicates, and delete the files."""
        total = 0
        for file in self._files:
            total += file.num_records - np.unique(file.load()).size
            file.delete()
        return total
