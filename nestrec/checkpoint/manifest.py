"""The manifest of a checkpoint: what it consists of, with digests bound to names.

A manifest is one JSON file in canonical form, written last: it lists each file with its size and SHA-256, and carries a
digest of itself. A reader accepts exactly the bytes that `encode` writes, so no edit passes unnoticed.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from nestrec.base.config import config, from_plain, to_plain
from nestrec.base.errors import DamagedError, UserError
from nestrec.checkpoint.sealed import digest_of_plain, seal

FORMAT = 1
MANIFEST_NAME = "manifest.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9%~_-][A-Za-z0-9%~._-]*")

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


@config
class Base:
    """The earlier checkpoint that an incremental one completes."""

    step: int
    """Step of the base."""
    digest: str
    """Digest of the base's manifest."""


@config
class Manifest:
    """Everything that a checkpoint consists of."""

    step: int
    """Number of steps that had been trained."""
    num_ranks: int
    """Ranks that wrote it."""
    files: tuple[FileEntry, ...]
    """Its files, in the order of their names."""
    tables: tuple[str, ...] = ()
    """Its tables, also those without rows."""
    base: Base | None = None
    """Set where the tables hold only the rows touched since an earlier checkpoint."""
    format: int = FORMAT
    """Version of this layout."""


def digest_of(manifest: Manifest) -> str:
    """SHA-256 over the canonical JSON of the manifest."""
    return digest_of_plain(_plain(manifest))


def encode(manifest: Manifest) -> bytes:
    """The content of the manifest file."""
    return seal(_plain(manifest))


def decode(content: bytes, where: str) -> Manifest:
    """The inverse of `encode`; anything that `encode` would not have written raises `DamagedError`."""
    try:
        plain = json.loads(content)
        manifest = from_plain(Manifest, _without_digest(plain, where))
    except (ValueError, RecursionError, UserError) as error:
        raise _damaged(where, f"cannot be read: {error}") from error
    if encode(manifest) != content:
        raise _damaged(where, "was changed: it does not match its own digest")
    for entry in manifest.files:
        if not _PLAIN_NAME.fullmatch(entry.name) or entry.name == MANIFEST_NAME:
            raise _damaged(where, f"names a file outside the checkpoint: {entry.name!r}")
    return manifest


def _plain(manifest: Manifest) -> dict[str, Any]:
    """Hashes that are not known are left out: manifests of before they were written keep their digests."""
    plain: dict[str, Any] = to_plain(manifest)
    for entry in plain["files"]:
        if entry["hashes"] is None:
            del entry["hashes"]
    return plain


def _without_digest(plain: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(plain, dict):
        raise _damaged(where, "is not a manifest")
    if plain.get("format") != FORMAT:
        raise _damaged(where, f"has format {plain.get('format')!r}; this version reads {FORMAT}")
    return {key: value for key, value in plain.items() if key != "digest"}


def _damaged(where: str, problem: str) -> DamagedError:
    return DamagedError(problem, field="manifest", value=where)
