"""A 64-bit hash of each row's cells, by which exact duplicates are told, and of each cell with a key of its column."""

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from nestrec.base.compiled_random import mix64 as compiled_mix64
from nestrec.base.random import mix64
from nestrec.data.prepare.features.cells import is_bytes, joined


def row_signatures(columns: list[pa.Array], num_rows: int) -> NDArray[np.uint64]:
    """Hash of all cells of each row, in column order."""
    signatures = np.zeros(num_rows, dtype=np.uint64)
    for column in columns:
        _fold_cells(*_bytes_of(column), signatures)
    return signatures


def cell_hashes(column: pa.Array, key: int) -> NDArray[np.uint64]:
    """Hash of each cell of a text column under a key."""
    hashes = np.full(len(column), mix64(key), dtype=np.uint64)
    _fold_cells(*_bytes_of(column), hashes)
    return hashes


def _bytes_of(column: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    if pa.types.is_nested(column.type):
        column = joined(column)
    if is_bytes(column.type):
        column = column.cast(pa.binary())
    elif not pa.types.is_string(column.type):
        column = column.cast(pa.string())
    if column.null_count:
        column = column.fill_null(pa.scalar("\0", column.type))
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    return (np.frombuffer(data, dtype=np.uint8) if data else np.zeros(0, np.uint8)), bounds


@njit(cache=True, nogil=True)
def _fold_cells(data: NDArray[np.uint8], bounds: NDArray[np.int32], hashes: NDArray[np.uint64]) -> None:
    """Each hash folded with the length and the bytes of its cell, eight at a time."""
    for row in range(hashes.size):
        h = compiled_mix64(hashes[row] ^ np.uint64(bounds[row + 1] - bounds[row]))
        word = np.uint64(0)
        for i in range(bounds[row], bounds[row + 1]):
            word = (word << np.uint64(8)) | np.uint64(data[i])
            if (i - bounds[row]) & 7 == 7:
                h = compiled_mix64(h ^ word)
                word = np.uint64(0)
        hashes[row] = compiled_mix64(h ^ word)
