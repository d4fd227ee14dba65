"""Text columns to numbers and times, row by row good, blank or bad."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit
from numpy.typing import NDArray

from nestrec.data.prepare.keys import as_texts, text_buffers
from nestrec.data.schema import LATEST_TIME_MS

_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
BLANK_WORDS = ("", "nan", "NaN", "null", "NULL", "None", r"\N")
"""What programs write where there is no number and no time. Ids are taken as they are."""
_BLANK = pa.array(BLANK_WORDS)
_DIGITS_OF_UNIT = {"s": 3, "ms": 0, "us": -3, "ns": -6}
"""How far the decimal point of a number moves to the right when it becomes milliseconds."""
_FAR = 2**63 - 1
"""Stands for all numbers that 64 bits cannot hold."""
GOOD, BLANK, BAD = 0, 1, 2
_LARGEST = float(np.finfo(np.float32).max)
"""Datasets hold numbers of 32 bits: what lies beyond would be infinite there."""
NOT_A_TIME, OUT_OF_RANGE, AHEAD = "time is not a time", "time out of range", "time lies ahead of the clock"
NOT_A_NUMBER = "is not a number"
"""The end of a reason that begins with the column."""
ABOUT_TIME = (NOT_A_TIME, OUT_OF_RANGE, AHEAD)
"""Reasons for which a row is bad that another unit of time may mend."""


def parse_integers(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """int64 values and states. A whole number written as `12.0` or `1e3` is good."""
    whole = _integers(column)
    if whole is not None:
        return whole, np.zeros(whole.size, dtype=np.uint8)
    values, states, has_rest = _parse_scaled_texts(as_texts(column), 0)
    states[(states == GOOD) & (has_rest | (np.abs(values) >= _FAR))] = BAD
    return values, states


def parse_numbers(column: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """float64 values (NaN where blank or bad) and states. A number that 32 bits cannot hold is bad."""
    fast = _cast(column, pa.float64())
    if fast is not None and (np.abs(fast) <= _LARGEST).all():
        return fast, np.zeros(fast.size, dtype=np.uint8)
    text = pc.utf8_trim_whitespace(as_texts(column).fill_null(""))
    is_number = pc.match_substring_regex(text, _NUMBER)
    values = pc.if_else(is_number, text, None).cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
    states = np.full(len(text), BAD, dtype=np.uint8)
    states[np.abs(values) <= _LARGEST] = GOOD
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
    """Whole milliseconds, rounded down. Exact: no integer and no text goes through a float on its way."""
    shift = _DIGITS_OF_UNIT[unit]
    whole = _integers(column)
    if whole is not None:
        return _scaled_integers(whole, shift), np.zeros(whole.size, dtype=np.uint8)
    if pa.types.is_float64(column.type):
        return _scaled_floats(column.to_numpy(zero_copy_only=False), shift)
    return _parse_scaled_texts(as_texts(column), shift)[:2]


def _scaled_integers(whole: NDArray[np.int64], shift: int) -> NDArray[np.int64]:
    if shift > 0:  # whatever is out of range stays there, and does not overflow
        return np.asarray(np.clip(whole, -1, LATEST_TIME_MS) * 10**shift)
    return np.asarray(whole // 10**-shift)


def _scaled_floats(numbers: NDArray[np.float64], shift: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """As the shortest decimal text of each number: 1700000000.123 s is 123 ms, though the float is a bit less."""
    states = np.where(np.isfinite(numbers), GOOD, np.where(np.isnan(numbers), BLANK, BAD)).astype(np.uint8)
    finite = np.clip(np.where(states == GOOD, numbers, -1), -(2.0**62), 2.0**62)
    if shift <= 0:
        return _scaled_integers(np.floor(finite).astype(np.int64), shift), states
    scale = 10**shift
    finite = np.clip(finite, -1, LATEST_TIME_MS)
    # The float that is nearest to n / 1000 has n / 1000 as its text: the largest such n is what the text says.
    found = np.rint(finite * scale)
    found -= found / scale > finite
    return found.astype(np.int64), states


def _parse_scaled_texts(texts: pa.Array, shift: int) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.bool_]]:
    """Decimal numbers times 10 to the power of `shift`, rounded down; states; whether something was cut off."""
    if texts.null_count:
        texts = texts.fill_null("")
    found = _scaled_texts(*text_buffers(texts), shift)
    values, states, has_rest = found
    bad = np.flatnonzero(states == BAD)
    if bad.size:
        trimmed = pc.utf8_trim_whitespace(texts.take(pa.array(bad)))
        values[bad], states[bad], has_rest[bad] = _scaled_texts(*text_buffers(trimmed), shift)
        states[bad[pc.is_in(trimmed, _BLANK).to_numpy(zero_copy_only=False)]] = BLANK
    return values, states, has_rest


@njit(cache=True, nogil=True)
def _scaled_texts(data: NDArray[np.uint8], bounds: NDArray[np.int32], shift: int) -> Any:
    """Digit by digit, so that nothing is rounded: `[sign] digits [. digits] [e [sign] digits]`, and no other form."""
    num_rows = bounds.size - 1
    values = np.zeros(num_rows, dtype=np.int64)
    states = np.full(num_rows, BAD, dtype=np.uint8)
    has_rest = np.zeros(num_rows, dtype=np.bool_)
    for row in range(num_rows):
        i, end = bounds[row], bounds[row + 1]
        is_negative = i < end and data[i] == 45
        i += i < end and data[i] in (43, 45)
        first = i
        while i < end and 48 <= data[i] <= 57:
            i += 1
        num_whole, fraction = i - first, i
        if i < end and data[i] == 46:
            i += 1
            fraction = i
            while i < end and 48 <= data[i] <= 57:
                i += 1
        num_digits = num_whole + i - fraction
        exponent, is_good = 0, num_digits > 0
        if i < end and data[i] in (69, 101):
            i += 1
            sign = -1 if i < end and data[i] == 45 else 1
            i += i < end and data[i] in (43, 45)
            is_good = is_good and i < end
            while i < end and 48 <= data[i] <= 57:
                exponent = min(10 * exponent + data[i] - 48, 1 << 20)
                i += 1
            exponent *= sign
        if not is_good or i < end:
            continue
        num_taken, value = num_whole + exponent + shift, 0
        for k in range(num_digits):
            digit = data[first + k if k < num_whole else fraction + k - num_whole] - 48
            if k >= num_taken:
                has_rest[row] |= digit > 0
            else:
                value = 10 * value + digit if value < _FAR // 10 else _FAR
        for _ in range(num_digits, num_taken):
            if value in (0, _FAR):
                break
            value = 10 * value if value < _FAR // 10 else _FAR
        values[row] = -value - has_rest[row] if is_negative and value < _FAR else -value if is_negative else value
        states[row] = GOOD
    return values, states, has_rest


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
    return np.asarray(counts // 10 ** -_DIGITS_OF_UNIT[unit])


def _iso(cell: str) -> Any:
    import datetime

    try:
        moment = datetime.datetime.fromisoformat(cell.removesuffix(" UTC"))  # as BigQuery writes it
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def _integers(column: pa.Array) -> NDArray[np.int64] | None:
    """A typed column of integers that 64 bits hold, without nulls."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    return _cast(column, pa.int64()) if pa.types.is_integer(column.type) else None


def _cast(column: pa.Array, kind: pa.DataType) -> NDArray[Any] | None:
    if column.null_count:
        return None
    try:
        return np.asarray(column.cast(kind).to_numpy(zero_copy_only=False))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
