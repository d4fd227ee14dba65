"""Vectors of one's own in an array file (.npy), with the ids of its rows in a table or in a file beside it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestrec.base.errors import DataError
from nestrec.data.prepare.keys import as_texts
from nestrec.data.prepare.raw import RawBatch, read_lines, unreadable
from nestrec.data.prepare.side import SideColumn, SideSource
from nestrec.data.prepare.source import require_input

_KEY, _ROWS = "id", 1 << 14


def open_vectors(name: str, text: str, table: SideSource | None, option: str) -> SideSource:
    """The vectors of a feature. text: `FILE.npy` with rows as in the table, or `FILE.npy:IDS`; option: for errors."""
    array, _, ids = text.partition(":")
    vectors = _mapped(require_input(Path(array)), option)
    if not ids and table is None:
        remedy = f"write {name}={array}:IDS with a file of ids, or give the table whose rows it follows"
        raise DataError("has no ids for its rows", field=option, value=text, remedy=remedy)

    def batches() -> Iterator[RawBatch]:
        at = 0
        for keys in _ids_of_file(Path(ids)) if ids else _ids_of_table(table):
            rows = vectors[at : at + len(keys)]
            if len(rows) < len(keys):
                break
            flat = pa.array(np.ascontiguousarray(rows, dtype=np.float32).ravel())
            offsets = pa.array(np.arange(len(keys) + 1, dtype=np.int32) * np.int32(vectors.shape[1]))
            lines = np.arange(at + 1, at + 1 + len(keys), dtype=np.int64)
            at += len(keys)
            yield RawBatch(Path(array).name, lines, {_KEY: keys, name: pa.ListArray.from_arrays(offsets, flat)})
        else:
            if at == len(vectors):
                return
        remedy = "each row of the array needs one id, in the same order"
        raise DataError(
            f"has {len(vectors):,} rows, and there are other numbers of ids", field=option, value=text, remedy=remedy
        )

    return SideSource(batches, _KEY, (SideColumn(name, "vector"),), must_match=f"--{option} {name}={text}")


def _mapped(path: Path, option: str) -> NDArray[Any]:
    try:
        vectors: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if vectors.ndim != 2 or vectors.dtype.kind != "f":
        found = f"is of shape {vectors.shape} and type {vectors.dtype}"
        remedy = "save an array of two dimensions of floating-point numbers with numpy.save"
        raise DataError(found, field=option, value=str(path), remedy=remedy)
    return vectors


def _ids_of_file(path: Path) -> Iterator[pa.Array]:
    if require_input(path).suffix == ".npy":
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        for start in range(0, len(ids), _ROWS):
            yield as_texts(pa.array(np.asarray(ids[start : start + _ROWS])))
        return
    for lines, _, _ in read_lines(path):
        for start in range(0, len(lines), _ROWS):
            yield pa.array([line.strip() for line in lines[start : start + _ROWS]], pa.string())


def _ids_of_table(table: SideSource | None) -> Iterator[pa.Array]:
    assert table is not None
    for batch in table.batches():
        keys = batch.columns[table.key]
        for start in range(0, len(keys), _ROWS):
            yield keys.slice(start, _ROWS)
