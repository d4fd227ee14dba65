"""Files that survive a crash: written, flushed to the disk, hashed on the way; folders committed by rename."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from nestrec.base.paths import sync_folder
from nestrec.checkpoint.uncached import Uncached, in_whole_pieces, write_fully

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
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        write = Uncached(file.fileno()).write if past_cache else partial(write_fully, file.fileno())
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
    sync_folder(target.parent)


def link_files(source: Path, target: Path) -> None:
    """Files of a folder in another one as well: the same bytes on the disk where it can share them, else copies."""
    for path in sorted(source.iterdir()):
        try:
            os.link(path, target / path.name)
        except OSError:
            with path.open("rb") as file:
                write_file(target / path.name, iter(lambda: memoryview(file.read(_PIECE_BYTES)), memoryview(b"")))
    sync_folder(target)


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
