"""Decodes bytes of any encoding, with a mark in place of bytes that cannot be decoded.

A bad row then does not stop the file that contains it.
"""

import codecs
from collections.abc import Callable, Iterable
from typing import Any

MARK = "\ufdd0"


"""A noncharacter, which no text may hold, in place of bytes that cannot be decoded."""


MARKING = "nestrec.mark"


"""Name of the error handler that puts it there."""


def _mark(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return MARK, error.end


codecs.register_error(MARKING, _mark)


def is_encoding(name: str) -> bool:
    """Returns whether logs can be in an encoding: one of text, whose bytes are Unicode or can be marked as bad."""
    try:
        is_text = "user".encode(name).decode(name) == "user"
        b"\xff\xfe\xff\xfe".decode(name, MARKING)
    except (LookupError, ValueError):
        return False
    try:
        "\ud800".encode(name)
    except UnicodeEncodeError:
        return is_text
    return False  # utf-7 and unicode_escape, whose text can hold half of a surrogate pair


def check_unicode(texts: Iterable[str]) -> None:
    """Raises a UnicodeError for half of a surrogate pair, which JSON can escape and UTF-8 cannot encode."""
    "".join(texts).encode()


class Utf8Stream:
    """A binary stream that reads another one as UTF-8."""

    def __init__(self, inner: Any, encoding: str, see: Callable[[bytes], None] | None = None):
        """see: is given each piece that is read."""
        self._inner = inner
        self._see = see
        self._is_ascii_alike = codecs.lookup(encoding).name in ("utf-8", "iso8859-1", "ascii")
        self._decoder = codecs.getincrementaldecoder(encoding)(errors=MARKING)
        self._is_start = True
        self.closed = False
        self.has_marks = False
        """Whether something could not be decoded so far."""

    def read(self, size: int = -1) -> bytes:
        data = self._read(size)
        if self._is_start:  # a byte order mark does not belong to the first cell
            data = data.removeprefix(codecs.BOM_UTF8) or self._read(size)
            self._is_start = False
        if self._see is not None:
            self._see(data)
        return data

    def _read(self, size: int) -> bytes:
        while True:
            data: bytes = self._inner.read(size)
            is_between = self._decoder.getstate()[0] == b""
            if self._is_ascii_alike and is_between and data.isascii():
                return data
            text = self._decoder.decode(data, final=not data)
            self.has_marks = self.has_marks or MARK in text
            if text or not data:
                return text.encode()

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True
