"""Host-side storage of embedding tables: rows in host memory (DRAM), or read from the exported file on disk."""

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
from nestrec.base.thread_team import parallel_for
from nestrec.embedding.stores.disk_store import pread

_READ_THREADS = 4
_READ_COST = 4
"""Cost of reading a row from a file, in rows copied in memory; it decides over how many threads reads are divided."""


class RowSource(Protocol):
    """Matrix that is read by rows. Reads are thread-safe."""

    num_rows: int
    dim: int
    dtype: torch.dtype

    def read(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """Return rows by id, of shape (ids, D) on the host."""
        ...

    def read_range(self, first: int, end: int) -> torch.Tensor:
        """Return a read-only range of rows, of shape (end - first, D) on the host."""
        ...

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite rows of unique ids; no other thread may read during the call."""
        ...


class DramRows:
    """Row source with all rows in host memory."""

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
    """Row source that reads a safetensors file with `pread`; caching is left to the page cache of the system."""

    def __init__(self, path: Path, tensor: str):
        location = locate_matrix(path, tensor)
        self._start = location.start
        self.num_rows = location.num_rows
        self.dim = location.dim
        self.dtype = location.dtype
        self._name = path.name
        self._row_bytes = location.row_bytes
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, ids: NDArray[np.int64]) -> torch.Tensor:
        rows = torch.empty(len(ids), self.dim, dtype=self.dtype)
        row_bytes = rows.view(torch.uint8).numpy()
        successes = list[bool]()

        def read_part(low: int, high: int) -> None:
            successes.append(_read_rows(self._descriptor, self._start, ids[low:high], row_bytes[low:high]))

        parallel_for(len(ids), _READ_COST * len(ids), read_part, _READ_THREADS)
        if not all(successes):
            raise self._read_error()
        return rows

    def read_range(self, first: int, end: int) -> torch.Tensor:
        rows = torch.empty(end - first, self.dim, dtype=self.dtype)
        view = rows.view(torch.uint8).numpy().reshape(-1).data
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], self._start + first * self._row_bytes + done)
            if count == 0:
                raise self._read_error()
            done += count
        return rows

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        raise AssertionError("exported files are read-only: a model that follows published versions has its own copies")

    def _read_error(self) -> CorruptFileError:
        remedy = "check the disk and export the run again"
        return CorruptFileError("a row could not be read", option="servable file", value=self._name, remedy=remedy)


@dataclass(frozen=True, slots=True)
class MatrixLocation:
    """Location and shape of a matrix in a file."""

    start: int
    """Byte offset of the first row."""
    num_rows: int
    dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.dim * self.dtype.itemsize


def locate_matrix(path: Path, tensor: str) -> MatrixLocation:
    """Return the location of a matrix in a safetensors file, from the header of the file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[tensor]
    num_rows, dim = entry["shape"]
    dtype = next(dtype for dtype, name in DTYPE_NAMES.items() if name == entry["dtype"])
    return MatrixLocation(8 + size + entry["data_offsets"][0], num_rows, dim, dtype)


def tensor_names(path: Path) -> tuple[str, ...]:
    """Return the names of the tensors in a safetensors file."""
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
