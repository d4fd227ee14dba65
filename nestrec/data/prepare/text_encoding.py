"""Decodes bytes of any encoding, and puts a mark in place of bytes that cannot be decoded.

So a row that cannot be decoded becomes a bad row instead of an error for the complete file.
"""

import codecs
from collections.abc import Callable, Iterable
from typing import Any

UNDECODABLE = "\ufdd0"


"""Mark in place of bytes that cannot be decoded: a Unicode noncharacter, which valid text does not contain."""


MARKING_HANDLER = "nestrec.mark"


"""Name of the codec error handler that inserts the mark."""


def _mark(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return UNDECODABLE, error.end


codecs.register_error(MARKING_HANDLER, _mark)


def is_encoding(name: str) -> bool:
    """Return whether logs may use an encoding: it encodes text, and undecodable bytes can be marked."""
    try:
        is_text = "user".encode(name).decode(name) == "user"
        b"\xff\xfe\xff\xfe".decode(name, MARKING_HANDLER)
    except (LookupError, ValueError):
        return False
    try:
        "\ud800".encode(name)
    except UnicodeEncodeError:
        return is_text
    return False  # utf-7 and unicode_escape can decode to unpaired surrogates


def check_unicode(texts: Iterable[str]) -> None:
    """Raise UnicodeError for an unpaired surrogate, which JSON can escape but UTF-8 cannot encode."""
    "".join(texts).encode()


class Utf8Stream:
    """Binary stream that transcodes another stream to UTF-8."""

    def __init__(self, inner: Any, encoding: str, on_read: Callable[[bytes], None] | None = None):
        """Wrap a stream.

        Args:
            inner: Stream to read.
            encoding: Encoding of its bytes.
            on_read: Called with each chunk that is read, in UTF-8.
        """
        self._inner = inner
        self._on_read = on_read
        self._is_ascii_alike = codecs.lookup(encoding).name in ("utf-8", "iso8859-1", "ascii")
        self._decoder = codecs.getincrementaldecoder(encoding)(errors=MARKING_HANDLER)
        self._is_start = True
        self.closed = False
        self.has_undecodable = False
        """Whether any bytes could not be decoded so far."""

    def read(self, size: int = -1) -> bytes:
        data = self._read(size)
        if self._is_start:  # a byte order mark does not belong to the first cell
            data = data.removeprefix(codecs.BOM_UTF8) or self._read(size)
            self._is_start = False
        if self._on_read is not None:
            self._on_read(data)
        return data

    def _read(self, size: int) -> bytes:
        while True:
            data: bytes = self._inner.read(size)
            is_between = self._decoder.getstate()[0] == b""
            if self._is_ascii_alike and is_between and data.isascii():
                return data
            text = self._decoder.decode(data, final=not data)
            self.has_undecodable = self.has_undecodable or UNDECODABLE in text
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
