"""What columns of Parquet hold, as JSON would have it."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nestrec.data.prepare.keys import text_of_id
from nestrec.serving.model.spec import ColumnSpec

Ints = NDArray[np.int64]


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def flat(column: pa.ChunkedArray) -> tuple[pa.Array, Ints]:
    """What the lists of a column hold one after the other, and where each begins and ends; none is an empty list."""
    lists = column.combine_chunks()
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return lists.flatten(), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def milliseconds(told: pa.Array) -> Ints:
    """Of whole numbers, or of moments in any unit."""
    if told.null_count:
        raise pa.ArrowInvalid("a null")
    if pa.types.is_timestamp(told.type):
        told = told.cast(pa.timestamp("ms", told.type.tz), safe=False)
    found: Ints = told.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return found


def is_id(kind: pa.DataType) -> bool:
    """Ids are texts or numbers, as data has them; whole ones may have become floats where a table had gaps."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return bool(is_text(kind) or is_number)


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_whole(told: pa.Array) -> bool:
    """No null, and of floats none that is not a whole number."""
    if told.null_count or not pa.types.is_floating(told.type):
        return not told.null_count
    return bool(pc.all(pc.equal(pc.floor(told), told)).as_py() is not False)


def ids_of(told: pa.Array) -> list[Any]:
    """Texts or whole numbers; decimals as the texts that data makes of them."""
    if pa.types.is_decimal(told.type):
        return [text_of_id(key) for key in told.to_pylist()]
    return (told.cast(pa.int64()) if pa.types.is_floating(told.type) else told).to_pylist()  # type: ignore[no-any-return]


def is_value(kind: pa.DataType) -> bool:
    """What features have: a text, a number, true or false, or lists of them."""
    if is_list(kind) or pa.types.is_dictionary(kind):
        return is_value(kind.value_type)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return bool(is_text(kind) or is_number or pa.types.is_boolean(kind) or pa.types.is_null(kind))


def values_of(told: pa.Array, column: ColumnSpec) -> list[Any]:
    """Values of a feature; whole numbers of categories may have become floats where a table had gaps."""
    if pa.types.is_floating(told.type):
        told = pc.if_else(pc.is_nan(told), None, told)
        is_category = column.has_table and column.transform.kind != "quantiles"
        if is_category and is_whole(told.drop_null()):
            told = told.cast(pa.int64())
    return told.to_pylist()  # type: ignore[no-any-return]
