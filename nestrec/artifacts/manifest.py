"""Files of a checkpoint, read once: what they hold is compared with their digests before anybody sees it.

JSON that carries its own digest: a reader accepts exactly the bytes that were written.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from nestrec.artifacts.atomic_files import DTYPE_NAMES
from nestrec.base.config import config
from nestrec.base.errors import DamagedError

Kind = Literal["tensors", "state", "rows", "removed"]


@config
class FileEntry:
    """One file of a checkpoint."""

    name: str
    """Name inside the checkpoint's folder."""
    bytes: int
    """Size of the file."""
    sha256: str
    """Digest of its content, in hexadecimal."""
    kind: Kind
    """Dense tensors, JSON state, rows of a table, or keys removed from a table."""
    table: str | None = None
    """Table that the rows or removed keys belong to."""
    shard: int = 0
    """Shard of the table that the writer owned."""
    num_shards: int = 1
    """Number of shards of the table when it was written."""
    hashes: tuple[int, int] | None = None
    """Lowest and highest hash of its keys: who owns none between them need not read it; none: not known."""


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


def digest_of_plain(plain: Any) -> str:
    """SHA-256 over the canonical JSON."""
    return hashlib.sha256(_canonical(plain)).hexdigest()


def seal(plain: Mapping[str, Any]) -> bytes:
    """The content of a file."""
    return _canonical({**plain, "digest": digest_of_plain(plain)})


def unseal(content: bytes) -> dict[str, Any]:
    """The inverse of `seal`; `ValueError` for anything that it would not have written."""
    sealed = json.loads(content)
    if not isinstance(sealed, dict):
        raise ValueError("is no sealed JSON")
    plain = {key: value for key, value in sealed.items() if key != "digest"}
    if seal(plain) != content:
        raise ValueError("was changed: it does not match its own digest")
    return plain


def _canonical(plain: Any) -> bytes:
    return json.dumps(plain, sort_keys=True, indent=1).encode()
