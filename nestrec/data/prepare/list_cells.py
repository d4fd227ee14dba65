"""Parses cells that contain lists, and computes signatures of rows.

Cells with several values: lists of typed files and of JSON, or text, with a separator or as lists are written.

A 64-bit hash of each row's cells, by which exact duplicates are told, and of each cell with a key of its column.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit
from numpy.typing import NDArray

from nestrec.base.random import mix64
from nestrec.base.random import mix64_jit as compiled_mix64
from nestrec.data.prepare.id_encoder import IdEncoder, as_texts, text_buffers, text_of_id
from nestrec.data.prepare.parse import parse_numbers

MARK = "\x1f"
"""Stands before each value of a JSON list that was made text: values may hold any other separator."""
_BRACKETS = re.compile(r"\[[^\[\]]*\]")
_NO_COMMA = re.compile(r"""['"]\s+['"]""")
"""Between two texts, as numpy writes them: to Python they would be one text."""


def split_cells(column: pa.Array, separator: str) -> tuple[pa.Array, NDArray[np.int64]]:
    """The values of all cells as text, one cell after the other, and how many each has; blanks are no values."""
    if pa.types.is_nested(column.type):
        flat = column.flatten()
        counts = _lengths(column)
        values = as_texts(flat)
    else:
        text = with_marks(as_texts(column).fill_null(""), separator)
        is_marked = pc.starts_with(text, MARK)
        marked, plain = pc.split_pattern(text, MARK), pc.split_pattern(text, separator)
        lists = plain if not pc.any(is_marked).as_py() else pc.if_else(is_marked, marked, plain)
        values = pc.utf8_trim_whitespace(lists.flatten())
        counts = _lengths(lists)
    values = values.fill_null("")
    is_value = pc.not_equal(values, "").to_numpy(zero_copy_only=False)
    if is_value.all():
        return values, counts
    row = np.repeat(np.arange(counts.size), counts)
    return values.filter(pa.array(is_value)), np.bincount(row[is_value], minlength=counts.size).astype(np.int64)


def with_marks(text: pa.Array, separator: str) -> pa.Array:
    """Cells such as `["a", "b"]`, `['a', 'b']` and `[a, b]` with a mark before each value; all others as they are."""
    trimmed = pc.utf8_trim_whitespace(text)
    is_written = pc.and_(pc.starts_with(trimmed, "["), pc.ends_with(trimmed, "]"))
    if not pc.any(is_written).as_py():
        return text
    cells = trimmed.filter(is_written).dictionary_encode()
    marked = pa.array([_marked(cell, separator) for cell in cells.dictionary.to_pylist()], pa.string())
    return pc.replace_with_mask(text, is_written, marked.take(cells.indices))


def _marked(cell: str, separator: str) -> str:
    values = _written_list(cell)
    if values is not None:
        return text_of(values)
    if _BRACKETS.fullmatch(cell) and not _NO_COMMA.search(cell):
        return "".join(MARK + value.strip() for value in cell[1:-1].split(separator))
    return cell


def _written_list(cell: str) -> list[Any] | None:
    try:
        found = json.loads(cell)
    except (ValueError, RecursionError):
        if _NO_COMMA.search(cell):
            return None
        try:
            found = ast.literal_eval(cell)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    return found if isinstance(found, list) else None


def text_of(value: Any) -> str:
    """A value of JSON as a cell of text; a list has a mark before each of its values."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, list):
        plain = not any(isinstance(part, dict | list) for part in value)
        return "".join(MARK + text_of(part) for part in value) if plain else json.dumps(value, default=str)
    if isinstance(value, float):
        return text_of_id(value)  # 3.0 and 3 are the same number in JSON, and the same id
    return value if isinstance(value, str) else json.dumps(value, default=str)


def encode_lists(table: IdEncoder, column: pa.Array, separator: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Ids from 1 of the values of all cells, in order of first appearance, and how many each cell has."""
    values, counts = split_cells(column, separator)
    ids = table.encode(values) + 1 if len(values) else np.zeros(0, np.int64)
    return ids.astype(np.int32), counts


def is_readable(kind: pa.DataType) -> bool:
    """Whether cells of a type are a value, or a list of values: no records, maps, lists of lists or lists of bytes."""
    if not pa.types.is_nested(kind):
        return not pa.types.is_interval(kind)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return False
    return not (pa.types.is_nested(kind.value_type) or is_bytes(kind.value_type))


def is_bytes(kind: pa.DataType) -> bool:
    """Whether cells are bytes of which nothing says that they are text."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def joined(column: pa.Array) -> pa.Array:
    """Cells with several values as text for people; cells of one value as they are."""
    if not pa.types.is_nested(column.type):
        if not pa.types.is_string(column.type):
            return column
        return pc.replace_substring(pc.utf8_ltrim(column, MARK), MARK, ",") if has_marks(column) else column
    if not is_readable(column.type) or column.flatten().null_count:
        return pa.array([str(cell) for cell in column.to_pylist()], pa.string())
    return pc.binary_join(_lists_of_texts(column), ",").fill_null("")


def marked_lists(column: pa.Array) -> pa.Array:
    """Converts the cells of a nested column to text as `text_of` does: a list gets a mark before each value."""
    if not is_readable(column.type) or column.flatten().null_count:
        return joined(column)
    texts = pc.binary_join(_lists_of_texts(column), MARK)
    return pc.if_else(pc.equal(pc.list_value_length(column), 0), "", pc.binary_join_element_wise("", texts, MARK))


def _lists_of_texts(column: pa.Array) -> pa.Array:
    """Converts the elements of lists, none of them null, to text."""
    offsets = np.concatenate([[0], np.cumsum(_lengths(column))]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), as_texts(column.flatten()), mask=column.is_null())


def vectors(column: pa.Array, separator: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The numbers of all cells, NaN where one is none, and how many each cell has."""
    if pa.types.is_nested(column.type) and not pa.types.is_string(column.type.value_type):
        return column.flatten().cast(pa.float32()).fill_null(np.nan).to_numpy(zero_copy_only=False), _lengths(column)
    if pa.types.is_string(column.type):
        column = pc.utf8_trim(column, "[] ")
    values, counts = split_cells(column, separator)
    return parse_numbers(values)[0].astype(np.float32), counts


def has_marks(column: pa.Array) -> bool:
    """Whether a column of text holds lists of JSON."""
    return bool(pc.any(pc.starts_with(column, MARK)).as_py())


def _lengths(lists: pa.Array) -> NDArray[np.int64]:
    return np.asarray(pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)


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


def category_keys(column: pa.Array, hash_key: int) -> NDArray[np.int64]:
    """A 63-bit hash of (column, value) that is never 0, and 0 for a blank."""
    hashes = (cell_hashes(column, hash_key) >> np.uint64(1)).astype(np.int64)
    is_blank = pc.binary_length(column).to_numpy(zero_copy_only=False) == 0
    return np.where(is_blank, 0, np.maximum(hashes, 1))
