"""Durable file writes: files are flushed to disk (fsync) and hashed while written; folders are committed by a rename.

Large files can be written with direct I/O (O_DIRECT), which bypasses the page cache of the operating system. With the
page cache, a checkpoint would be copied once more, would take as much memory as it has bytes until they are on disk,
and would evict the pages of other programs; during a save, this costs memory and CPU time of the training. With direct
I/O, blocks of 1 MiB go from a buffer of this process to the disk.
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

BLOCK_BYTES = 1 << 20
"""Size of a write in bytes: large enough for a disk, small enough to be hashed within the CPU cache."""
ALIGNED_BYTES = 4096
"""Alignment in bytes of offsets and sizes of direct I/O."""
_THREAD_LOCAL = threading.local()


def fixed_size_blocks(content: Iterator[memoryview]) -> Iterator[memoryview]:
    """Yield the same bytes in blocks of `BLOCK_BYTES` (the last may be shorter), in one reused buffer per thread."""
    buffer = _buffer()
    num_filled = 0
    for chunk in content:
        source = np.frombuffer(chunk, np.uint8)
        while len(source):
            head, source = np.split(source, [BLOCK_BYTES - num_filled])
            np.copyto(buffer[num_filled : num_filled + len(head)], head)  # releases the GIL
            num_filled += len(head)
            if num_filled == BLOCK_BYTES:
                yield buffer[:BLOCK_BYTES].data
                num_filled = 0
    if num_filled:
        yield buffer[:num_filled].data


class DirectWriter:
    """Writes a new file with direct I/O, except for its last, unaligned bytes and for files smaller than one block."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_direct = False
        self._is_large = False
        self._supports_direct = sys.platform == "linux"

    def write(self, block: memoryview) -> None:
        """Write the next block of `fixed_size_blocks`."""
        self._is_large |= len(block) == BLOCK_BYTES
        cut = len(block) // ALIGNED_BYTES * ALIGNED_BYTES if self._is_large else 0
        self._write(block[:cut], direct=True)
        self._write(block[cut:], direct=False)

    def _write(self, block: memoryview, *, direct: bool) -> None:
        while len(block):
            self._set_direct(direct and self._supports_direct)
            try:
                block = block[os.write(self._descriptor, block) :]
            except OSError as error:
                # Some file systems reject direct I/O only at the first write. All of them reject an unaligned offset,
                # which results from a partial write on an almost full disk.
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._supports_direct = False

    def _set_direct(self, enabled: bool) -> None:
        """Turn direct I/O on or off."""
        if sys.platform == "linux" and self._is_direct != enabled:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags ^ os.O_DIRECT)
                self._is_direct = enabled
            except OSError:  # the file system does not support direct I/O
                self._supports_direct = False


def write_all(descriptor: int, block: memoryview) -> None:
    """Write all bytes, in as many system calls as needed."""
    while len(block):
        block = block[os.write(descriptor, block) :]


def _buffer() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the page-aligned block buffer of this thread."""
    if not hasattr(_THREAD_LOCAL, "buffer"):
        _THREAD_LOCAL.buffer = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)
    buffer: np.ndarray[tuple[int], np.dtype[np.uint8]] = _THREAD_LOCAL.buffer
    return buffer


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
_COPY_BYTES = 16 << 20


def write_file(path: Path, content: Iterator[memoryview], *, direct_io: bool = False) -> tuple[int, str]:
    """Write a new file and flush it to disk.

    Args:
        path: Path of the file, which must not exist.
        content: Content in blocks.
        direct_io: Whether to bypass the page cache, if the file system supports it (for large files).

    Returns:
        The size and SHA-256 digest of the given content.
    """
    digest = hashlib.sha256()
    size = 0
    with path.open("xb", buffering=0) as file:
        write = DirectWriter(file.fileno()).write if direct_io else partial(write_all, file.fileno())
        for block in fixed_size_blocks(content) if direct_io else content:
            digest.update(block)
            write(block)
            size += len(block)
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def safetensors_content(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """Yield the content of a safetensors file.

    This is implemented here and not with the safetensors library because the blocks are views of the tensors' memory:
    nothing is copied, and hashing and writing release the GIL, so a background save does not block a training thread.
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
        yield from _tensor_blocks(tensor)


def rename_folder(source: Path, target: Path) -> None:
    """Rename a folder within its parent and flush the parent to disk."""
    source.rename(target)
    fsync_path(target.parent)


def link_files(source: Path, target: Path) -> None:
    """Hard-link the files of a folder into another folder; copy them if the file system does not support hard links."""
    for path in sorted(source.iterdir()):
        try:
            os.link(path, target / path.name)
        except OSError:
            with path.open("rb") as file:
                write_file(target / path.name, iter(lambda: memoryview(file.read(_COPY_BYTES)), memoryview(b"")))
    fsync_path(target)


def remove_folder(path: Path) -> None:
    """Remove a folder with its content; do nothing if it does not exist."""
    shutil.rmtree(path, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tensor_blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel() == 0:
        return
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    view = flat.numpy().data
    for start in range(0, len(view), _COPY_BYTES):
        yield view[start : start + _COPY_BYTES]
