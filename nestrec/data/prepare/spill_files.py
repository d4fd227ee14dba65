"""External sort: spills records to disk, and counts duplicates in bounded memory.

Counting of exact duplicates over a whole input in bounded memory: signatures go to files by their top bits.

Records on disk: appended in input order, then split by ranges of a key into partitions that fit in memory.

A record has a fixed size. Its lists lie in files of their own, those of all records one after the other, and the record
says how many values its list has (field `<name>_counts`).
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
Places = NDArray[np.int64] | NDArray[np.bool_] | slice


@dataclass(frozen=True, slots=True)
class Records:
    """Some records with their lists."""

    rows: NDArray[Any]
    """Structured; field `<name>_counts` for each list."""
    lists: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Values of the lists of all rows, one row after the other."""

    @property
    def size(self) -> int:
        return int(self.rows.size)

    def counts(self, name: str) -> NDArray[Any]:
        return np.ascontiguousarray(self.rows[name + COUNTS_SUFFIX])

    def take(self, places: Places) -> "Records":
        """Those at these places, in this order; or those where a mask is set."""
        chosen = np.arange(self.size, dtype=np.int64)[places]
        lists = {name: _take_lists(values, self.counts(name), chosen) for name, values in self.lists.items()}
        return Records(self.rows.take(chosen), lists)  # ten times as fast as an index on records


def _take_lists(values: NDArray[Any], counts: NDArray[Any], places: NDArray[np.int64]) -> NDArray[Any]:
    offsets, out_offsets = offsets_of_lengths(counts), offsets_of_lengths(counts[places])
    out = np.empty(int(out_offsets[-1]), dtype=values.dtype)
    copy_segments(values, offsets, places, out, out_offsets, np.arange(places.size))
    return out


class RecordFile:
    """A file of fixed-size records, appended to and then read in chunks. It is open only while it is used."""

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
        """All records in order, in bounded pieces."""
        count = max(1, CHUNK_BYTES // self.dtype.itemsize)
        with self.path.open("rb") as stream:
            while (chunk := np.fromfile(stream, dtype=self.dtype, count=count)).size:
                yield chunk

    def load(self) -> NDArray[Any]:
        """All records at once."""
        return np.fromfile(self.path, dtype=self.dtype)

    def replace(self, records: NDArray[Any]) -> None:
        """Put other records in place of all."""
        self.path.write_bytes(b"")
        self.num_records = 0
        self.append(records)

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


class RaggedRecordFile:
    """A file of records, and one for each of their lists."""

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
        """All records in order, in bounded pieces."""
        starts = dict.fromkeys(self._lists, 0)
        for rows in self._rows.chunks():
            lists = {}
            for name, file in self._lists.items():
                count = int(rows[name + COUNTS_SUFFIX].sum())
                lists[name] = np.fromfile(file.path, file.dtype, count, offset=starts[name] * file.dtype.itemsize)
                starts[name] += count
            yield Records(rows, lists)

    def rows(self) -> Iterator[NDArray[Any]]:
        """The same without their lists."""
        yield from self._rows.chunks()

    def load_rows(self) -> NDArray[Any]:
        """All records at once, without their lists."""
        return self._rows.load()

    def load(self) -> Records:
        """All records at once."""
        return Records(self._rows.load(), {name: file.load() for name, file in self._lists.items()})

    def replace(self, records: Records) -> None:
        """Put other records in place of all."""
        self._rows.replace(records.rows)
        for name, file in self._lists.items():
            file.replace(records.lists[name])

    def delete(self) -> None:
        for file in (self._rows, *self._lists.values()):
            file.delete()


class KeyPartitions:
    """Records split by ranges of a key: partition p holds the keys from bounds[p] to bounds[p + 1], in input order."""

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
        places = (np.searchsorted(self.bounds, records.rows[self._key], side="right") - 1).astype(np.uint16)
        order = np.argsort(places, kind="stable")
        ends = np.cumsum(np.bincount(places, minlength=len(self)))
        for p, (start, end) in enumerate(zip(ends - np.diff(ends, prepend=0), ends, strict=True)):
            if end > start:
                self._files[p].append(records.take(order[start:end]))

    def __getitem__(self, partition: int) -> RaggedRecordFile:
        return self._files[partition]

    def delete(self) -> None:
        for file in self._files:
            file.delete()


def balanced_bounds(weights: NDArray[np.int64], max_weight: int) -> NDArray[np.int64]:
    """Bounds of consecutive key ranges of about `max_weight` at the most; a key heavier than that stands alone."""
    total = np.cumsum(weights)
    bounds = [0]
    while bounds[-1] < weights.size:
        base = total[bounds[-1] - 1] if bounds[-1] else 0
        end = int(np.searchsorted(total, base + max_weight, side="right"))
        bounds.append(max(end, bounds[-1] + 1))
    return np.array(bounds if weights.size else [0, 0], dtype=np.int64)


def even_bounds(num_keys: int, keys_a_partition: int) -> NDArray[np.int64]:
    """Bounds of ranges with the same number of keys."""
    inner = np.arange(0, num_keys, keys_a_partition, dtype=np.int64)
    return np.append(inner if inner.size else np.zeros(1, np.int64), num_keys)


NUM_BUCKETS = 64


class DuplicateCounter:
    """Counts rows whose signature came before."""

    def __init__(self, folder: Path):
        self._files = [RecordFile(folder / f"signatures-{b:02d}.bin", np.dtype(np.uint64)) for b in range(NUM_BUCKETS)]

    def add(self, signatures: NDArray[np.uint64]) -> None:
        buckets = (signatures >> np.uint64(58)).astype(np.uint8)
        for bucket in np.unique(buckets):
            self._files[bucket].append(signatures[buckets == bucket])

    def finish(self) -> int:
        """The number of duplicates; the files are removed."""
        total = 0
        for file in self._files:
            total += file.num_records - np.unique(file.load()).size
            file.delete()
        return total
