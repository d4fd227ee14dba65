"""Files that survive a crash: written, flushed to the disk, hashed on the way; folders committed by rename.

Large files written past the page cache of the system.

Written through it, a checkpoint is copied once more, takes as much memory as it has bytes until the disk has them, and
pushes out what others keep there: while a save goes on, these are the memory and the processors of a training. Here a
MiB at a time goes from memory of this process to the disk.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from nestrec.base.files import fsync_path

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


class DirectWriter:
    """Writes to a new file: all but its last few bytes past the cache, and through it what has no whole piece."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_past = False
        self._is_large = False
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


DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE_BYTES = 16 << 20


def write_file(path: Path, content: Iterator[memoryview], *, past_cache: bool = False) -> tuple[int, str]:
    """Write a new file and flush it to the disk; its size and SHA-256 (of what was meant to be written).

    past_cache: of a large file nothing stays in the system's memory, where the file system can do that.
    """
    digest = hashlib.sha256()
    size = 0
    with path.open("xb", buffering=0) as file:
        write = DirectWriter(file.fileno()).write if past_cache else partial(write_fully, file.fileno())
        for piece in in_whole_pieces(content) if past_cache else content:
            digest.update(piece)
            write(piece)
            size += len(piece)
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def safetensors_content(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """The pieces of a safetensors file.

    Written here rather than by the library because these pieces are views of the tensors' own memory: nothing is
    copied, and hashing and writing release the GIL, so a save in the background does not hold up a training thread.
    """
    # Wide types first keeps every tensor aligned inside the file.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        yield from _pieces(tensor)


def rename_folder(source: Path, target: Path) -> None:
    """Rename within one parent folder, durably."""
    source.rename(target)
    fsync_path(target.parent)


def link_files(source: Path, target: Path) -> None:
    """Files of a folder in another one as well: the same bytes on the disk where it can share them, else copies."""
    for path in sorted(source.iterdir()):
        try:
            os.link(path, target / path.name)
        except OSError:
            with path.open("rb") as file:
                write_file(target / path.name, iter(lambda: memoryview(file.read(_PIECE_BYTES)), memoryview(b"")))
    fsync_path(target)


def remove_folder(path: Path) -> None:
    """Remove a folder with its content; one that is gone already is fine."""
    shutil.rmtree(path, ignore_errors=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel() == 0:
        return
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    view = flat.numpy().data
    for start in range(0, len(view), _PIECE_BYTES):
        yield view[start : start + _PIECE_BYTES]
