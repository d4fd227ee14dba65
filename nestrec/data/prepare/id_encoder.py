"""Encodes user and item ids as dense codes (id vocabulary), and filters rare users and items (k-core).

`IdEncoder` assigns dense codes in order of first appearance. Ids are text. An id that is the plain decimal form of an
integer is stored in a compiled hash table (about 24 bytes per id), any other id in a dictionary; `7` and `007` are
different ids.

`apply_filter` removes rare users and items (k-core, minimum history length) in several passes over the events on disk.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.random import GOLDEN64
from nestrec.data.flat_arrays import add_counts

Pairs = Callable[[], Iterator[tuple[NDArray[Any], NDArray[Any]]]]
"""Returns a new iterator over the (user codes, item codes) of all events, in chunks."""


@config
class CoreFilter:
    """Rules for the removal of rare users and items."""

    user_core: int = 0
    """Minimum number of events of a user; users with fewer events are removed."""
    item_core: int = 0
    """Minimum number of events of an item; items with fewer events are removed."""
    is_iterated: bool = True
    """Whether removal is repeated until every remaining user and item has enough events (a true k-core); otherwise
    events are counted once, before removal."""
    min_user_events: int = 0
    """Minimum number of remaining events of a user, applied once at the end; items are not filtered again."""


@dataclass(frozen=True, slots=True)
class FilterResult:
    """Users and items that remain after filtering.

    Attributes:
        users: Whether each user remains, by code.
        items: Whether each item remains, by code.
        user_counts: Number of remaining events per user.
        item_counts: Number of remaining events per item.
    """

    users: NDArray[np.bool_]
    items: NDArray[np.bool_]
    user_counts: NDArray[np.int64]
    item_counts: NDArray[np.int64]


def apply_filter(rule: CoreFilter, pairs: Pairs, num_users: int, num_items: int) -> FilterResult:
    """Return the users and items that remain after a filter.

    Reads all events once per round. Memory use is a few bytes per user and item.
    """
    selected = _count(pairs, np.ones(num_users, np.bool_), np.ones(num_items, np.bool_))
    while True:
        users = selected.users & (selected.user_counts >= rule.user_core)
        items = selected.items & (selected.item_counts >= rule.item_core)
        is_stable = np.array_equal(users, selected.users) and np.array_equal(items, selected.items)
        if not is_stable:
            selected = _count(pairs, users, items)
        if is_stable or not rule.is_iterated:
            break
    users = selected.users & (selected.user_counts >= max(1, rule.min_user_events))
    if not np.array_equal(users, selected.users):
        selected = _count(pairs, users, selected.items)
    return FilterResult(
        selected.users, selected.items & (selected.item_counts > 0), selected.user_counts, selected.item_counts
    )


def _count(pairs: Pairs, users: NDArray[np.bool_], items: NDArray[np.bool_]) -> FilterResult:
    user_counts, item_counts = np.zeros(users.size, np.int64), np.zeros(items.size, np.int64)
    for event_users, event_items in pairs():
        is_selected = users[event_users] & items[event_items]
        add_counts(event_users[is_selected], user_counts)
        add_counts(event_items[is_selected], item_counts)
    return FilterResult(users, items, user_counts, item_counts)


_TOO_LARGE = 10**18
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean)
_EMPTY = -1
_TEXT = -(2**63)
"""Placeholder for a text id in the array of integers; it has more than 18 digits, so no integer id equals it."""


class IdEncoder:
    """Vocabulary of ids: maps ids to codes 0, 1, ... in order of first appearance, and codes back to ids."""

    def __init__(self) -> None:
        self._buckets = np.zeros(1 << 10, dtype=np.int64)
        self._codes = np.full(1 << 10, _EMPTY, dtype=np.int64)
        self._number_of_code = np.zeros(1 << 10, dtype=np.int64)
        self._code_of_text: dict[str, int] = {}
        self._text_of_code: dict[int, str] = {}
        self._size = 0
        self._num_numbers = 0

    def __len__(self) -> int:
        return self._size

    def encode(self, ids: pa.Array) -> NDArray[np.int64]:
        """Return the codes of ids; unknown ids are added and get the next codes.

        Args:
            ids: Text or integers without nulls.
        """
        numbers = as_numbers(ids)
        if numbers is not None:
            return self._encode_numbers(numbers)
        encoded = as_texts(ids).dictionary_encode()
        codes = np.array([self._encode_one(text) for text in encoded.dictionary.to_pylist()], np.int64)
        return np.asarray(codes[encoded.indices.to_numpy()])

    def find(self, ids: pa.Array) -> NDArray[np.int64]:
        """Return the codes of ids, -1 for unknown ids."""
        numbers = as_numbers(ids)
        if numbers is not None:
            return _find(self._buckets, self._codes, numbers)
        encoded = as_texts(ids).dictionary_encode()
        codes = np.array([self._find_one(text) for text in encoded.dictionary.to_pylist()], np.int64)
        return np.asarray(codes[encoded.indices.to_numpy()])

    def keys(self, codes: NDArray[np.int64]) -> pa.Array:
        """Return the ids of codes as text."""
        text = pa.array(self._number_of_code[codes]).cast(pa.string())
        if not self._code_of_text:
            return text
        is_text = self._number_of_code[codes] == _TEXT
        replacement = pa.array([self._text_of_code[code] for code in codes[is_text].tolist()], pa.string())
        return pc.replace_with_mask(text, pa.array(is_text), replacement)

    def all_keys(self) -> pa.Array:
        """Return all ids in order of code."""
        return self.keys(np.arange(self._size, dtype=np.int64))

    def _encode_numbers(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        out = np.empty(numbers.size, dtype=np.int64)
        num_encoded = 0
        while True:
            self._reserve(len(self._code_of_text) + self._buckets.size // 2 + 1)
            self._size, self._num_numbers, num_encoded = _encode(
                (self._buckets, self._codes, self._number_of_code),
                (self._size, self._num_numbers),
                numbers,
                out,
                num_encoded,
            )
            if num_encoded == numbers.size:
                return out
            self._buckets, self._codes = _grow(self._buckets, self._codes)

    def _encode_one(self, text: str) -> int:
        if is_plain_number(text):
            return int(self._encode_numbers(np.array([int(text)], dtype=np.int64))[0])
        code = self._code_of_text.setdefault(text, self._size)
        if code == self._size:
            self._reserve(self._size + 1)
            self._number_of_code[code] = _TEXT
            self._text_of_code[code] = text
            self._size += 1
        return code

    def _find_one(self, text: str) -> int:
        if is_plain_number(text):
            return int(_find(self._buckets, self._codes, np.array([int(text)], dtype=np.int64))[0])
        return self._code_of_text.get(text, -1)

    def _reserve(self, size: int) -> None:
        if size > self._number_of_code.size:
            grown = np.zeros(max(size, 2 * self._number_of_code.size), dtype=np.int64)
            grown[: self._size] = self._number_of_code[: self._size]
            self._number_of_code = grown


def as_texts(cells: pa.Array) -> pa.Array:
    """Convert the cells of a column to text; nulls and NaN become nulls.

    The text of a cell depends only on its value, not on its type or on the other cells of its batch: 7, 7.0 and the
    decimal 7.00 are all `7`, and 1e10 is `10000000000`.
    """
    if pa.types.is_string(cells.type):
        return cells
    if pa.types.is_boolean(cells.type):
        return cells.cast(pa.int8()).cast(pa.string())  # the text that JSON's true and false are converted to
    if pa.types.is_float16(cells.type):
        cells = cells.cast(pa.float32())
    if not (pa.types.is_floating(cells.type) or pa.types.is_decimal(cells.type)):
        return cells.cast(pa.string())
    numbers = as_numbers(cells) if not cells.null_count else None
    if numbers is not None:
        return pa.array(numbers).cast(pa.string())
    encoded = cells.dictionary_encode()
    is_decimal = pa.types.is_decimal(cells.type)
    # float32 values must not become float64: 0.1 would turn into 0.10000000149.
    values = encoded.dictionary.to_pylist() if is_decimal else encoded.dictionary.to_numpy(zero_copy_only=False)
    texts = [None if value is None else text_of_id(value) for value in values]
    return pa.array([text or None for text in texts], pa.string()).take(encoded.indices)


def text_of_id(key: str | float | Decimal) -> str:
    """Return the text of an id: all digits of an integer, otherwise the shortest unique decimal; empty for NaN."""
    if isinstance(key, str):
        return key
    if isinstance(key, Decimal):
        text = f"{key:f}"
        return text.rstrip("0").removesuffix(".") if "." in text else text
    if math.isnan(key):
        return ""
    if math.isinf(key):
        return "inf" if key > 0 else "-inf"
    return str(int(key)) if key == int(key) else np.format_float_positional(key, trim="-")


def as_numbers(ids: pa.Array) -> NDArray[np.int64] | None:
    """Return the ids as int64 if all are integers of at most 18 digits in plain decimal form, otherwise None."""
    if pa.types.is_string(ids.type):
        numbers = np.empty(len(ids), dtype=np.int64)
        is_plain = not ids.null_count and _parse_plain(*text_buffers(ids), numbers)
        return numbers if is_plain else None
    if not any(is_kind(ids.type) for is_kind in _NUMBERS):
        return None  # Arrow would cast a date or timestamp to its number of days or seconds
    try:
        numbers = np.asarray(ids.cast(pa.int64()).to_numpy(zero_copy_only=False))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    magnitude = np.abs(numbers)
    if magnitude.size and (magnitude.max() >= _TOO_LARGE or magnitude.min() < 0):
        return None
    return numbers


def text_buffers(texts: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return the bytes of a text column and the offsets of its cells."""
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return (np.frombuffer(data, dtype=np.uint8) if data else np.zeros(0, np.uint8)), bounds


def is_plain_number(text: str) -> bool:
    """Return whether `text` equals the output of `str` for an integer of at most 18 digits."""
    digits = text[1:] if text[:1] == "-" else text
    return digits.isascii() and digits.isdigit() and len(digits) <= 18 and str(int(text)) == text


@njit(cache=True, nogil=True)
def _parse_plain(data: NDArray[np.uint8], bounds: NDArray[np.int32], numbers: NDArray[np.int64]) -> bool:
    """Parse all texts as integers into `numbers`; return False at the first that is not a plain number."""
    for row in range(numbers.size):
        start, end = bounds[row], bounds[row + 1]
        is_negative = end > start and data[start] == 45
        start += is_negative
        if not 0 < end - start <= 18 or (data[start] == 48 and (is_negative or end - start > 1)):
            return False
        number = 0
        for i in range(start, end):
            if not 48 <= data[i] <= 57:
                return False
            number = 10 * number + data[i] - 48
        numbers[row] = -number if is_negative else number
    return True


@njit(cache=True, nogil=True)
def _bucket_of(number: int, mask: int) -> np.int64:
    h = np.uint64(number) * np.uint64(GOLDEN64)
    return np.int64((h ^ (h >> np.uint64(32))) & np.uint64(mask))


@njit(cache=True, nogil=True)
def _encode(table, sizes, numbers, out, start) -> Any:  # type: ignore[no-untyped-def]
    """Encode from `start` until the hash table is half full; return the new sizes and the number of encoded ids."""
    buckets, codes, number_of_code = table
    size, num_numbers = sizes
    mask = buckets.size - 1
    for i in range(start, numbers.size):
        bucket = _bucket_of(numbers[i], mask)
        while codes[bucket] != _EMPTY and buckets[bucket] != numbers[i]:
            bucket = (bucket + 1) & mask
        if codes[bucket] == _EMPTY:
            if 2 * num_numbers >= buckets.size:
                return size, num_numbers, i
            buckets[bucket] = numbers[i]
            codes[bucket] = size
            number_of_code[size] = numbers[i]
            size += 1
            num_numbers += 1
        out[i] = codes[bucket]
    return size, num_numbers, numbers.size


@njit(cache=True, nogil=True)
def _find(buckets: NDArray[np.int64], codes: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    out = np.empty(numbers.size, dtype=np.int64)
    mask = buckets.size - 1
    for i in range(numbers.size):
        bucket = _bucket_of(numbers[i], mask)
        while codes[bucket] != _EMPTY and buckets[bucket] != numbers[i]:
            bucket = (bucket + 1) & mask
        out[i] = codes[bucket]
    return out


@njit(cache=True, nogil=True)
def _grow(buckets: NDArray[np.int64], codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    new_buckets = np.zeros(2 * buckets.size, dtype=np.int64)
    new_codes = np.full(2 * buckets.size, _EMPTY, dtype=np.int64)
    mask = new_buckets.size - 1
    for old in range(buckets.size):
        if codes[old] != _EMPTY:
            bucket = _bucket_of(buckets[old], mask)
            while new_codes[bucket] != _EMPTY:
                bucket = (bucket + 1) & mask
            new_buckets[bucket] = buckets[old]
            new_codes[bucket] = codes[old]
    return new_buckets, new_codes
