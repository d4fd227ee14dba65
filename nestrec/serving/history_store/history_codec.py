"""Binary encoding of the events of a user: a sequence of parts, one per append, concatenated in any order.

Each part starts with its length and a CRC-32 checksum over the user id and the content, so that a corrupt history, or
the history of another user, is detected. A part stores columns as arrays of the narrowest integer type: times are
delta-encoded, numeric ids are stored as integers, and repeated strings are dictionary-encoded. All other values are
JSON.
"""

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nestrec.serving.history_store.history_store import RawHistory

_VERSION = 1
_HEAD = struct.Struct("<BII")
"""Header of a part: format version, length of the content in bytes, checksum."""
_COUNT, _NAME, _BASE, _LENGTH = struct.Struct("<I"), struct.Struct("<H"), struct.Struct("<qB"), struct.Struct("<I")
_MISSING, _NUMBERS, _NUMBER_WORDS, _DICTIONARY, _JSON = range(5)
_WIDTHS = {0: np.uint8, 1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LONGEST_NUMBER = 18
"""Maximum number of digits of a string that is stored as an integer."""
_FILL_FRACTION = 0.875
"""Fraction of the size limit that remains filled after a cut, so that not every append causes one."""
HEAD_BYTES = _HEAD.size


class CorruptHistoryError(ValueError):
    """The bytes are not a valid history of this user."""


def encode_events(user: str, events: RawHistory) -> bytes:
    """Encode events, which must be sorted by time, as one part."""
    items = events["items"]
    features = events.get("features") or {}
    times = np.array(events["times_ms"], np.int64)
    body = [
        _COUNT.pack(len(items)),
        _numbers(np.diff(times, prepend=times[:1])) + struct.pack("<q", int(times[0])) if len(items) else b"",
        _column(items),
        _column(events.get("actions")),
        _NAME.pack(len(features)),
    ]
    for name, values in features.items():
        encoded = name.encode()
        body += (_NAME.pack(len(encoded)), encoded, _column(values))
    content = b"".join(body)
    return _HEAD.pack(_VERSION, len(content), _checksum(user, content)) + content


def decode_parts(user: str, parts: bytes) -> list[RawHistory]:
    """Decode concatenated parts in the order in which they were appended.

    Raises:
        CorruptHistoryError: The parts are corrupt, or were encoded for another user or by another format version.
    """
    histories = []
    position = 0
    while position < len(parts):
        if position + _HEAD.size > len(parts):
            raise CorruptHistoryError("a stored history is truncated")
        version, length, checksum = _HEAD.unpack_from(parts, position)
        content = parts[position + _HEAD.size : position + _HEAD.size + length]
        if version != _VERSION or len(content) != length or checksum != _checksum(user, content):
            raise CorruptHistoryError("a stored history is corrupt, or was written by another version of nestrec")
        histories.append(_PartReader(content).events())
        position += _HEAD.size + length
    return histories


def merge_parts(parts: Sequence[RawHistory], max_events: int) -> RawHistory:
    """Merge parts by time and return the newest events, oldest first.

    Events with equal times stay in the order in which they were appended.
    """
    history = concatenate_histories(parts)
    times = np.array(history["times_ms"], np.int64)
    if (times[1:] < times[:-1]).any():
        order: list[int] = np.argsort(times, kind="stable").tolist()
        plain = {name: [history[name][i] for i in order] for name in ("items", "times_ms", "actions")}
        features = {name: [values[i] for i in order] for name, values in history["features"].items()}
        history = {**plain, "features": features}
    return newest_events(history, max_events)


def encode_newest(user: str, history: RawHistory, max_bytes: int) -> tuple[bytes, int]:
    """Encode the newest events that fit into `max_bytes` as one part.

    If not all events fit, more are dropped than necessary, so that the next appends do not cause a cut again.

    Returns:
        The part and its number of events.
    """
    part = encode_events(user, history)
    while len(part) > max_bytes and history["items"]:
        count = len(history["items"])
        history = newest_events(history, max(count // 2, int(_FILL_FRACTION * max_bytes / len(part) * count)))
        part = encode_events(user, history)
    return part, len(history["items"])


def concatenate_histories(parts: Sequence[RawHistory]) -> RawHistory:
    """Concatenate histories without sorting; columns that a part does not have are filled with a missing value."""
    counts = [len(part["items"]) for part in parts]

    def column(columns: Iterable[list[Any] | None], missing: Any) -> list[Any]:
        joined: list[Any] = []
        for values, count in zip(columns, counts, strict=True):
            joined += [missing] * count if values is None else values
        return joined

    features = [part.get("features") or {} for part in parts]
    return {
        "items": column((part["items"] for part in parts), None),
        "times_ms": column((part["times_ms"] for part in parts), 0),
        "actions": column((part.get("actions") for part in parts), None),
        "features": {
            name: column((part_features.get(name) for part_features in features), None)
            for name in dict.fromkeys(name for part_features in features for name in part_features)
        },
    }


def newest_events(history: RawHistory, max_events: int) -> RawHistory:
    """Return the last `max_events` events."""
    first = max(0, len(history["items"]) - max_events)
    if first == 0:
        return history
    plain = {name: values[first:] for name, values in history.items() if name != "features"}
    return {**plain, "features": {name: values[first:] for name, values in history["features"].items()}}


def _checksum(user: str, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(user.encode("utf-8", "surrogatepass")))


def _column(values: Sequence[Any] | None) -> bytes:
    """Encode a column (one value per event) in the first encoding that can represent all values."""
    kinds = set() if values is None else set(map(type, values))
    if values is None or kinds <= {type(None)}:
        return bytes([_MISSING])
    if kinds == {int}:
        numbers = _as_numbers(values)
        if numbers is not None:
            return bytes([_NUMBERS]) + _numbers(numbers)
    if kinds == {str} and all(map(_is_number_word, values)):
        return bytes([_NUMBER_WORDS]) + _numbers(np.array(list(map(int, values)), np.int64))
    # The dictionary is keyed by JSON texts: as values, 1 and True would be one key, and lists are not hashable.
    words = [orjson.dumps(value) for value in values]
    codes_by_word = {word: code for code, word in enumerate(dict.fromkeys(words))}
    if 2 * len(codes_by_word) <= len(words):
        vocabulary = b"[" + b",".join(codes_by_word) + b"]"
        codes = np.array([codes_by_word[word] for word in words], np.int64)
        return bytes([_DICTIONARY]) + _LENGTH.pack(len(vocabulary)) + vocabulary + _numbers(codes)
    json_text = b"[" + b",".join(words) + b"]"
    return bytes([_JSON]) + _LENGTH.pack(len(json_text)) + json_text


def _as_numbers(values: Sequence[int]) -> NDArray[np.int64] | None:
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return None


def _is_number_word(word: str) -> bool:
    """Return whether converting the string to int and back gives the same string."""
    return len(word) <= _LONGEST_NUMBER and word.isascii() and word.isdecimal() and (word[0] != "0" or word == "0")


def _numbers(values: NDArray[np.int64]) -> bytes:
    """Encode integers as their minimum and the distances from it (frame of reference), in the narrowest type."""
    if not len(values):
        return _BASE.pack(0, 0)
    minimum = values.min()
    distances = values.view(np.uint64) - minimum.view(np.uint64)  # unsigned wraparound handles all signs
    max_distance = int(distances.max())
    width = next(width for width in _WIDTHS if max_distance < 1 << 8 * width)
    return _BASE.pack(int(minimum), width) + (distances.astype(_WIDTHS[width]).tobytes() if width else b"")


class _PartReader:
    """Sequential decoder of the content of one part."""

    def __init__(self, content: bytes):
        self._content = content
        self._position = 0
        self._count = 0

    def events(self) -> RawHistory:
        (self._count,) = self._unpack(_COUNT)
        times: list[int] = []
        if self._count:
            steps = self._numbers()
            (first,) = self._unpack(struct.Struct("<q"))
            times = (np.cumsum(steps) + first).tolist()
        items, actions = self._column(), self._column()
        features = {}
        for _ in range(self._unpack(_NAME)[0]):
            name = self._bytes(self._unpack(_NAME)[0]).decode()
            features[name] = self._column()
        return {"items": items or [], "times_ms": times, "actions": actions, "features": features}

    def _unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        fields = layout.unpack_from(self._content, self._position)
        self._position += layout.size
        return fields

    def _bytes(self, count: int) -> bytes:
        content = self._content[self._position : self._position + count]
        self._position += count
        return content

    def _column(self) -> list[Any] | None:
        kind = self._bytes(1)[0]
        match kind:
            case 0:
                return None
            case 1:
                return list(self._numbers().tolist())
            case 2:
                return list(map(str, self._numbers().tolist()))
            case 3:
                vocabulary = orjson.loads(self._bytes(self._unpack(_LENGTH)[0]))
                return [vocabulary[code] for code in self._numbers().tolist()]
            case 4:
                return list(orjson.loads(self._bytes(self._unpack(_LENGTH)[0])))
        raise CorruptHistoryError("a stored history has a column with an unknown encoding")

    def _numbers(self) -> NDArray[np.int64]:
        minimum, width = self._unpack(_BASE)
        if width == 0:
            return np.full(self._count, minimum, np.int64)
        distances = np.frombuffer(self._bytes(width * self._count), _WIDTHS[width]).astype(np.uint64)
        return (distances + np.int64(minimum).view(np.uint64)).view(np.int64)
