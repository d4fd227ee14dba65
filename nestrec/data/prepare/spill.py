"""Records on disk: appended in input order, then split by ranges of a key into partitions that fit in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 16 << 20


class RecordFile:
    """A file of fixed-size records, appended to and then read in chunks. It is open only while it is used."""

    def __init__(self, path: Path, dtype: np.dtype[Any]):
        self.path, self.dtype = path, dtype
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


class Partitions:
    """Records split by ranges of a key: partition p holds the keys from bounds[p] to bounds[p + 1], in input order."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], key: str, bounds: NDArray[np.int64]):
        self.bounds = bounds
        self._key = key
        self._files = [RecordFile(folder / f"{name}-{p:05d}.bin", dtype) for p in range(bounds.size - 1)]

    def __len__(self) -> int:
        return len(self._files)

    def append(self, records: NDArray[Any]) -> None:
        if len(self) == 1:
            self._files[0].append(records)
            return
        places = (np.searchsorted(self.bounds, records[self._key], side="right") - 1).astype(np.uint16)
        order = np.argsort(places, kind="stable")
        ends = np.cumsum(np.bincount(places, minlength=len(self)))
        for p, (start, end) in enumerate(zip(ends - np.diff(ends, prepend=0), ends, strict=True)):
            if end > start:
                self._files[p].append(records[order[start:end]])

    def __getitem__(self, partition: int) -> RecordFile:
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
