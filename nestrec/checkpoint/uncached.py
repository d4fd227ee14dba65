"""Large files written past the page cache of the system.

Written through it, a checkpoint is copied once more, takes as much memory as it has bytes until the disk has them, and
pushes out what others keep there: while a save goes on, these are the memory and the processors of a training. Here a
MiB at a time goes from memory of this process to the disk.
"""

import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Iterator

import numpy as np

PIECE_BYTES = 1 << 20
"""Of what is written at a time: enough for a disk, few enough to be hashed in the cache of a processor."""
ALIGNED_BYTES = 4096
"""Places and sizes past the cache are multiples of it."""
_OF_THREAD = threading.local()


def in_whole_pieces(content: Iterator[memoryview]) -> Iterator[memoryview]:
    """The same bytes in pieces of `PIECE_BYTES` (the last one has the rest), each in the same memory of this thread."""
    buffer = _buffer()
    num_filled = 0
    for given in content:
        source = np.frombuffer(given, np.uint8)
        while len(source):
            part, source = np.split(source, [PIECE_BYTES - num_filled])
            np.copyto(buffer[num_filled : num_filled + len(part)], part)  # without the interpreter's lock
            num_filled += len(part)
            if num_filled == PIECE_BYTES:
                yield buffer[:PIECE_BYTES].data
                num_filled = 0
    if num_filled:
        yield buffer[:num_filled].data


class Uncached:
    """Writes to a new file: all but its last few bytes past the cache, and through it what has no whole piece."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._is_past, self._is_large = descriptor, False, False
        self._may_pass = sys.platform == "linux"

    def write(self, piece: memoryview) -> None:
        """The next one of `in_whole_pieces`."""
        self._is_large |= len(piece) == PIECE_BYTES
        cut = len(piece) // ALIGNED_BYTES * ALIGNED_BYTES if self._is_large else 0
        self._write(piece[:cut], past=True)
        self._write(piece[cut:], past=False)

    def _write(self, piece: memoryview, *, past: bool) -> None:
        while len(piece):
            self._pass(past and self._may_pass)
            try:
                piece = piece[os.write(self._descriptor, piece) :]
            except OSError as error:
                # Some file systems refuse only what is written, and all of them what begins at an odd place: where a
                # part of a piece was written, on a disk that is almost full.
                if error.errno != errno.EINVAL or not self._is_past:
                    raise
                self._may_pass = False

    def _pass(self, wanted: bool) -> None:
        """Have the file written past the cache, or not."""
        if sys.platform == "linux" and self._is_past != wanted:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags ^ os.O_DIRECT)
                self._is_past = wanted
            except OSError:  # a file system that cannot do it
                self._may_pass = False


def write_fully(descriptor: int, piece: memoryview) -> None:
    """Every byte, however many calls it takes."""
    while len(piece):
        piece = piece[os.write(descriptor, piece) :]


def _buffer() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Memory of this thread for a piece, at an aligned place."""
    if not hasattr(_OF_THREAD, "buffer"):
        _OF_THREAD.buffer = np.frombuffer(mmap.mmap(-1, PIECE_BYTES), np.uint8)
    found: np.ndarray[tuple[int], np.dtype[np.uint8]] = _OF_THREAD.buffer
    return found
