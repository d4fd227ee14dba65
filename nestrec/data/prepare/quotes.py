"""A quote that opens a field and is not closed takes in the rows behind it: they would be lost without being counted.

A reader of CSV cannot tell: to it the rows are text of one field, up to the next quote in the file. What can be told is
that this one does not stand where a field ends, or that the file ended first.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.errors import DataError

_FIELD_START, _IN_FIELD, _IN_QUOTES, _AFTER_QUOTE = range(4)
_STATE, _LINE, _OPENED, _WRONG_FROM, _WRONG_TO = range(5)


class QuoteWatch:
    """Follows the quotes of a delimited text as it is read, piece by piece."""

    def __init__(self, separator: str, num_header_lines: int):
        self._separator, self._num_header_lines = ord(separator), num_header_lines
        self._seen = np.array([_FIELD_START, 1, 0, 0, 0], dtype=np.int64)

    def see(self, data: bytes) -> None:
        """The next piece of the file."""
        if not data:
            return
        if self._seen[_STATE] in (_IN_QUOTES, _AFTER_QUOTE) or b'"' in data:
            _follow(np.frombuffer(data, np.uint8), self._seen, self._separator, self._num_header_lines)
            return
        self._seen[_LINE] += data.count(b"\n")
        is_start = data[-1] in (self._separator, ord("\n"), ord("\r"))
        self._seen[_STATE] = _FIELD_START if is_start else _IN_FIELD

    def check(self, path: Path, *, is_end: bool) -> None:
        """Raise where a field in quotes has taken in the end of its line and ended where no field ends."""
        _, line, opened, first, last = self._seen.tolist()
        if is_end and self._seen[_STATE] == _IN_QUOTES and line > opened:
            first, last = opened, line
        if first:
            remedy = (
                'write a quote inside a field as two ("") and put the field in quotes, or say that quotes are plain '
                "characters (of a log of your own: --log.has_quotes false)"
            )
            problem = f"has a quote on line {first:,} that is not closed before line {last:,}"
            raise DataError(
                f"{problem}: the rows between would be lost",
                field="input",
                value=str(path),
                remedy=remedy,
            )


class BlankLines:
    """Finds the lines of a delimited text without a character, as it is read piece by piece.

    A row in quotes that goes over several lines counts as one line, as in the line numbers of rows.
    """

    def __init__(self, separator: str, num_header_lines: int, *, has_quotes: bool):
        self._separator = ord(separator)
        self._num_header_lines = num_header_lines
        self._has_quotes = has_quotes
        self._seen = np.array([_FIELD_START, 1, 1, 0], dtype=np.int64)
        self._found = [np.zeros(0, np.int64)]

    def see(self, data: bytes) -> None:
        """Takes the next piece of the file."""
        lines = np.empty(data.count(b"\n") + data.count(b"\r"), dtype=np.int64)
        how = (self._separator, self._num_header_lines, self._has_quotes)
        num_found = _find_blank(np.frombuffer(data, np.uint8), self._seen, *how, lines)
        self._found.append(lines[:num_found])

    def lines(self) -> NDArray[np.int64]:
        """Returns their numbers, from 1."""
        return np.concatenate(self._found)


@njit(cache=True, nogil=True)
def _find_blank(  # noqa: PLR0917
    data: NDArray[Any],
    seen: NDArray[np.int64],
    separator: int,
    num_header_lines: int,
    has_quotes: bool,
    lines: NDArray[np.int64],
) -> int:
    """Continue in `seen`: the state, the line, whether it is blank so far, whether the last byte was a CR."""
    state, line, is_blank, after_cr = seen
    num_found = 0
    for byte in data:
        is_line_end = byte in (10, 13) and state != _IN_QUOTES
        if is_line_end and not (byte == 10 and after_cr):
            if is_blank:
                lines[num_found] = line
                num_found += 1
            line += 1
            is_blank = 1
            state = _FIELD_START
        elif not is_line_end:
            is_blank = 0
            can_open = state == _AFTER_QUOTE or (state == _FIELD_START and line > num_header_lines)
            if state == _IN_QUOTES:
                state = _AFTER_QUOTE if byte == 34 else _IN_QUOTES
            elif byte == separator:
                state = _FIELD_START
            else:
                state = _IN_QUOTES if has_quotes and byte == 34 and can_open else _IN_FIELD
        after_cr = byte == 13 and is_line_end
    seen[:] = (state, line, is_blank, after_cr)
    return num_found


@njit(cache=True, nogil=True)
def _follow(data: NDArray[Any], seen: NDArray[np.int64], separator: int, num_header_lines: int) -> None:
    """Go on in `seen`: the state, the line, where the last field in quotes opened, and the first one that is wrong."""
    state, line, opened = seen[_STATE], seen[_LINE], seen[_OPENED]
    for byte in data:
        is_line_end = byte in (10, 13)
        if state == _IN_QUOTES:
            if byte == 34:
                state = _AFTER_QUOTE
        elif byte == separator or is_line_end:
            state = _FIELD_START
        elif state == _AFTER_QUOTE and byte == 34:  # two quotes are one that is text
            state = _IN_QUOTES
        elif state == _AFTER_QUOTE:
            if line > opened and seen[_WRONG_FROM] == 0:
                seen[_WRONG_FROM], seen[_WRONG_TO] = opened, line
            state = _IN_FIELD
        elif state == _FIELD_START and byte == 34 and line > num_header_lines:
            state, opened = _IN_QUOTES, line
        else:
            state = _IN_FIELD
        line += byte == 10
    seen[_STATE], seen[_LINE], seen[_OPENED] = state, line, opened
