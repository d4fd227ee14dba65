"""What versions say of themselves.

    ADDRESS/newest.json                       which version is the newest
    ADDRESS/versions/00000012-9f2c41d0/       one version; the number counts, the rest keeps two writers apart
        delta.json                            what has changed since its parent, written after the files that it names
        full.json                             all of it, in some versions: servers that begin, or have missed something
        *.safetensors, *.json

Both manifests of a version name the same version, and list their files with sizes and digests. Each carries a digest of
itself. Where `delta.json` names a parent, all files together make that parent's state into this one.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from nestrec.base.config import config, from_plain, to_plain
from nestrec.base.errors import DamagedError, UserError
from nestrec.checkpoint.sealed import digest_of_plain, seal, unseal
from nestrec.embedding.table import InitConfig

FORMAT = 1
NEWEST_FILE, VERSIONS = "newest.json", "versions"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9%~_-][A-Za-z0-9%~._-]*")

Kind = Literal["delta", "full"]


@config
class VersionFile:
    """One file of a version."""

    name: str
    """inside the version's folder"""
    bytes: int
    """size"""
    sha256: str
    """of its content, in hexadecimal"""
    kind: Literal["weights", "descriptions", "rows", "removed", "index"]
    """dense weights; what is not learnt; rows of a table; keys that lost theirs; vectors that are retrieved"""
    table: str | None = None
    """table of rows or removed keys"""
    shard: int = 0
    """of the writer"""
    num_shards: int = 1
    """of the run"""


@config
class PublishedTable:
    """What is known of all rows of a table, also of those that no file holds: they are as they begin."""

    name: str
    """of the table"""
    num_rows: int
    """ids run from 0 to it"""
    dim: int
    """elements of a row"""
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    """of the weights"""
    seed: int
    """of initial rows"""
    init: InitConfig
    """how rows begin"""


@config
class Times:
    """Unix seconds, of the events that this version has learnt from and the one before has not."""

    first_event_s: float | None = None
    """when the oldest of them came"""
    mean_event_s: float | None = None
    """mean over them"""
    last_event_s: float | None = None
    """when the newest of them came"""
    closed_s: float | None = None
    """when their window was closed"""
    trained_s: float | None = None
    """when the last step on them had been made"""


@config
class Parent:
    folder: str
    """name of the version before"""
    version: str
    """digest of the version before"""


@config
class VersionManifest:
    """All that a version consists of, in one of two ways."""

    kind: Kind
    """what has changed since the parent, or all of it"""
    version: str
    """digest of what the version consists of, its parent included"""
    number: int
    """of the version, from 1"""
    step: int
    """training step of the weights"""
    run: str
    """name of the run"""
    parent: Parent | None
    """none where nothing is known of a version before it"""
    files: tuple[VersionFile, ...]
    """in the order of their names"""
    tables: tuple[PublishedTable, ...]
    """of the model"""
    times: Times = Times()
    """of what was learnt"""
    published_s: float = 0.0
    """when it was written, in Unix seconds"""
    format: int = FORMAT
    """version of this layout"""

    @property
    def num_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)


@config
class Newest:
    folder: str
    """name of the newest version"""
    version: str
    """digest of the newest version"""
    number: int
    """its number"""
    format: int = FORMAT
    """version of this layout"""


def manifest_file(folder: str, kind: Kind) -> str:
    return f"{VERSIONS}/{folder}/{kind}.json"


def version_of(parent: Parent | None, number: int, step: int, files: tuple[VersionFile, ...]) -> str:
    """Return the digest of a version: two with the same digest came about in the same way from the same bytes."""
    told = {"parent": to_plain(parent), "number": number, "step": step, "files": [f.sha256 for f in files]}
    return digest_of_plain(told)


def encode(told: VersionManifest | Newest) -> bytes:
    return seal(to_plain(told))


def decode_manifest(content: bytes, where: str) -> VersionManifest:
    """`DamagedError` for what `encode` would not have written."""
    manifest: VersionManifest = _decoded(VersionManifest, content, where)
    for entry in manifest.files:
        if not _PLAIN_NAME.fullmatch(entry.name):
            raise _damaged(where, f"names a file outside the version: {entry.name!r}")
    return manifest


def decode_newest(content: bytes, where: str) -> Newest:
    """`DamagedError` for what `encode` would not have written."""
    newest: Newest = _decoded(Newest, content, where)
    if not _PLAIN_NAME.fullmatch(newest.folder):
        raise _damaged(where, f"names a folder outside the address: {newest.folder!r}")
    return newest


def _decoded(cls: Any, content: bytes, where: str) -> Any:
    try:
        plain = unseal(content)
        _check_format(plain, where)
        return from_plain(cls, plain)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, str(error)) from error
    except DamagedError:
        raise
    except UserError as error:
        raise _damaged(where, str(error)) from error


def _check_format(plain: Mapping[str, Any], where: str) -> None:
    if plain.get("format") != FORMAT:
        raise _damaged(where, f"has format {plain.get('format')!r}; this version reads {FORMAT}")


def _damaged(where: str, problem: str) -> DamagedError:
    return DamagedError(problem, field="version", value=where, remedy="wait for the next full one")
