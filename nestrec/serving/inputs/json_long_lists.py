"""JSON parser that reads the long lists of a request directly into arrays.

Most of a ranking request is a few long lists: ids, times, actions. As Python objects, their elements cost more than the
rest of the request: they are created by the parser, validated and looked up one by one. Here one compiled pass over the
text (Numba) reads lists of

    integers                                 [3, 17, 4]
    strings that are canonical integers      ["3", "17", "4"]
    a few repeated words and null            ["click", null, "click"]

and replaces each of them by a placeholder. The remaining short text goes through orjson, which also reports syntax
errors. All other lists are left unchanged, so orjson remains the reference implementation.
"""

import secrets
from typing import Any

import numpy as np
import orjson
from numba import njit

from nestrec.serving.core.typed_list import KINDS, TypedList

_inlined = njit(nogil=True, inline="always")
"""Decorator for inlined functions: a call counts the references of every array argument, which costs more than reading
a few characters."""
_NUMBERS, _TEXTS, _WORDS = 0, 1, 2
_MIN_BYTES = 2048
"""Minimum size of a request body in bytes; orjson alone is faster for shorter ones."""
_MIN_VALUES = 16
_MAX_LISTS, _MAX_WORDS, _MAX_WORD_LENGTH = 16, 16, 64
_MAX_DIGITS = 18
_QUOTE, _BACKSLASH, _COMMA, _COLON, _OPEN, _CLOSE, _MINUS, _SPACE = (np.uint8(ord(c)) for c in '"\\,:[]- ')
_ZERO, _NINE, _LAST = np.uint8(ord("0")), np.uint8(ord("9")), np.uint8(0x7E)
_N, _U, _L = np.uint8(ord("n")), np.uint8(ord("u")), np.uint8(ord("l"))
_MARKER = secrets.token_hex(16)
"""Prefix of the string that replaces an extracted list; random, so that a client cannot guess it."""
_MARKER_BYTES = np.frombuffer(f'"{_MARKER}'.encode(), np.uint8)


def loads(body: bytes) -> Any:
    """Parse JSON as orjson does, with a `TypedList` instead of each supported long list.

    Raises:
        orjson.JSONDecodeError: The body is not valid JSON.
    """
    if len(body) < _MIN_BYTES:
        return orjson.loads(body)
    text = np.frombuffer(body, np.uint8)
    # Upper bounds: a placeholder can be longer than its list, and a value has at least one digit and a separator.
    rest, values = np.empty(len(text) + 2 * _MAX_LISTS, np.uint8), np.empty(len(text) // 2, np.int64)
    lists = np.empty((_MAX_LISTS, 2 + _MAX_WORDS, 2), np.int64)
    num_rest, num_lists = _extract_lists(text, _MARKER_BYTES, rest, values, lists)
    if not num_lists:
        return orjson.loads(body)
    typed_lists = {}
    for number in range(num_lists):
        (kind, first), (count, num_words), *spans = lists[number].tolist()
        spans = spans[:num_words]
        words = tuple(None if size < 0 else body[start : start + size].decode("ascii") for start, size in spans)
        typed_lists[_MARKER + chr(ord("A") + number)] = TypedList(KINDS[kind], values[first : first + count], words)
    return _restore_lists(orjson.loads(rest[:num_rest].tobytes()), typed_lists)


def warm_up() -> None:
    """Compile the parser, so that the first request does not wait for the compilation."""
    loads(b'{"a":[%b],"b":[%b],"c":[%b]}' % tuple(b",".join([text] * _MIN_BYTES) for text in (b"1", b'"1"', b"null")))


def _restore_lists(value: Any, typed_lists: dict[str, TypedList]) -> Any:
    """Replace placeholders, which are values of objects only, by their lists.

    A loop instead of recursion, because orjson allows deeper nesting than Python's stack.
    """
    pending = [value] if isinstance(value, dict | list) else []
    while pending:
        outer = pending.pop()
        if isinstance(outer, dict):
            for name, inner in outer.items():
                if isinstance(inner, str) and inner in typed_lists:
                    outer[name] = typed_lists[inner]
        children = outer.values() if isinstance(outer, dict) else outer
        pending += [child for child in children if isinstance(child, dict | list)]
    return value


@njit(cache=True, nogil=True)
def _extract_lists(text, placeholder, rest, values, lists):  # type: ignore[no-untyped-def]
    """Write the text to `rest`, with placeholders instead of long lists, and the elements of the lists to `values`.

    Each list gets an entry in `lists`: (kind, index of the first value), (number of values, number of words), and the
    (start, size) of each word in the text; the size of null is -1.

    Returns:
        Number of bytes in `rest` and number of lists.
    """
    end = len(text)
    position = 0
    copied = 0
    num_rest = 0
    num_values = 0
    num_lists = 0
    before = _OPEN
    while position < end:
        character = text[position]
        if character == _QUOTE:
            position += 1
            while position < end and text[position] != _QUOTE:
                position += 2 if text[position] == _BACKSLASH else 1
            before = _QUOTE
        elif character == _OPEN and before == _COLON and num_lists < len(lists):
            kind, count, num_words, after = _read(text, position + 1, values[num_values:], lists[num_lists, 2:])
            if count >= _MIN_VALUES:
                size = position - copied
                rest[num_rest : num_rest + size] = text[copied:position]
                num_rest += size
                rest[num_rest : num_rest + len(placeholder)] = placeholder
                num_rest += len(placeholder)
                rest[num_rest] = np.uint8(65 + num_lists)
                rest[num_rest + 1] = _QUOTE
                num_rest += 2
                lists[num_lists, 0, 0] = kind
                lists[num_lists, 0, 1] = num_values
                lists[num_lists, 1, 0] = count
                lists[num_lists, 1, 1] = num_words
                num_lists, num_values, copied, position = num_lists + 1, num_values + count, after, after - 1
            before = _CLOSE
        elif character > _SPACE:
            before = character
        position += 1
    size = end - copied
    rest[num_rest : num_rest + size] = text[copied:end]
    return num_rest + size, num_lists


@_inlined
def _read(text, position, values, words):  # type: ignore[no-untyped-def]
    """Read a list; return (kind, number of values, number of words, end position), with 0 values if unsupported."""
    end = len(text)
    count = 0
    num_words = 0
    position = _after_space(text, position)
    kind = _kind_at(text, position)
    while position < end:
        if kind == _WORDS:
            value, num_words, position = _word_index(text, position, words, num_words)
        else:
            value, position = _number_at(text, position, kind == _TEXTS)
        position = _after_space(text, position)
        if position == 0 or position >= end:
            break
        values[count] = value
        count += 1
        if text[position] == _CLOSE:
            return kind, count, num_words, position + 1
        if text[position] != _COMMA:
            break
        position = _after_space(text, position + 1)
    return 0, 0, 0, 0


@_inlined
def _kind_at(text, position):  # type: ignore[no-untyped-def]
    """Determine the kind of a list from its first value."""
    if position + 1 >= len(text) or (text[position] != _QUOTE and text[position] != _N):
        return _NUMBERS
    following = text[position + 1]
    is_number = text[position] == _QUOTE and (following == _MINUS or _ZERO <= following <= _NINE)
    return _TEXTS if is_number else _WORDS


@_inlined
def _word_index(text, position, words, num_words):  # type: ignore[no-untyped-def]
    """Read a word and add it to `words` if it is new; return (index of the word, number of words, end position).

    The end position is 0 if there is no word, or too many different ones.
    """
    start, size, position = _word(text, position)
    if position == 0:
        return 0, num_words, 0
    for number in range(num_words):
        if words[number, 1] == size and _is_same(text, start, words[number, 0], size):
            return number, num_words, position
    if num_words == len(words):
        return 0, num_words, 0
    words[num_words, 0] = start
    words[num_words, 1] = size
    return num_words, num_words + 1, position


@_inlined
def _number_at(text, position, is_text):  # type: ignore[no-untyped-def]
    """Read an integer, in quotes if `is_text`; return (integer, end position), with end 0 if there is none."""
    if not is_text:
        return _number(text, position)
    if text[position] != _QUOTE:
        return np.int64(0), 0
    number, position = _number(text, position + 1)
    if position == 0 or position >= len(text) or text[position] != _QUOTE:
        return np.int64(0), 0
    return number, position + 1


@_inlined
def _after_space(text, position):  # type: ignore[no-untyped-def]
    if position == 0:  # the preceding value was unsupported
        return 0
    while position < len(text) and (
        text[position] == _SPACE or text[position] == 9 or text[position] == 10 or text[position] == 13
    ):
        position += 1
    return position


@_inlined
def _number(text, position):  # type: ignore[no-untyped-def]
    """Read a canonical integer; return (integer, end position), with end 0 if there is none."""
    end = len(text)
    is_negative = False
    number = np.int64(0)
    if position < end and text[position] == _MINUS:
        is_negative, position = True, position + 1
    start = position
    while position < end and position - start <= _MAX_DIGITS and _ZERO <= text[position] <= _NINE:
        number = number * 10 + np.int64(text[position] - _ZERO)
        position += 1
    size = position - start
    if size == 0 or size > _MAX_DIGITS or (text[start] == _ZERO and (size > 1 or is_negative)):
        return np.int64(0), 0
    return -number if is_negative else number, position


@_inlined
def _word(text, position):  # type: ignore[no-untyped-def]
    """Read a short printable ASCII string without escapes, or null; return (start, size, end); null has size -1."""
    end = len(text)
    if text[position] == _N:
        if position + 4 <= end and text[position + 1] == _U and text[position + 2] == _L and text[position + 3] == _L:
            return position, -1, position + 4
        return 0, 0, 0
    if text[position] != _QUOTE:
        return 0, 0, 0
    start = position + 1
    position = start
    while position < end and position - start <= _MAX_WORD_LENGTH and text[position] != _QUOTE:
        if text[position] < _SPACE or text[position] > _LAST or text[position] == _BACKSLASH:
            return 0, 0, 0
        position += 1
    if position >= end or text[position] != _QUOTE:
        return 0, 0, 0
    return start, position - start, position + 1


@_inlined
def _is_same(text, first, second, size):  # type: ignore[no-untyped-def]
    for i in range(size):  # noqa: SIM110 (numba does not support generators)
        if text[first + i] != text[second + i]:
            return False
    return True
