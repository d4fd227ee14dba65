"""Fits the transforms of numeric features on a stream of values, and writes vector files.

Fitting uses bounded memory, and the result does not depend on how the values are divided into chunks.

Dense vectors of items or users are stored in one array file (.npy) that readers map into memory.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.base.random import mix64_array
from nestrec.data.dataset_card import DataFile, describe_file
from nestrec.data.transform import Transform, TransformKind, signed_log

SAMPLE_SIZE = 1 << 18
"""Maximum number of values that quantiles are computed from exactly; more values are sampled to about this number."""
_BLOCK = 1 << 16
"""Number of values per partial sum; fixed, so that rounding does not depend on how the values arrive."""


class ValueSample:
    """Deterministic sample of a stream: all values up to `size`, then a subset that depends only on their positions."""

    def __init__(self, size: int = SAMPLE_SIZE):
        self._size = size
        self._num_seen = 0
        self._shift = 0
        self._values: list[NDArray[Any]] = []
        self._hashes: list[NDArray[np.uint64]] = []
        self._num_sampled = 0

    def add(self, values: NDArray[Any]) -> None:
        hashes = mix64_array(np.arange(self._num_seen, self._num_seen + values.size, dtype=np.int64))
        self._num_seen += values.size
        self._add_sampled(values, hashes)
        while self._num_sampled > 2 * self._size:
            self._shift += 1
            old = list(zip(self._values, self._hashes, strict=True))
            self._values = []
            self._hashes = []
            self._num_sampled = 0
            for block in old:
                self._add_sampled(*block)

    def values(self) -> NDArray[Any]:
        return np.concatenate(self._values) if self._values else np.zeros(0)

    def _add_sampled(self, values: NDArray[Any], hashes: NDArray[np.uint64]) -> None:
        is_sampled = (hashes & np.uint64((1 << self._shift) - 1)) == 0
        if is_sampled.any():
            self._values.append(values[is_sampled])
            self._hashes.append(hashes[is_sampled])
            self._num_sampled += int(is_sampled.sum())


class TransformFitter:
    """Fits one transform: call `add` with the raw training values, then `result`."""

    def __init__(self, kind: TransformKind, num_buckets: int):
        self._kind = kind
        self._num_buckets = num_buckets
        self._sample = ValueSample()
        self._rest = np.zeros(0)
        self._count = 0
        self._sum = 0.0
        self._squares = 0.0

    def add(self, values: NDArray[Any]) -> None:
        finite = values[np.isfinite(values)]
        if self._kind == "quantiles":
            self._sample.add(finite.astype(np.float32))
        elif self._kind in ("standard", "log"):
            raw = finite.astype(np.float64)
            self._rest = np.concatenate([self._rest, signed_log(raw) if self._kind == "log" else raw])
            while self._rest.size >= _BLOCK:
                self._fold(self._rest[:_BLOCK])
                self._rest = self._rest[_BLOCK:]

    def result(self) -> Transform:
        if self._kind == "quantiles":
            return Transform(kind="quantiles", bounds=_upper_bounds(self._sample.values(), self._num_buckets))
        if self._kind == "none":
            return Transform()
        self._fold(self._rest)
        self._rest = np.zeros(0)
        if not self._count:
            return Transform(kind=self._kind)
        mean = self._sum / self._count
        deviation = float(np.sqrt(max(0.0, self._squares / self._count - mean**2)))
        is_flat = deviation <= 1e-6 * max(1.0, abs(mean))
        return Transform(kind=self._kind, mean=mean, scale=1.0 if is_flat else deviation)

    def _fold(self, values: NDArray[np.float64]) -> None:
        self._count += values.size
        self._sum += float(values.sum())
        self._squares += float((values**2).sum())


def _upper_bounds(values: NDArray[Any], max_buckets: int) -> tuple[float, ...]:
    """Return the upper bounds of buckets with about the same number of values.

    Each bound is an existing value, so that equal values are in the same bucket.
    """
    if not values.size:
        return (0.0,)
    ordered = np.sort(values.astype(np.float32))
    last = np.ceil(np.arange(1, max_buckets + 1) * ordered.size / max_buckets).astype(np.int64) - 1
    return tuple(float(bound) for bound in np.unique(ordered[last]))


def bucket_labels(transform: Transform) -> list[str]:
    """Return display names of the buckets of a `quantiles` transform."""
    bounds = [f"{bound:.6g}" for bound in transform.bounds]
    inner = [f"above {low} to {high}" for low, high in itertools.pairwise(bounds)]
    return [f"up to {bounds[0]}", *inner]


VECTORS_FOLDER = "vectors"


class VectorFile:
    """The array file `vectors/<name>.npy`, whose rows can be written in any order; rows that are not written are zero.

    Rows are written directly and not through a memory map, which would count as memory of this process until closed.
    """

    def __init__(self, folder: Path, name: str, num_rows: int, width: int, dtype: np.dtype[np.floating]):
        self._folder = folder
        self.path = folder / VECTORS_FOLDER / f"{name}.npy"
        self.path.parent.mkdir(exist_ok=True)
        self._shape = (num_rows, width)
        self._dtype = dtype
        with self.path.open("wb") as stream:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": self._shape}
            np.lib.format.write_array_header_1_0(stream, header)
            self._start = stream.tell()
            stream.truncate(self._start + num_rows * width * dtype.itemsize)

    @property
    def width(self) -> int:
        return self._shape[1]

    @property
    def relative(self) -> str:
        return self.path.relative_to(self._folder).as_posix()

    def write(self, rows: NDArray[np.int64], vectors: NDArray[np.floating]) -> None:
        """Write vectors[i] to row rows[i]; consecutive rows are written together."""
        order = np.argsort(rows, kind="stable")
        rows, vectors = rows[order], np.ascontiguousarray(vectors[order], dtype=self._dtype)
        cuts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
        size = self.width * self._dtype.itemsize
        with self.path.open("r+b") as stream:
            for start, end in zip(cuts, [*cuts[1:], rows.size], strict=True):
                os.pwrite(stream.fileno(), vectors[start:end].tobytes(), self._start + int(rows[start]) * size)

    def describe(self) -> DataFile:
        return describe_file(self._folder, self.path, self._shape[0])
