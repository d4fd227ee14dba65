"""Files of a checkpoint, read once: what they hold is compared with their digests before anybody sees it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from nestrec.base.errors import DamagedError
from nestrec.checkpoint.durable import DTYPE_NAMES
from nestrec.checkpoint.manifest import FileEntry

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def read_tensors(folder: Path, entry: FileEntry) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; `DamagedError` when it is not the one that was written.

    They share the memory into which the file was read.
    """
    content = read_content(folder, entry)
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:start]))
    return {name: _tensor(content, start, about) for name, about in header.items() if name != "__metadata__"}


def read_content(folder: Path, entry: FileEntry) -> bytearray:
    """All bytes of a file."""
    content = bytearray(entry.bytes)
    try:
        with (folder / entry.name).open("rb", buffering=0) as file:
            size = file.seek(0, 2)
            if size != entry.bytes:
                raise _damaged(folder, entry, f"has {size} bytes, should have {entry.bytes}")
            file.seek(0)
            left = memoryview(content)
            while left:
                left = left[file.readinto(left) or len(left) :]
    except OSError as error:
        raise _damaged(folder, entry, f"cannot be read: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise _damaged(folder, entry, "its content does not match its digest")
    return content


def _tensor(content: bytearray, start: int, about: dict[str, Any]) -> torch.Tensor:
    dtype, (first, end) = _DTYPES[about["dtype"]], about["data_offsets"]
    if first == end:
        return torch.empty(about["shape"], dtype=dtype)
    count = (end - first) // dtype.itemsize
    return torch.frombuffer(content, dtype=dtype, count=count, offset=start + first).view(about["shape"])


def _damaged(folder: Path, entry: FileEntry, problem: str) -> DamagedError:
    return DamagedError(problem, field="checkpoint", value=f"{folder.name}/{entry.name}")
