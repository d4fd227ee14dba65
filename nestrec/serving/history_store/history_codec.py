"""Events of a user as bytes: parts that can be put one after the other, in whatever order they came.

A part says how long it is and has a checksum over the user and itself, so that a history that was damaged, or is
another user's, is never read. Its columns are arrays of the narrowest whole numbers that hold them: times as steps, ids
that are numbers as such, words that repeat as places in a list. What fits none of these is JSON.
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
"""version, bytes of the body, checksum"""
_COUNT, _NAME, _BASE, _LENGTH = struct.Struct("<I"), struct.Struct("<H"), struct.Struct("<qB"), struct.Struct("<I")
_MISSING, _NUMBERS, _NUMBER_WORDS, _LISTED, _JSON = range(5)
_WIDTHS = {0: np.uint8, 1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LONGEST_NUMBER = 18
"""digits of a word that is kept as a number"""
_SPARE = 0.875
HEAD_BYTES = _HEAD.size


class CorruptHistoryError(ValueError):
    """Bytes that are no history of this user."""


def packed(user: str, events: RawHistory) -> bytes:
    """One part, of events in the order of their times."""
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


def unpacked(user: str, parts: bytes) -> list[RawHistory]:
    """The parts in the order in which they came. `CorruptHistoryError` where they were not packed for this user."""
    found = []
    place = 0
    while place < len(parts):
        if place + _HEAD.size > len(parts):
            raise CorruptHistoryError("a history ends in the middle of a part")
        version, length, checksum = _HEAD.unpack_from(parts, place)
        content = parts[place + _HEAD.size : place + _HEAD.size + length]
        if version != _VERSION or len(content) != length or checksum != _checksum(user, content):
            raise CorruptHistoryError("a history is damaged, or was written by another version")
        found.append(_Reading(content).events())
        place += _HEAD.size + length
    return found


def merged(parts: Sequence[RawHistory], most: int) -> RawHistory:
    """The newest events of all parts, oldest first; those of one time in the order in which they came."""
    history = joined_history(parts)
    times = np.array(history["times_ms"], np.int64)
    if (times[1:] < times[:-1]).any():
        order: list[int] = np.argsort(times, kind="stable").tolist()
        plain = {name: [history[name][i] for i in order] for name in ("items", "times_ms", "actions")}
        features = {name: [values[i] for i in order] for name, values in history["features"].items()}
        history = {**plain, "features": features}
    return newest(history, most)


def cut(user: str, history: RawHistory, most_bytes: int) -> tuple[bytes, int]:
    """One part, and its number of events: all, or where they are too many, some below the most, to last a while."""
    part = packed(user, history)
    while len(part) > most_bytes and history["items"]:
        count = len(history["items"])
        history = newest(history, max(count // 2, int(_SPARE * most_bytes / len(part) * count)))
        part = packed(user, history)
    return part, len(history["items"])


def joined_history(parts: Sequence[RawHistory]) -> RawHistory:
    """Events one part after the other."""
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
            name: column((of_part.get(name) for of_part in features), None)
            for name in dict.fromkeys(name for of_part in features for name in of_part)
        },
    }


def newest(history: RawHistory, most: int) -> RawHistory:
    """The last events, at most so many."""
    first = max(0, len(history["items"]) - most)
    if first == 0:
        return history
    plain = {name: values[first:] for name, values in history.items() if name != "features"}
    return {**plain, "features": {name: values[first:] for name, values in history["features"].items()}}


def _checksum(user: str, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(user.encode("utf-8", "surrogatepass")))


def _column(values: Sequence[Any] | None) -> bytes:
    """A value an event, in the first form that holds all of them."""
    kinds = set() if values is None else set(map(type, values))
    if values is None or kinds <= {type(None)}:
        return bytes([_MISSING])
    if kinds == {int}:
        numbers = _as_numbers(values)
        if numbers is not None:
            return bytes([_NUMBERS]) + _numbers(numbers)
    if kinds == {str} and all(map(_is_number_word, values)):
        return bytes([_NUMBER_WORDS]) + _numbers(np.array(list(map(int, values)), np.int64))
    # Not by the values: 1 and True are one key, and lists are none.
    words = [orjson.dumps(value) for value in values]
    places = {word: place for place, word in enumerate(dict.fromkeys(words))}
    if 2 * len(places) <= len(words):
        listed = b"[" + b",".join(places) + b"]"
        codes = np.array([places[word] for word in words], np.int64)
        return bytes([_LISTED]) + _LENGTH.pack(len(listed)) + listed + _numbers(codes)
    written = b"[" + b",".join(words) + b"]"
    return bytes([_JSON]) + _LENGTH.pack(len(written)) + written


def _as_numbers(values: Sequence[int]) -> NDArray[np.int64] | None:
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return None


def _is_number_word(word: str) -> bool:
    """Written as str writes a whole number."""
    return len(word) <= _LONGEST_NUMBER and word.isascii() and word.isdecimal() and (word[0] != "0" or word == "0")


def _numbers(values: NDArray[np.int64]) -> bytes:
    """The least of them, and what the others are above it."""
    if not len(values):
        return _BASE.pack(0, 0)
    least = values.min()
    above = values.view(np.uint64) - least.view(np.uint64)  # wraps to the distance, whatever the signs
    most = int(above.max())
    width = next(width for width in _WIDTHS if most < 1 << 8 * width)
    return _BASE.pack(int(least), width) + (above.astype(_WIDTHS[width]).tobytes() if width else b"")


class _Reading:
    """Of one body, from its beginning to its end."""

    def __init__(self, content: bytes):
        self._content = content
        self._place = 0
        self._count = 0

    def events(self) -> RawHistory:
        (self._count,) = self._taken(_COUNT)
        times: list[int] = []
        if self._count:
            steps = self._numbers()
            (first,) = self._taken(struct.Struct("<q"))
            times = (np.cumsum(steps) + first).tolist()
        items, actions = self._column(), self._column()
        features = {}
        for _ in range(self._taken(_NAME)[0]):
            name = self._bytes(self._taken(_NAME)[0]).decode()
            features[name] = self._column()
        return {"items": items or [], "times_ms": times, "actions": actions, "features": features}

    def _taken(self, form: struct.Struct) -> tuple[Any, ...]:
        found = form.unpack_from(self._content, self._place)
        self._place += form.size
        return found

    def _bytes(self, count: int) -> bytes:
        found = self._content[self._place : self._place + count]
        self._place += count
        return found

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
                listed = orjson.loads(self._bytes(self._taken(_LENGTH)[0]))
                return [listed[code] for code in self._numbers().tolist()]
            case 4:
                return list(orjson.loads(self._bytes(self._taken(_LENGTH)[0])))
        raise CorruptHistoryError("a column has a form that is not known here")

    def _numbers(self) -> NDArray[np.int64]:
        least, width = self._taken(_BASE)
        if width == 0:
            return np.full(self._count, least, np.int64)
        above = np.frombuffer(self._bytes(width * self._count), _WIDTHS[width]).astype(np.uint64)
        return (above + np.int64(least).view(np.uint64)).view(np.int64)
