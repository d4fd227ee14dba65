"""Parses cells that contain lists, and computes row hashes for the detection of exact duplicates.

A list cell is a list of a typed file, a JSON list, a list literal in text such as `["a", "b"]`, or text with a
separator. Lists of JSON are stored as text with a mark before each value, which values cannot contain.

A row signature is a 64-bit hash of all cells of the row. Each cell is hashed with a key of its column.
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

LIST_MARK = "\x1f"
"""Mark before each value of a JSON list that was converted to text; values may contain any other separator."""
_BRACKETS = re.compile(r"\[[^\[\]]*\]")
_NO_COMMA = re.compile(r"""['"]\s+['"]""")
"""Matches two quoted texts without a comma, as numpy prints them; Python would concatenate them into one text."""


def split_cells(column: pa.Array, separator: str) -> tuple[pa.Array, NDArray[np.int64]]:
    """Split list cells into their values.

    Args:
        column: Lists or text.
        separator: Separator of the values in text.

    Returns:
        The concatenated values of all cells as text without blanks, and the number of values per cell.
    """
    if pa.types.is_nested(column.type):
        flat = column.flatten()
        counts = _lengths(column)
        values = as_texts(flat)
    else:
        text = mark_lists(as_texts(column).fill_null(""), separator)
        is_marked = pc.starts_with(text, LIST_MARK)
        marked, plain = pc.split_pattern(text, LIST_MARK), pc.split_pattern(text, separator)
        lists = plain if not pc.any(is_marked).as_py() else pc.if_else(is_marked, marked, plain)
        values = pc.utf8_trim_whitespace(lists.flatten())
        counts = _lengths(lists)
    values = values.fill_null("")
    is_value = pc.not_equal(values, "").to_numpy(zero_copy_only=False)
    if is_value.all():
        return values, counts
    row = np.repeat(np.arange(counts.size), counts)
    return values.filter(pa.array(is_value)), np.bincount(row[is_value], minlength=counts.size).astype(np.int64)


def mark_lists(text: pa.Array, separator: str) -> pa.Array:
    """Put a mark before each value of list literals (`["a", "b"]`, `['a', 'b']`, `[a, b]`); keep other cells."""
    trimmed = pc.utf8_trim_whitespace(text)
    is_list_literal = pc.and_(pc.starts_with(trimmed, "["), pc.ends_with(trimmed, "]"))
    if not pc.any(is_list_literal).as_py():
        return text
    cells = trimmed.filter(is_list_literal).dictionary_encode()
    marked = pa.array([_mark_separators(cell, separator) for cell in cells.dictionary.to_pylist()], pa.string())
    return pc.replace_with_mask(text, is_list_literal, marked.take(cells.indices))


def _mark_separators(cell: str, separator: str) -> str:
    values = _parse_list(cell)
    if values is not None:
        return as_cell_text(values)
    if _BRACKETS.fullmatch(cell) and not _NO_COMMA.search(cell):
        return "".join(LIST_MARK + value.strip() for value in cell[1:-1].split(separator))
    return cell


def _parse_list(cell: str) -> list[Any] | None:
    try:
        values_of_cell = json.loads(cell)
    except (ValueError, RecursionError):
        if _NO_COMMA.search(cell):
            return None
        try:
            values_of_cell = ast.literal_eval(cell)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    return values_of_cell if isinstance(values_of_cell, list) else None


def as_cell_text(value: Any) -> str:
    """Convert a JSON value to the text of a cell; a list gets a mark before each of its values."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, list):
        plain = not any(isinstance(part, dict | list) for part in value)
        return "".join(LIST_MARK + as_cell_text(part) for part in value) if plain else json.dumps(value, default=str)
    if isinstance(value, float):
        return text_of_id(value)  # 3.0 and 3 are the same number in JSON, and the same id
    return value if isinstance(value, str) else json.dumps(value, default=str)


def encode_lists(table: IdEncoder, column: pa.Array, separator: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Encode the values of list cells.

    Args:
        table: Vocabulary of the values; unknown values are added.
        column: Lists or text.
        separator: Separator of the values in text.

    Returns:
        The concatenated ids of all cells, from 1 in order of first appearance, and the number of values per cell.
    """
    values, counts = split_cells(column, separator)
    ids = table.encode(values) + 1 if len(values) else np.zeros(0, np.int64)
    return ids.astype(np.int32), counts


def is_value_or_list(kind: pa.DataType) -> bool:
    """Return whether cells of a type are values or lists of values, not structs, maps, nested lists or byte lists."""
    if not pa.types.is_nested(kind):
        return not pa.types.is_interval(kind)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return False
    return not (pa.types.is_nested(kind.value_type) or is_bytes(kind.value_type))


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether a type is a binary type (bytes that are not declared as text)."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def as_display_text(column: pa.Array) -> pa.Array:
    """Convert list cells to readable text with commas; other cells are returned unchanged."""
    if not pa.types.is_nested(column.type):
        if not pa.types.is_string(column.type):
            return column
        return pc.replace_substring(pc.utf8_ltrim(column, LIST_MARK), LIST_MARK, ",") if has_marks(column) else column
    if not is_value_or_list(column.type) or column.flatten().null_count:
        return pa.array([str(cell) for cell in column.to_pylist()], pa.string())
    return pc.binary_join(_lists_of_texts(column), ",").fill_null("")


def as_marked_text(column: pa.Array) -> pa.Array:
    """Convert the cells of a nested column to text in the same form as `as_cell_text`: a mark before each value."""
    if not is_value_or_list(column.type) or column.flatten().null_count:
        return as_display_text(column)
    texts = pc.binary_join(_lists_of_texts(column), LIST_MARK)
    return pc.if_else(pc.equal(pc.list_value_length(column), 0), "", pc.binary_join_element_wise("", texts, LIST_MARK))


def _lists_of_texts(column: pa.Array) -> pa.Array:
    """Convert the elements of lists to text; no element may be null."""
    offsets = np.concatenate([[0], np.cumsum(_lengths(column))]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), as_texts(column.flatten()), mask=column.is_null())


def parse_vectors(column: pa.Array, separator: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the concatenated numbers of all cells (NaN for invalid numbers) and the number of values per cell."""
    if pa.types.is_nested(column.type) and not pa.types.is_string(column.type.value_type):
        return column.flatten().cast(pa.float32()).fill_null(np.nan).to_numpy(zero_copy_only=False), _lengths(column)
    if pa.types.is_string(column.type):
        column = pc.utf8_trim(column, "[] ")
    values, counts = split_cells(column, separator)
    return parse_numbers(values)[0].astype(np.float32), counts


def has_marks(column: pa.Array) -> bool:
    """Return whether a text column contains JSON lists."""
    return bool(pc.any(pc.starts_with(column, LIST_MARK)).as_py())


def _lengths(lists: pa.Array) -> NDArray[np.int64]:
    return np.asarray(pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)


_NAMES_KEY = 0x4E616D65
"""Hash key of column names, so that they differ from the hashes of equal cells."""


def event_signatures(columns: Mapping[str, pa.Array], num_rows: int, *, is_typed: bool = False) -> NDArray[np.uint64]:
    """Return a hash of the named cells of each row, independent of the order of the columns.

    Cells without a value are ignored, so a file without that column gives the same hash. In a typed file these are the
    nulls; in a text file, which has no nulls, they are the empty cells.

    Args:
        columns: Cells by column name.
        num_rows: Number of rows.
        is_typed: Whether the columns come from a typed file.
    """
    signatures = np.zeros(num_rows, dtype=np.uint64)
    for name, column in columns.items():
        texts = as_marked_text(column) if pa.types.is_nested(column.type) else column
        texts = texts.cast(pa.binary()) if is_bytes(texts.type) else as_texts(texts)
        is_absent = texts.is_null().to_numpy(zero_copy_only=False)
        data, bounds = text_buffers(texts.fill_null("") if texts.null_count else texts)
        if not is_typed or pa.types.is_nested(column.type):
            is_absent = is_absent | (np.diff(bounds) == 0)
        rows = np.flatnonzero(~is_absent)
        _add_cells(data, bounds, rows, rows, np.full(rows.size, _key_of(name)), signatures)
    return signatures


def signatures_of_objects(rows: Sequence[Mapping[str, str]]) -> NDArray[np.uint64]:
    """Return the same hashes as `event_signatures` for rows that are texts by name, such as JSON lines."""
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
    """Return a hash of all cells of each row, in column order."""
    signatures = np.zeros(num_rows, dtype=np.uint64)
    for column in columns:
        _fold_cells(*_bytes_of(column), signatures)
    return signatures


def cell_hashes(column: pa.Array, key: int) -> NDArray[np.uint64]:
    """Return the keyed hash of each cell of a text column."""
    hashes = np.full(len(column), mix64(key), dtype=np.uint64)
    _fold_cells(*_bytes_of(column), hashes)
    return hashes


def _bytes_of(column: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    if pa.types.is_nested(column.type):
        column = as_display_text(column)
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
    """Add the keyed hash of each of the `cells` to its row; a sum does not depend on the order of columns."""
    for i in range(cells.size):
        start, end = bounds[cells[i]], bounds[cells[i] + 1]
        signatures[rows[i]] += _fold_bytes(data, start, end, keys[i])


@njit(cache=True, nogil=True)
def _fold_cells(data: NDArray[np.uint8], bounds: NDArray[np.int32], hashes: NDArray[np.uint64]) -> None:
    for row in range(hashes.size):
        hashes[row] = _fold_bytes(data, bounds[row], bounds[row + 1], hashes[row])


@njit(cache=True, nogil=True)
def _fold_bytes(data: NDArray[np.uint8], start: int, end: int, initial: np.uint64) -> np.uint64:
    """Fold the length and the bytes of a cell, eight at a time, into a hash."""
    h = compiled_mix64(initial ^ np.uint64(end - start))
    word = np.uint64(0)
    for i in range(start, end):
        word = (word << np.uint64(8)) | np.uint64(data[i])
        if (i - start) & 7 == 7:
            h = compiled_mix64(h ^ word)
            word = np.uint64(0)
    return compiled_mix64(h ^ word)


def category_keys(column: pa.Array, hash_key: int) -> NDArray[np.int64]:
    """Return a 63-bit hash of (column, value) that is never 0, and 0 for blank cells."""
    hashes = (cell_hashes(column, hash_key) >> np.uint64(1)).astype(np.int64)
    is_blank = pc.binary_length(column).to_numpy(zero_copy_only=False) == 0
    return np.where(is_blank, 0, np.maximum(hashes, 1))
