"""Dense vectors of items or users as one array file that readers map into memory."""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nestrec.data.card import DataFile, describe_file

FOLDER = "vectors"


class VectorFile:
    """`vectors/<name>.npy`, written row by row in any order. Rows that are never written are zeros.

    Rows go to the file at once and not through a map: a map would count as memory of this process until it is closed.
    """

    def __init__(self, folder: Path, name: str, num_rows: int, width: int, dtype: np.dtype[np.floating]):
        self._folder, self.path = folder, folder / FOLDER / f"{name}.npy"
        self.path.parent.mkdir(exist_ok=True)
        self._shape, self._dtype = (num_rows, width), dtype
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
        """vectors[i] becomes row rows[i]; runs of neighbours are written together."""
        order = np.argsort(rows, kind="stable")
        rows, vectors = rows[order], np.ascontiguousarray(vectors[order], dtype=self._dtype)
        cuts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
        size = self.width * self._dtype.itemsize
        with self.path.open("r+b") as stream:
            for start, end in zip(cuts, [*cuts[1:], rows.size], strict=True):
                os.pwrite(stream.fileno(), vectors[start:end].tobytes(), self._start + int(rows[start]) * size)

    def entry(self) -> DataFile:
        return describe_file(self._folder, self.path, self._shape[0])
