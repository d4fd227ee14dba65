"""Parses text columns into numbers and times, with a state per cell: good, blank or bad."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit
from numpy.typing import NDArray

from nestrec.data.dataset_schema import LATEST_TIME_MS
from nestrec.data.prepare.id_encoder import as_texts, text_buffers
from nestrec.data.prepare.prepare_options import TimeUnit

_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
BLANK_WORDS = ("", "nan", "NaN", "null", "NULL", "None", r"\N")
"""Texts that programs write for a missing number or time. In id columns they are ids like any other text."""
_BLANK = pa.array(BLANK_WORDS)
_DIGITS_OF_UNIT: dict[TimeUnit, int] = {"s": 3, "ms": 0, "us": -3, "ns": -6}
"""Number of digits that the decimal point moves to the right when a time of each unit is converted to milliseconds."""
UNIT_NAMES: dict[TimeUnit, str] = {
    "s": "seconds since 1970",
    "ms": "milliseconds since 1970",
    "us": "microseconds since 1970",
    "ns": "nanoseconds since 1970",
    "iso": "dates",
}
FIRST_PLAUSIBLE_S, LAST_PLAUSIBLE_S = 315_532_800, 4_102_444_800
"""Plausible times: 1980 to 2100 UTC. The bounds differ by a factor below 1,000, so a number fits at most one unit."""
_PLAUSIBLE_SHARE = 0.01
_DATES_TRIED = 1000
_OVERFLOW = 2**63 - 1
"""Replaces all numbers that overflow 64 bits."""
GOOD, BLANK, BAD = 0, 1, 2
_LARGEST = float(np.finfo(np.float32).max)
"""Largest float32: datasets store float32 numbers, so larger ones would become infinite."""
NOT_A_TIME, OUT_OF_RANGE, AHEAD = "time is not a time", "time out of range", "time lies ahead of the clock"
NOT_A_NUMBER = "is not a number"
"""Last part of the rejection reason; the column name precedes it."""
TIME_REASONS = (NOT_A_TIME, OUT_OF_RANGE, AHEAD)
"""Rejection reasons that setting another time unit may fix."""


def parse_integers(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return int64 values and states; integers written as `12.0` or `1e3` are good."""
    integers = _integers(column)
    if integers is not None:
        return integers, np.zeros(integers.size, dtype=np.uint8)
    values, states, is_truncated = _parse_scaled_texts(as_texts(column), 0)
    states[(states == GOOD) & (is_truncated | (np.abs(values) >= _OVERFLOW))] = BAD
    return values, states


def parse_numbers(column: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Return float64 values (NaN for blank and bad cells) and states; numbers above the float32 range are bad."""
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


def parse_times_ms(column: pa.Array, unit: TimeUnit) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.bool_]]:
    """Parse a column of times.

    Args:
        column: Numbers, text, or Arrow timestamps.
        unit: One of s, ms, us, ns and iso; ignored for Arrow timestamps.

    Returns:
        Milliseconds since 1970 UTC, states, and whether a good time is out of range (negative, or after 2199).
    """
    if _is_dates(column.type) or unit == "iso":
        times_ms, states = _parse_dates(column)
    else:
        times_ms, states = _parse_scaled(column, unit)
    out_of_range = (states == GOOD) & ((times_ms < 0) | (times_ms >= LATEST_TIME_MS))
    return times_ms, states, out_of_range


def plausible_units(column: pa.Array) -> dict[TimeUnit, str]:
    """Return the time units for which at least 1% of the cells are times from 1980 to 2099, each with an example.

    The result is empty for Arrow timestamps and dates, which need no unit.
    """
    if _is_dates(column.type):
        return {}
    counts, states = _parse_scaled(column, "ms")
    num_present = np.count_nonzero(states != BLANK)
    examples: dict[TimeUnit, int] = {}
    for unit, shift in _DIGITS_OF_UNIT.items():
        scale = 10 ** (3 - shift)
        is_in = (states == GOOD) & (counts >= FIRST_PLAUSIBLE_S * scale) & (counts < LAST_PLAUSIBLE_S * scale)
        if np.count_nonzero(is_in) > _PLAUSIBLE_SHARE * num_present:
            examples[unit] = int(np.argmax(is_in))
    candidates = np.flatnonzero(states == BAD)
    tried = candidates[:_DATES_TRIED]
    is_date = _parse_dates(column.take(pa.array(tried)))[1] == GOOD
    if is_date.any() and is_date.mean() * candidates.size > _PLAUSIBLE_SHARE * num_present:
        examples["iso"] = int(tried[np.argmax(is_date)])
    return {unit: as_texts(column.slice(row, 1))[0].as_py().strip() for unit, row in examples.items()}


def first_number(column: pa.Array) -> str | None:
    """Return the first number of a column of times; None if there is none, or for Arrow timestamps."""
    is_good = np.zeros(0, np.bool_) if _is_dates(column.type) else _parse_scaled(column, "ms")[1] == GOOD
    return str(as_texts(column.slice(int(np.argmax(is_good)), 1))[0].as_py()) if is_good.any() else None


def parse_days(column: pa.Array) -> NDArray[np.float32]:
    """Return the days since 1970 of `yyyy-mm-dd` dates; NaN for blank and bad cells."""
    times_ms, states = _parse_dates(column)
    return np.where(states == GOOD, times_ms / 86_400_000, np.nan).astype(np.float32)


def _parse_scaled(column: pa.Array, unit: TimeUnit) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return milliseconds, rounded down, and states. Exact: integers and text are not converted to float."""
    shift = _DIGITS_OF_UNIT[unit]
    integers = _integers(column)
    if integers is not None:
        return _scaled_integers(integers, shift), np.zeros(integers.size, dtype=np.uint8)
    if pa.types.is_float64(column.type):
        return _scaled_floats(column.to_numpy(zero_copy_only=False), shift)
    return _parse_scaled_texts(as_texts(column), shift)[:2]


def _scaled_integers(integers: NDArray[np.int64], shift: int) -> NDArray[np.int64]:
    if shift > 0:  # clipping keeps times that are out of range out of range, and avoids an overflow
        return np.asarray(np.clip(integers, -1, LATEST_TIME_MS) * 10**shift)
    return np.asarray(integers // 10**-shift)


def _scaled_floats(numbers: NDArray[np.float64], shift: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Scale the shortest decimal text of each number: 1700000000.123 s has 123 ms, although the float is smaller."""
    states = np.where(np.isfinite(numbers), GOOD, np.where(np.isnan(numbers), BLANK, BAD)).astype(np.uint8)
    finite = np.clip(np.where(states == GOOD, numbers, -1), -(2.0**62), 2.0**62)
    if shift <= 0:
        return _scaled_integers(np.floor(finite).astype(np.int64), shift), states
    scale = 10**shift
    finite = np.clip(finite, -1, LATEST_TIME_MS)
    # n / 1000 rounds to the float whose shortest text it is, so the result is the largest n with n / 1000 <= number.
    examples = np.rint(finite * scale)
    examples -= examples / scale > finite
    return examples.astype(np.int64), states


def _parse_scaled_texts(texts: pa.Array, shift: int) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.bool_]]:
    """Return decimal numbers times 10**shift, rounded down; states; and whether a fraction was cut off."""
    if texts.null_count:
        texts = texts.fill_null("")
    values, states, is_truncated = _scaled_texts(*text_buffers(texts), shift)
    bad = np.flatnonzero(states == BAD)
    if bad.size:
        trimmed = pc.utf8_trim_whitespace(texts.take(pa.array(bad)))
        values[bad], states[bad], is_truncated[bad] = _scaled_texts(*text_buffers(trimmed), shift)
        states[bad[pc.is_in(trimmed, _BLANK).to_numpy(zero_copy_only=False)]] = BLANK
    return values, states, is_truncated


@njit(cache=True, nogil=True)
def _scaled_texts(data: NDArray[np.uint8], bounds: NDArray[np.int32], shift: int) -> Any:
    """Parse decimal numbers digit by digit, without the rounding of floats."""
    num_rows = bounds.size - 1
    values = np.zeros(num_rows, dtype=np.int64)
    states = np.full(num_rows, BAD, dtype=np.uint8)
    is_truncated = np.zeros(num_rows, dtype=np.bool_)
    for row in range(num_rows):
        start, end = bounds[row], bounds[row + 1]
        is_negative = start < end and data[start] == 45
        start += start < end and data[start] in (43, 45)
        point = _end_of_digits(data, start, end)
        after = point + (point < end and data[point] == 46)
        end_of_fraction = _end_of_digits(data, after, end) if after > point else after
        exponent, end_of_number = _exponent(data, end_of_fraction, end)
        num_digits = point - start + end_of_fraction - after
        if num_digits == 0 or end_of_number != end:
            continue
        num_integer_digits = point - start + exponent + shift
        value = 0
        for k in range(num_digits):
            digit = data[start + k if start + k < point else after + start + k - point] - 48
            if k >= num_integer_digits:
                is_truncated[row] |= digit > 0
            else:
                value = 10 * value + digit if value < _OVERFLOW // 10 else _OVERFLOW
        for _ in range(num_digits, num_integer_digits):
            if value in (0, _OVERFLOW):
                break
            value = 10 * value if value < _OVERFLOW // 10 else _OVERFLOW
        if is_negative:
            value = -value - (is_truncated[row] and value < _OVERFLOW)
        values[row] = value
        states[row] = GOOD
    return values, states, is_truncated


@njit(cache=True, nogil=True)
def _end_of_digits(data: NDArray[np.uint8], start: int, end: int) -> int:
    while start < end and 48 <= data[start] <= 57:
        start += 1
    return start


@njit(cache=True, nogil=True)
def _exponent(data: NDArray[np.uint8], start: int, end: int) -> tuple[int, int]:
    """Return an exponent and its end; 0 and `start` if there is none, or if it has no digits."""
    if start == end or data[start] not in (69, 101):
        return 0, start
    first = start + 1
    is_negative = first < end and data[first] == 45
    first += first < end and data[first] in (43, 45)
    last = _end_of_digits(data, first, end)
    exponent = 0
    for i in range(first, last):
        exponent = min(10 * exponent + data[i] - 48, 1 << 20)
    return (-exponent if is_negative else exponent), (last if last > first else start)


def _parse_dates(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    if not _is_dates(column.type):
        text = pc.utf8_trim_whitespace(as_texts(column).fill_null(""))
        times = pa.array([_parse_iso(cell) for cell in text.to_pylist()], pa.timestamp("ms", tz="UTC"))
        is_blank = pc.is_in(text, _BLANK).to_numpy(zero_copy_only=False)
    else:
        times = column
        is_blank = column.is_null().to_numpy(zero_copy_only=False)
    is_null = times.is_null().to_numpy(zero_copy_only=False)
    states = np.where(is_blank, BLANK, np.where(is_null, BAD, GOOD)).astype(np.uint8)
    return _floor_to_ms(times), states


def _is_dates(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _floor_to_ms(times: pa.Array) -> NDArray[np.int64]:
    """Return milliseconds of timestamps and dates, rounded down; Arrow's cast would reject microseconds."""
    if pa.types.is_date32(times.type):
        times = times.cast(pa.date64())
    counts = times.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    unit: TimeUnit = "ms" if pa.types.is_date64(times.type) else times.type.unit
    if unit == "s":
        return np.asarray(np.clip(counts, -1, LATEST_TIME_MS) * 1000)
    return np.asarray(counts // 10 ** -_DIGITS_OF_UNIT[unit])


def _parse_iso(cell: str) -> Any:
    import datetime

    try:
        moment = datetime.datetime.fromisoformat(cell.removesuffix(" UTC"))  # BigQuery writes this suffix
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def _integers(column: pa.Array) -> NDArray[np.int64] | None:
    """Return the values of an integer column; None for other columns, or if there are nulls or more than 64 bits."""
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
