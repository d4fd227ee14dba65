"""Long lists of a request as arrays, straight from the text of its JSON.

Most of a ranking request is a few long lists: ids, times, actions. As objects of Python they cost more than all the
rest of the request together: made by the parser, looked at one by one for their type and range, and asked one by one
for their id. Here one pass over the text, without the interpreter, reads those that are

    whole numbers                        [3, 17, 4]
    texts that are whole numbers         ["3", "17", "4"]      written as `str` writes them
    a few words and null, repeated       ["click", null, "click"]

and puts a mark in their place; what is left is short and goes through the usual parser, which finds what is wrong with
it. Whatever is anything else is left where it is, so that the usual way stays the definition.
"""

import secrets
from typing import Any

import numpy as np
import orjson
from numba import njit

from nestrec.serving.core.typed_list import KINDS, TypedList

_inlined = njit(nogil=True, inline="always")
"""A call of a compiled function counts references to each array that it is given: for a character or two, that takes
longer than the call."""
_NUMBERS, _TEXTS, _WORDS = 0, 1, 2
_LEAST_BYTES = 2048
"""of a body: what is shorter is parsed sooner than looked through"""
_LEAST_VALUES = 16
_MOST_LISTS, _MOST_WORDS, _LONGEST_WORD = 16, 16, 64
_MOST_DIGITS = 18
_QUOTE, _BACKSLASH, _COMMA, _COLON, _OPEN, _CLOSE, _MINUS, _SPACE = (np.uint8(ord(c)) for c in '"\\,:[]- ')
_ZERO, _NINE, _LAST = np.uint8(ord("0")), np.uint8(ord("9")), np.uint8(0x7E)
_N, _U, _L = np.uint8(ord("n")), np.uint8(ord("u")), np.uint8(ord("l"))
_MARK = secrets.token_hex(16)
"""of a list that was taken out: nobody who asks can write it"""
_MARK_BYTES = np.frombuffer(f'"{_MARK}'.encode(), np.uint8)


def loads(body: bytes) -> Any:
    """As orjson reads it, with a `TypedList` in place of each long list that can be one. `orjson.JSONDecodeError`."""
    if len(body) < _LEAST_BYTES:
        return orjson.loads(body)
    text = np.frombuffer(body, np.uint8)
    # A mark may be longer than the shortest list, and a value has at least a digit and what ends it.
    rest, values = np.empty(len(text) + 2 * _MOST_LISTS, np.uint8), np.empty(len(text) // 2, np.int64)
    lists = np.empty((_MOST_LISTS, 2 + _MOST_WORDS, 2), np.int64)
    num_rest, num_lists = _taken_out(text, _MARK_BYTES, rest, values, lists)
    if not num_lists:
        return orjson.loads(body)
    found = {}
    for number in range(num_lists):
        (kind, first), (count, num_words), *spans = lists[number].tolist()
        spans = spans[:num_words]
        named = tuple(None if size < 0 else body[start : start + size].decode("ascii") for start, size in spans)
        found[_MARK + chr(ord("A") + number)] = TypedList(KINDS[kind], values[first : first + count], named)
    return _put_back(orjson.loads(rest[:num_rest].tobytes()), found)


def warm_up() -> None:
    """Compile, so that the first request does not wait for it."""
    loads(b'{"a":[%b],"b":[%b],"c":[%b]}' % tuple(b",".join([one] * _LEAST_BYTES) for one in (b"1", b'"1"', b"null")))


def _put_back(value: Any, found: dict[str, TypedList]) -> Any:
    """Marks stand for values of objects only. A loop, since the parser allows deeper nesting than Python's stack."""
    waiting = [value] if isinstance(value, dict | list) else []
    while waiting:
        outer = waiting.pop()
        if isinstance(outer, dict):
            for name, inner in outer.items():
                if isinstance(inner, str) and inner in found:
                    outer[name] = found[inner]
        inside = outer.values() if isinstance(outer, dict) else outer
        waiting += [inner for inner in inside if isinstance(inner, dict | list)]
    return value


@njit(cache=True, nogil=True)
def _taken_out(text, mark, rest, values, lists):  # type: ignore[no-untyped-def]
    """The text with marks in place of plain lists goes to `rest`. Of each list, `lists` gets (kind, first value),
    (number of values, number of words) and where its words are (start, size; size -1: null). Gives the bytes of `rest`
    and the number of lists."""
    end = len(text)
    place = 0
    copied = 0
    num_rest = 0
    num_values = 0
    num_lists = 0
    before = _OPEN
    while place < end:
        character = text[place]
        if character == _QUOTE:
            place += 1
            while place < end and text[place] != _QUOTE:
                place += 2 if text[place] == _BACKSLASH else 1
            before = _QUOTE
        elif character == _OPEN and before == _COLON and num_lists < len(lists):
            kind, count, num_words, after = _read(text, place + 1, values[num_values:], lists[num_lists, 2:])
            if count >= _LEAST_VALUES:
                size = place - copied
                rest[num_rest : num_rest + size] = text[copied:place]
                num_rest += size
                rest[num_rest : num_rest + len(mark)] = mark
                num_rest += len(mark)
                rest[num_rest] = np.uint8(65 + num_lists)
                rest[num_rest + 1] = _QUOTE
                num_rest += 2
                lists[num_lists, 0, 0] = kind
                lists[num_lists, 0, 1] = num_values
                lists[num_lists, 1, 0] = count
                lists[num_lists, 1, 1] = num_words
                num_lists, num_values, copied, place = num_lists + 1, num_values + count, after, after - 1
            before = _CLOSE
        elif character > _SPACE:
            before = character
        place += 1
    size = end - copied
    rest[num_rest : num_rest + size] = text[copied:end]
    return num_rest + size, num_lists


@_inlined
def _read(text, place, values, words):  # type: ignore[no-untyped-def]
    """(kind, number of values, number of words, where the text goes on) of a list; 0 values where it is not plain."""
    end = len(text)
    count = 0
    num_words = 0
    place = _after_space(text, place)
    kind = _kind_at(text, place)
    while place < end:
        if kind == _WORDS:
            value, num_words, place = _coded(text, place, words, num_words)
        else:
            value, place = _number_at(text, place, kind == _TEXTS)
        place = _after_space(text, place)
        if place == 0 or place >= end:
            break
        values[count] = value
        count += 1
        if text[place] == _CLOSE:
            return kind, count, num_words, place + 1
        if text[place] != _COMMA:
            break
        place = _after_space(text, place + 1)
    return 0, 0, 0, 0


@_inlined
def _kind_at(text, place):  # type: ignore[no-untyped-def]
    """By the first value."""
    if place + 1 >= len(text) or (text[place] != _QUOTE and text[place] != _N):
        return _NUMBERS
    following = text[place + 1]
    is_number = text[place] == _QUOTE and (following == _MINUS or _ZERO <= following <= _NINE)
    return _TEXTS if is_number else _WORDS


@_inlined
def _coded(text, place, words, num_words):  # type: ignore[no-untyped-def]
    """(place among the words, number of words, where it ends) of a word, which may be a new one; 0 for the end where
    there is none, or no room for it."""
    start, size, place = _word(text, place)
    if place == 0:
        return 0, num_words, 0
    for number in range(num_words):
        if words[number, 1] == size and _is_same(text, start, words[number, 0], size):
            return number, num_words, place
    if num_words == len(words):
        return 0, num_words, 0
    words[num_words, 0] = start
    words[num_words, 1] = size
    return num_words, num_words + 1, place


@_inlined
def _number_at(text, place, is_text):  # type: ignore[no-untyped-def]
    """(whole number, where it ends); is_text: between quotes. 0 for the end where there is none."""
    if not is_text:
        return _number(text, place)
    if text[place] != _QUOTE:
        return np.int64(0), 0
    number, place = _number(text, place + 1)
    if place == 0 or place >= len(text) or text[place] != _QUOTE:
        return np.int64(0), 0
    return number, place + 1


@_inlined
def _after_space(text, place):  # type: ignore[no-untyped-def]
    if place == 0:  # nothing was found
        return 0
    while place < len(text) and (text[place] == _SPACE or text[place] == 9 or text[place] == 10 or text[place] == 13):
        place += 1
    return place


@_inlined
def _number(text, place):  # type: ignore[no-untyped-def]
    """(a whole number as `str` writes it, where it ends); 0 for the end where there is none."""
    end = len(text)
    is_negative = False
    number = np.int64(0)
    if place < end and text[place] == _MINUS:
        is_negative, place = True, place + 1
    start = place
    while place < end and place - start <= _MOST_DIGITS and _ZERO <= text[place] <= _NINE:
        number = number * 10 + np.int64(text[place] - _ZERO)
        place += 1
    size = place - start
    if size == 0 or size > _MOST_DIGITS or (text[start] == _ZERO and (size > 1 or is_negative)):
        return np.int64(0), 0
    return -number if is_negative else number, place


@_inlined
def _word(text, place):  # type: ignore[no-untyped-def]
    """(start, size, where it ends) of a short text without anything special in it, or of null, whose size is -1."""
    end = len(text)
    if text[place] == _N:
        if place + 4 <= end and text[place + 1] == _U and text[place + 2] == _L and text[place + 3] == _L:
            return place, -1, place + 4
        return 0, 0, 0
    if text[place] != _QUOTE:
        return 0, 0, 0
    start = place + 1
    place = start
    while place < end and place - start <= _LONGEST_WORD and text[place] != _QUOTE:
        if text[place] < _SPACE or text[place] > _LAST or text[place] == _BACKSLASH:
            return 0, 0, 0
        place += 1
    if place >= end or text[place] != _QUOTE:
        return 0, 0, 0
    return start, place - start, place + 1


@_inlined
def _is_same(text, first, second, size):  # type: ignore[no-untyped-def]
    for i in range(size):  # noqa: SIM110 (numba knows no generators)
        if text[first + i] != text[second + i]:
            return False
    return True
