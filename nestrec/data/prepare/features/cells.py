"""Cells with several values: lists of typed files and of JSON, or text, with a separator or as lists are written."""

import ast
import json
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nestrec.data.prepare.keys import KeyTable, as_texts, text_of_id
from nestrec.data.prepare.parse import parse_numbers

MARK = "\x1f"
"""Stands before each value of a JSON list that was made text: values may hold any other separator."""
_BRACKETS = re.compile(r"\[[^\[\]]*\]")
_NO_COMMA = re.compile(r"""['"]\s+['"]""")
"""Between two texts, as numpy writes them: to Python they would be one text."""


def split_cells(column: pa.Array, separator: str) -> tuple[pa.Array, NDArray[np.int64]]:
    """The values of all cells as text, one cell after the other, and how many each has; blanks are no values."""
    if pa.types.is_nested(column.type):
        flat, counts = column.flatten(), _lengths(column)
        values = as_texts(flat)
    else:
        text = with_marks(as_texts(column).fill_null(""), separator)
        is_marked = pc.starts_with(text, MARK)
        marked, plain = pc.split_pattern(text, MARK), pc.split_pattern(text, separator)
        lists = plain if not pc.any(is_marked).as_py() else pc.if_else(is_marked, marked, plain)
        values, counts = pc.utf8_trim_whitespace(lists.flatten()), _lengths(lists)
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


def encode_lists(table: KeyTable, column: pa.Array, separator: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
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
