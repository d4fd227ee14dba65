"""Text columns to numbers and times, row by row good, blank or bad."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nestrec.data.schema import LATEST_TIME_MS

_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_INTEGER = r"^-?\d{1,18}$"
BLANK_WORDS = ("", "nan", "NaN", "null", "NULL", "None", r"\N")
"""What programs write where there is no number and no time. Ids are taken as they are."""
_BLANK = pa.array(BLANK_WORDS)
_MS_OF_UNIT = {"s": 1000.0, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
GOOD, BLANK, BAD = 0, 1, 2
_LARGEST = float(np.finfo(np.float32).max)
"""Datasets hold numbers of 32 bits: what lies beyond would be infinite there."""
NOT_A_TIME, OUT_OF_RANGE, AHEAD = "time is not a time", "time out of range", "time lies ahead of the clock"
NOT_A_NUMBER = "is not a number"
"""The end of a reason that begins with the column."""
ABOUT_TIME = (NOT_A_TIME, OUT_OF_RANGE, AHEAD)
"""Reasons for which a row is bad that another unit of time may mend."""


def parse_integers(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """int64 values and states. A whole number written as `12.0` is good."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    fast = _cast(column, pa.int64())
    if fast is not None:
        return fast, np.zeros(fast.size, dtype=np.uint8)
    text = pc.utf8_trim_whitespace(column.cast(pa.string()).fill_null(""))
    is_plain = pc.match_substring_regex(text, _INTEGER)
    values = pc.if_else(is_plain, text, None).cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False).copy()
    numbers, states = parse_numbers(text)
    plain = is_plain.to_numpy(zero_copy_only=False)
    is_whole = (states == GOOD) & (np.abs(np.nan_to_num(numbers)) < 2**53) & (numbers == np.rint(numbers))
    values[is_whole & ~plain] = numbers[is_whole & ~plain].astype(np.int64)
    states[(states == GOOD) & ~is_whole & ~plain] = BAD
    return values, states


def parse_numbers(column: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """float64 values (NaN where blank or bad) and states. A number that 32 bits cannot hold is bad."""
    return _parse_up_to(_LARGEST, column)


def _parse_up_to(largest: float, column: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    fast = _cast(column, pa.float64())
    if fast is not None and (np.abs(fast) <= largest).all():
        return fast, np.zeros(fast.size, dtype=np.uint8)
    text = pc.utf8_trim_whitespace(column.cast(pa.string()).fill_null(""))
    is_number = pc.match_substring_regex(text, _NUMBER)
    values = pc.if_else(is_number, text, None).cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
    states = np.full(len(text), BAD, dtype=np.uint8)
    states[np.abs(values) <= largest] = GOOD
    states[pc.is_in(text, _BLANK).to_numpy(zero_copy_only=False)] = BLANK
    return np.where(states == GOOD, values, np.nan), states


def parse_times_ms(column: pa.Array, unit: str) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.bool_]]:
    """Milliseconds since 1970 UTC, states, and whether a good time lies out of range (negative, or after 2199).

    `unit` is s, ms, us, ns or iso; a column of Arrow timestamps needs none.
    """
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type) or unit == "iso":
        times_ms, states = _parse_dates(column)
    else:
        times_ms, states = _parse_scaled(column, unit)
    out_of_range = (states == GOOD) & ((times_ms < 0) | (times_ms >= LATEST_TIME_MS))
    return times_ms, states, out_of_range


def parse_days(column: pa.Array) -> NDArray[np.float32]:
    """Days since 1970 of `yyyy-mm-dd` dates, NaN where there is none."""
    times_ms, states = _parse_dates(column)
    return np.where(states == GOOD, times_ms / 86_400_000, np.nan).astype(np.float32)


def _parse_scaled(column: pa.Array, unit: str) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    factor = _MS_OF_UNIT[unit]
    whole = _cast(column, pa.int64())
    if whole is not None and whole.size and np.abs(whole).max() < 2**53:
        scaled: NDArray[Any] = whole * 1000 if unit == "s" else whole // round(1 / factor)
        return scaled, np.zeros(whole.size, dtype=np.uint8)
    numbers, states = _parse_up_to(float(np.finfo(np.float64).max), column)
    clipped = np.clip(np.nan_to_num(numbers) * factor, -1, LATEST_TIME_MS)
    return np.floor(clipped).astype(np.int64), states


def _parse_dates(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    if not (pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)):
        text = pc.utf8_trim_whitespace(column.cast(pa.string()).fill_null(""))
        times = pa.array([_iso(cell) for cell in text.to_pylist()], pa.timestamp("ms", tz="UTC"))
        is_blank = pc.is_in(text, _BLANK).to_numpy(zero_copy_only=False)
    else:
        times, is_blank = column, column.is_null().to_numpy(zero_copy_only=False)
    is_null = times.is_null().to_numpy(zero_copy_only=False)
    states = np.where(is_blank, BLANK, np.where(is_null, BAD, GOOD)).astype(np.uint8)
    return _whole_ms(times), states


def _whole_ms(times: pa.Array) -> NDArray[np.int64]:
    """Milliseconds of timestamps and dates, rounded down: a cast refuses the microseconds that most writers keep."""
    if pa.types.is_date32(times.type):
        times = times.cast(pa.date64())
    counts = times.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    unit = "ms" if pa.types.is_date64(times.type) else times.type.unit
    if unit == "s":
        return np.asarray(np.clip(counts, -1, LATEST_TIME_MS) * 1000)
    return np.asarray(counts // round(1 / _MS_OF_UNIT[unit]))


def _iso(cell: str) -> Any:
    import datetime

    try:
        moment = datetime.datetime.fromisoformat(cell.removesuffix(" UTC"))  # as BigQuery writes it
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def _cast(column: pa.Array, kind: pa.DataType) -> NDArray[Any] | None:
    if column.null_count:
        return None
    try:
        return np.asarray(column.cast(kind).to_numpy(zero_copy_only=False))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
