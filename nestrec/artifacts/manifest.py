"""Manifests with digests and verified reads, shared by checkpoints, published versions and exported models.

A manifest lists the files of an artifact with their sizes and SHA-256 digests. It is canonical JSON that contains its
own digest, so a reader accepts exactly the bytes that were written. Manifests of checkpoints and of versions have their
own fields, because the digests of stored artifacts depend on them.
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
ErrorFactory = Callable[[str, str], CorruptFileError]
"""Function from the name of a file and a problem to the error to raise."""
MISSING_FILE_ERRORS = (FileNotFoundError, IsADirectoryError)
"""Errors of a storage that has responded; other errors say nothing about the artifact."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9%~_-][A-Za-z0-9%~._-]*")


@config
class FileDigest:
    """Name, size and digest of a file."""

    name: str
    """Name within the folder of the artifact."""
    bytes: int
    """Size of the file in bytes."""
    sha256: str
    """SHA-256 digest of its content, in hexadecimal."""


@config
class FileEntry(FileDigest):
    """File of a checkpoint or a published version."""

    kind: Kind
    """Kind of content: `tensors` and `state` of a checkpoint (dense tensors, JSON); `weights` and `descriptions` of a
    version; `rows` and `removed` keys of a table; `index` of a retrieval model.
    """
    table: str | None = None
    """Table of the rows or removed keys."""
    shard: int = 0
    """Index of the table shard that the writer owned."""
    num_shards: int = 1
    """Number of shards of the table when it was written."""
    hashes: tuple[int, int] | None = None
    """Lowest and highest hash of its keys, so that a reader that owns none of this range can skip the file; None: not
    known.
    """


def entry_of(
    name: str,
    written: tuple[int, str],
    kind: Kind,
    *,
    table: str | None = None,
    shard: tuple[int, int] = (0, 1),
    hashes: tuple[int, int] | None = None,
) -> FileEntry:
    """Return the entry of a file.

    Args:
        name: Name within the folder of the artifact.
        written: Size and digest of the content.
        kind: Kind of content.
        table: Table of the rows or removed keys.
        shard: Index of the writer's shard and number of shards.
        hashes: Lowest and highest hash of the keys.
    """
    size, sha256 = written
    index, number = shard
    return FileEntry(
        name=name, bytes=size, sha256=sha256, kind=kind, table=table, shard=index, num_shards=number, hashes=hashes
    )


def plain_manifest(manifest: Any) -> dict[str, Any]:
    """Return a manifest as JSON-compatible data.

    Unknown hashes are omitted: versions have none, and the digests of old checkpoints must not change.
    """
    plain: dict[str, Any] = to_plain(manifest)
    for entry in plain.get("files", ()):
        if entry["hashes"] is None:
            del entry["hashes"]
    return plain


def digest_of_plain(plain: Any) -> str:
    """Return the SHA-256 digest of the canonical JSON."""
    return hashlib.sha256(_canonical(plain)).hexdigest()


def dump_with_digest(plain: Mapping[str, Any]) -> bytes:
    """Return canonical JSON that contains its own digest."""
    return _canonical({**plain, "digest": digest_of_plain(plain)})


def load_with_digest(content: bytes | bytearray) -> dict[str, Any]:
    """Return the content that was passed to `dump_with_digest`.

    Raises:
        ValueError: The content was not written by `dump_with_digest`.
    """
    sealed = json.loads(content)
    if not isinstance(sealed, dict):
        raise ValueError("the content is not a JSON object with a digest")
    plain = {key: value for key, value in sealed.items() if key != "digest"}
    if dump_with_digest(plain) != content:
        raise ValueError("the content was modified: it does not match its digest")
    return plain


def _canonical(plain: Any) -> bytes:
    return json.dumps(plain, sort_keys=True, indent=1).encode()


def decode_sealed(cls: type[T], content: bytes | bytearray, where: str, *, version: int, make_error: ErrorFactory) -> T:
    """Return a manifest of the given class, which has the field `format` and may have `files`.

    Args:
        cls: Class of the manifest.
        content: Content of its file.
        where: Name of the file, for errors.
        version: Format version that this program reads.
        make_error: Function that creates the error.

    Raises:
        CorruptFileError: The content is corrupt, has another format, or lists a file outside the artifact.
    """
    try:
        plain = load_with_digest(content)
        if plain.get("format") != version:
            raise ValueError(f"the format is {plain.get('format')!r}, but this version reads {version}")
        manifest = from_plain(cls, plain)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, UserError) as error:
        raise make_error(where, f"the file cannot be read: {error}") from error
    except ValueError as error:
        raise make_error(where, str(error)) from error
    for entry in getattr(manifest, "files", ()):
        if not is_plain_name(entry.name):
            raise make_error(where, f"the manifest lists a file outside the artifact: {entry.name!r}")
    return manifest


def is_plain_name(name: str) -> bool:
    """Return whether a name is safe and refers to an entry of the same folder."""
    return _PLAIN_NAME.fullmatch(name) is not None


def safe_name(table: str) -> str:
    """Return the name of a table, quoted for use in a file name."""
    return quote(table, safe="")


def mismatch(entry: FileDigest, size: int, sha256: str) -> str | None:
    """Return how the size and digest of a file differ from its entry, or None if they are equal."""
    if size != entry.bytes:
        return f"the size does not match its digest: {size} bytes instead of {entry.bytes}"
    return None if sha256 == entry.sha256 else "the content does not match its digest"


def file_problem(path: Path, entry: FileDigest, *, is_read: bool = True) -> str | None:
    """Return the problem of a local file, or None; with `is_read`, the content is verified too, not only the size."""
    try:
        size = path.stat().st_size
        sha256 = sha256_of(path) if is_read and size == entry.bytes else entry.sha256
    except OSError as error:
        return f"the file cannot be read: {error.strerror}"
    return mismatch(entry, size, sha256)


class VerifiedReads:
    """Reads files of artifacts and verifies them against their entries.

    Args:
        storage: Storage to read from.
        make_error: Creates the `CorruptFileError` of a missing or corrupt file.
        unreadable: Errors of the storage that count as a corrupt file; other errors are not converted.
    """

    def __init__(
        self, storage: Reads, make_error: ErrorFactory, unreadable: tuple[type[Exception], ...] = MISSING_FILE_ERRORS
    ):
        self._storage = storage
        self._make_error = make_error
        self._unreadable = unreadable

    def read(self, name: str) -> bytes | bytearray:
        """Return the content of a file without verification."""
        try:
            return self._storage.read(name)
        except self._unreadable as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise self._make_error(name, f"the file cannot be read: {reason}") from error

    def content(self, folder: str, entry: FileDigest) -> bytes | bytearray:
        """Return the verified content of a file of an artifact."""
        content = self.read(f"{folder}/{entry.name}")
        problem = mismatch(entry, len(content), hashlib.sha256(content).hexdigest())
        if problem is not None:
            raise self._make_error(f"{folder}/{entry.name}", problem)
        return content

    def tensors(self, folder: str, entry: FileDigest) -> dict[str, torch.Tensor]:
        """Return the tensors of a verified safetensors file; they share the memory of its content."""
        content = self.content(folder, entry)
        memory = content if isinstance(content, bytearray) else bytearray(content)  # tensors must be writable
        start = 8 + int.from_bytes(memory[:8], "little")
        try:
            header = json.loads(memory[8:start])
            return {name: _tensor(memory, start, spec) for name, spec in header.items() if name != "__metadata__"}
        except (AttributeError, KeyError, RecursionError, RuntimeError, TypeError, ValueError) as error:
            raise self._make_error(
                f"{folder}/{entry.name}", f"the file is not in safetensors format: {error}"
            ) from error


def _tensor(memory: bytearray, start: int, spec: dict[str, Any]) -> torch.Tensor:
    dtype = _DTYPES[spec["dtype"]]
    first, end = spec["data_offsets"]
    if first == end:
        return torch.empty(spec["shape"], dtype=dtype)
    count = (end - first) // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start + first).view(spec["shape"])
