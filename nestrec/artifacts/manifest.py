"""Sealed manifests and verified files, shared by checkpoints, published versions and exported models.

A manifest lists the files of an artifact with their sizes and SHA-256 digests. It is canonical JSON that carries its
own digest, so a reader accepts exactly the bytes that were written. The manifests of checkpoints and of versions keep
their own fields, since the digests of artifacts that are stored depend on them.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import torch

from nestrec.artifacts.atomic_files import DTYPE_NAMES, sha256_of
from nestrec.artifacts.storage import Reads
from nestrec.base.config import config, to_plain
from nestrec.base.config_values import from_plain
from nestrec.base.errors import CorruptFileError, UserError

T = TypeVar("T")
Kind = Literal["tensors", "state", "weights", "descriptions", "rows", "removed", "index"]
Damaged = Callable[[str, str], CorruptFileError]
"""Makes the error of a file: its name, and what is wrong with it."""
NOT_THERE = (FileNotFoundError, IsADirectoryError)
"""Errors of a storage that has answered; others say nothing about the artifact."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9%~_-][A-Za-z0-9%~._-]*")


@config
class FileDigest:
    """A file whose content is known."""

    name: str
    """Name inside the folder of the artifact."""
    bytes: int
    """Size of the file."""
    sha256: str
    """Digest of its content, in hexadecimal."""


@config
class FileEntry(FileDigest):
    """One file of a checkpoint or a published version."""

    kind: Kind
    """Dense tensors and JSON state of a checkpoint; dense weights and descriptions of a version; rows of a table, keys
    removed from a table, vectors of a retrieval index."""
    table: str | None = None
    """Table that the rows or removed keys belong to."""
    shard: int = 0
    """Shard of the table that the writer owned."""
    num_shards: int = 1
    """Number of shards of the table when it was written."""
    hashes: tuple[int, int] | None = None
    """Lowest and highest hash of its keys: a reader that owns none between them need not read it; none: not known."""


def entry_of(
    name: str,
    written: tuple[int, str],
    kind: Kind,
    *,
    table: str | None = None,
    shard: tuple[int, int] = (0, 1),
    hashes: tuple[int, int] | None = None,
) -> FileEntry:
    """Return the entry of a file. written: its size and digest. shard: (index, number) of the writer's shard."""
    size, sha256 = written
    index, number = shard
    return FileEntry(
        name=name, bytes=size, sha256=sha256, kind=kind, table=table, shard=index, num_shards=number, hashes=hashes
    )


def plain_manifest(manifest: Any) -> dict[str, Any]:
    """Return a manifest as JSON-like data.

    Hashes that are not known are left out: versions have none, and the manifests of old checkpoints keep their digests.
    """
    plain: dict[str, Any] = to_plain(manifest)
    for entry in plain.get("files", ()):
        if entry["hashes"] is None:
            del entry["hashes"]
    return plain


def digest_of_plain(plain: Any) -> str:
    """Return the SHA-256 digest of the canonical JSON."""
    return hashlib.sha256(_canonical(plain)).hexdigest()


def seal(plain: Mapping[str, Any]) -> bytes:
    """Return canonical JSON with a digest of itself."""
    return _canonical({**plain, "digest": digest_of_plain(plain)})


def unseal(content: bytes | bytearray) -> dict[str, Any]:
    """Return what `seal` was given; `ValueError` for content that it would not have written."""
    sealed = json.loads(content)
    if not isinstance(sealed, dict):
        raise ValueError("is not a sealed JSON object")
    plain = {key: value for key, value in sealed.items() if key != "digest"}
    if seal(plain) != content:
        raise ValueError("was changed: it does not match its own digest")
    return plain


def _canonical(plain: Any) -> bytes:
    return json.dumps(plain, sort_keys=True, indent=1).encode()


def decode_sealed(cls: type[T], content: bytes | bytearray, where: str, *, version: int, damaged: Damaged) -> T:
    """Return the manifest of a class, which has fields `format` and perhaps `files`.

    Args:
        cls: Class of the manifest.
        content: Content of its file.
        where: Name of the file, for errors.
        version: The format that this program reads.
        damaged: Makes the error.

    Raises:
        CorruptFileError: The content is damaged, has another format, or names a file outside the artifact.
    """
    try:
        plain = unseal(content)
        if plain.get("format") != version:
            raise ValueError(f"has format {plain.get('format')!r}; this version reads {version}")
        manifest = from_plain(cls, plain)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, UserError) as error:
        raise damaged(where, f"cannot be read: {error}") from error
    except ValueError as error:
        raise damaged(where, str(error)) from error
    for entry in getattr(manifest, "files", ()):
        if not is_plain_name(entry.name):
            raise damaged(where, f"names a file outside the artifact: {entry.name!r}")
    return manifest


def is_plain_name(name: str) -> bool:
    """Return whether a name is that of an entry of the same folder."""
    return _PLAIN_NAME.fullmatch(name) is not None


def safe_name(table: str) -> str:
    """Return the name of a table as part of a file name."""
    return quote(table, safe="")


def mismatch(entry: FileDigest, size: int, sha256: str) -> str | None:
    """Return how the content of a file differs from its entry, or None if it is the same."""
    if size != entry.bytes:
        return f"does not match its digest: has {size} bytes, should have {entry.bytes}"
    return None if sha256 == entry.sha256 else "its content does not match its digest"


def file_problem(path: Path, entry: FileDigest, *, is_read: bool = True) -> str | None:
    """Return what is wrong with a file on the disk, or None. is_read: compare the content too, not only the size."""
    try:
        size = path.stat().st_size
        sha256 = sha256_of(path) if is_read and size == entry.bytes else entry.sha256
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return mismatch(entry, size, sha256)


class VerifiedReads:
    """Reads files of artifacts and compares them with their entries; what is missing or differs is a
    `CorruptFileError`."""

    def __init__(self, storage: Reads, damaged: Damaged, unreadable: tuple[type[Exception], ...] = NOT_THERE):
        """unreadable: errors of the storage that count as damage of the file; others are raised as they are."""
        self._storage = storage
        self._damaged = damaged
        self._unreadable = unreadable

    def read(self, name: str) -> bytes | bytearray:
        """Return the content of a file of which nothing is known."""
        try:
            return self._storage.read(name)
        except self._unreadable as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise self._damaged(name, f"cannot be read: {reason}") from error

    def content(self, folder: str, entry: FileDigest) -> bytes | bytearray:
        """Return the content of a file of an artifact."""
        content = self.read(f"{folder}/{entry.name}")
        problem = mismatch(entry, len(content), hashlib.sha256(content).hexdigest())
        if problem is not None:
            raise self._damaged(f"{folder}/{entry.name}", problem)
        return content

    def tensors(self, folder: str, entry: FileDigest) -> dict[str, torch.Tensor]:
        """Return the tensors of a safetensors file, which share the memory of its content."""
        content = self.content(folder, entry)
        memory = content if isinstance(content, bytearray) else bytearray(content)  # tensors must be writable
        start = 8 + int.from_bytes(memory[:8], "little")
        try:
            header = json.loads(memory[8:start])
            return {name: _tensor(memory, start, about) for name, about in header.items() if name != "__metadata__"}
        except (AttributeError, KeyError, RecursionError, RuntimeError, TypeError, ValueError) as error:
            raise self._damaged(f"{folder}/{entry.name}", f"is not a safetensors file: {error}") from error


def _tensor(memory: bytearray, start: int, about: dict[str, Any]) -> torch.Tensor:
    dtype = _DTYPES[about["dtype"]]
    first, end = about["data_offsets"]
    if first == end:
        return torch.empty(about["shape"], dtype=dtype)
    count = (end - first) // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start + first).view(about["shape"])
