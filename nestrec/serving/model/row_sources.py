"""The rows of an exported table outside the device: in host memory, or in the exported file itself. Read only."""

import json
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.artifacts.atomic_files import DTYPE_NAMES
from nestrec.base.errors import CorruptFileError
from nestrec.base.thread_team import for_parts
from nestrec.embedding.stores.disk_store import pread

_READ_THREADS = 4
_COPIES_A_READ = 4
"""a row read from a file counts as this many copied in memory, where rows are divided over threads"""


class RowSource(Protocol):
    """A matrix that is read by rows, from any thread."""

    num_rows: int
    dim: int
    dtype: torch.dtype

    def read(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """(ids, D) on the host"""
        ...

    def read_range(self, first: int, end: int) -> torch.Tensor:
        """(end - first, D) on the host; not to be changed"""
        ...

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Rows of distinct ids, while nobody reads."""
        ...


class DramRows:
    """All rows in host memory."""

    def __init__(self, weight: torch.Tensor):
        self._weight = weight
        (self.num_rows, self.dim) = weight.shape
        self.dtype = weight.dtype

    def read(self, ids: NDArray[np.int64]) -> torch.Tensor:
        return self._weight.index_select(0, torch.from_numpy(ids))

    def read_range(self, first: int, end: int) -> torch.Tensor:
        return self._weight[first:end]

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self._weight.index_copy_(0, ids, rows)


class DiskRows:
    """Rows in a safetensors file; what the system keeps of it in its page cache is the system's affair."""

    def __init__(self, path: Path, tensor: str):
        place = place_of(path, tensor)
        self._start = place.start
        self.num_rows = place.num_rows
        self.dim = place.dim
        self.dtype = place.dtype
        self._name = path.name
        self._row_bytes = place.row_bytes
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, ids: NDArray[np.int64]) -> torch.Tensor:
        rows = torch.empty(len(ids), self.dim, dtype=self.dtype)
        words = rows.view(torch.uint8).numpy()
        are_read = list[bool]()

        def work(low: int, high: int) -> None:
            are_read.append(_read_rows(self._descriptor, self._start, ids[low:high], words[low:high]))

        for_parts(len(ids), _COPIES_A_READ * len(ids), work, _READ_THREADS)
        if not all(are_read):
            raise self._damaged()
        return rows

    def read_range(self, first: int, end: int) -> torch.Tensor:
        rows = torch.empty(end - first, self.dim, dtype=self.dtype)
        view = rows.view(torch.uint8).numpy().reshape(-1).data
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], self._start + first * self._row_bytes + done)
            if count == 0:
                raise self._damaged()
            done += count
        return rows

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        raise AssertionError("an exported file is never changed: a model that follows a run has files of its own")

    def _damaged(self) -> CorruptFileError:
        remedy = "check the disk and export the run again"
        return CorruptFileError("a row could not be read", option="servable file", value=self._name, remedy=remedy)


@dataclass(frozen=True, slots=True)
class MatrixLocation:
    """Where a matrix lies in a file."""

    start: int
    """byte of its first row"""
    num_rows: int
    dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.dim * self.dtype.itemsize


def place_of(path: Path, tensor: str) -> MatrixLocation:
    """Of a matrix in a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[tensor]
    num_rows, dim = entry["shape"]
    dtype = next(dtype for dtype, name in DTYPE_NAMES.items() if name == entry["dtype"])
    return MatrixLocation(8 + size + entry["data_offsets"][0], num_rows, dim, dtype)


def tensors_in(path: Path) -> tuple[str, ...]:
    """Names of what a safetensors file holds."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return tuple(json.loads(file.read(size)))


@njit(cache=True, nogil=True)
def _read_rows(file, start, ids, out):  # type: ignore[no-untyped-def]
    row_bytes = out.shape[1]
    for i in range(len(ids)):
        if pread(file, out.ctypes.data + i * row_bytes, row_bytes, start + ids[i] * row_bytes) != row_bytes:
            return False
    return True
