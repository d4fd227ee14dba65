"""A 64-bit hash of each row's cells, by which exact duplicates are told, and of each cell with a key of its column."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from nestrec.base.compiled_random import mix64 as compiled_mix64
from nestrec.base.random import mix64
from nestrec.data.prepare.features.cells import is_bytes, joined, marked_lists
from nestrec.data.prepare.keys import as_texts, text_buffers

_NAMES_KEY = 0x4E616D65
"""Separates the hashes of column names from those of cells."""


def event_signatures(columns: Mapping[str, pa.Array], num_rows: int, *, is_typed: bool = False) -> NDArray[np.uint64]:
    """Returns a hash of the cells of each row by the names of their columns, in whatever order the columns are.

    Cells without a value do not count: a file without their column has the same row. In a typed file these are the
    nulls; in a text file, which has no nulls, they are the empty cells.
    """
    signatures = np.zeros(num_rows, dtype=np.uint64)
    for name, column in columns.items():
        texts = marked_lists(column) if pa.types.is_nested(column.type) else column
        texts = texts.cast(pa.binary()) if is_bytes(texts.type) else as_texts(texts)
        is_absent = texts.is_null().to_numpy(zero_copy_only=False)
        data, bounds = text_buffers(texts.fill_null("") if texts.null_count else texts)
        if not is_typed or pa.types.is_nested(column.type):
            is_absent = is_absent | (np.diff(bounds) == 0)
        rows = np.flatnonzero(~is_absent)
        _add_cells(data, bounds, rows, rows, np.full(rows.size, _key_of(name)), signatures)
    return signatures


def signatures_of_objects(rows: Sequence[Mapping[str, str]]) -> NDArray[np.uint64]:
    """Returns the same for rows that are texts by name, as lines of JSON have them."""
    signatures = np.zeros(len(rows), dtype=np.uint64)
    texts = pa.array([text for row in rows for text in row.values()], pa.string())
    keys = {name: _key_of(name) for name in dict.fromkeys(name for row in rows for name in row)}
    keys_of_cells = np.array([keys[name] for row in rows for name in row], dtype=np.uint64)
    row_of_cell = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    data, bounds = text_buffers(texts)
    cells = np.flatnonzero(np.diff(bounds))
    _add_cells(data, bounds, cells, row_of_cell[cells], keys_of_cells[cells], signatures)
    return signatures


def _key_of(name: str) -> np.uint64:
    key: np.uint64 = cell_hashes(pa.array([name], pa.string()), _NAMES_KEY)[0]
    return key


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
def _add_cells(  # noqa: PLR0917
    data: NDArray[np.uint8],
    bounds: NDArray[np.int32],
    cells: NDArray[np.int64],
    rows: NDArray[np.int64],
    keys: NDArray[np.uint64],
    signatures: NDArray[np.uint64],
) -> None:
    """Add the hash of each of the `cells` under its key to its row: a sum does not depend on the order."""
    for i in range(cells.size):
        start, end = bounds[cells[i]], bounds[cells[i] + 1]
        signatures[rows[i]] += _folded(data, start, end, keys[i])


@njit(cache=True, nogil=True)
def _fold_cells(data: NDArray[np.uint8], bounds: NDArray[np.int32], hashes: NDArray[np.uint64]) -> None:
    for row in range(hashes.size):
        hashes[row] = _folded(data, bounds[row], bounds[row + 1], hashes[row])


@njit(cache=True, nogil=True)
def _folded(data: NDArray[np.uint8], start: int, end: int, initial: np.uint64) -> np.uint64:
    """Folds the length and the bytes of a cell, eight at a time, into a hash."""
    h = compiled_mix64(initial ^ np.uint64(end - start))
    word = np.uint64(0)
    for i in range(start, end):
        word = (word << np.uint64(8)) | np.uint64(data[i])
        if (i - start) & 7 == 7:
            h = compiled_mix64(h ^ word)
            word = np.uint64(0)
    return compiled_mix64(h ^ word)
