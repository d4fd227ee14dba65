"""Names of the folders under a run's `checkpoints/`, and which of them may go.

step-00000100             committed; the newest one that verifies is the latest: there is no pointer to go stale
step-00000100.partial     being written
step-00000100.deleted     on its way out
step-00000100.abandoned   set aside: newer than the step that training went on from, or damaged and written again

The manifest of a checkpoint: what it consists of, with digests bound to names.

A manifest is one JSON file in canonical form, written last: it lists each file with its size and SHA-256, and carries a
digest of itself. A reader accepts exactly the bytes that `encode` writes, so no edit passes unnoticed.

Is a checkpoint whole? Answered before anything is read from it.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nestrec.artifacts.atomic_files import sha256_of
from nestrec.artifacts.manifest import FileEntry, digest_of_plain, seal
from nestrec.base.config import config, to_plain
from nestrec.base.config_values import from_plain
from nestrec.base.errors import DamagedError, UserError

_COMMITTED = re.compile(r"step-(\d{8,})")


def folder_of(parent: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return parent / f"step-{step:08d}"


def committed_steps(parent: Path) -> list[int]:
    """Steps with a committed checkpoint, in order; whether they are whole is another question. A UserError where a file
    or a link that leads nowhere has the name: there may be checkpoints that are not found, and none can be saved."""
    if not parent.is_dir():
        if not os.path.lexists(parent):
            return []
        what = f"is a link to {parent.readlink()}, which is not there" if parent.is_symlink() else "is no folder"
        remedy = "mount or mend what it leads to, or move it away to begin without checkpoints"
        raise UserError(f"{what}: checkpoints lie under this name", field="RUN", value=str(parent), remedy=remedy)
    steps = [step_of(path.name) for path in parent.iterdir() if path.is_dir()]
    return sorted(step for step in steps if step is not None)


def step_of(name: str) -> int | None:
    """The step whose checkpoint lies in a folder of this name; none where it is no such folder."""
    match = _COMMITTED.fullmatch(name)
    return int(match[1]) if match and f"step-{int(match[1]):08d}" == name else None


def leftovers(parent: Path) -> list[Path]:
    """What an interrupted save or deletion left behind."""
    return [path for suffix in ("partial", "deleted") for path in parent.glob(f"step-*.{suffix}")]


def steps_to_delete(steps: list[int], keep: int, base_of: Mapping[int, int | None]) -> list[int]:
    """Returns all but the last `keep` steps and what they build on.

    base_of: the base of an incremental checkpoint, or None. If a checkpoint that stays is missing here, because it
    could not be read, all earlier ones stay: it may build on any of them.
    """
    needed: set[int] = set()
    for step in steps[-keep:]:
        ancestor: int | None = step
        while ancestor is not None and ancestor not in needed:
            needed.add(ancestor)
            if ancestor not in base_of:
                needed.update(earlier for earlier in steps if earlier < ancestor)
            ancestor = base_of.get(ancestor)
    return [step for step in steps if step not in needed]


FORMAT = 1
MANIFEST_NAME = "manifest.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9%~_-][A-Za-z0-9%~._-]*")


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


def verify(path: Path) -> list[str]:
    """What is wrong with the checkpoint in a folder and the earlier ones that it builds on; empty when it is whole."""
    try:
        chain = read_chain(path)
    except DamagedError as error:
        return [str(error)]
    return file_problems(files_of(chain))


def read_chain(path: Path) -> list[tuple[Path, Manifest]]:
    """The checkpoint's manifest and those of its bases, newest first; `DamagedError` when one is missing or changed."""
    manifest = read_manifest(path)
    chain = [(path, manifest)]
    while manifest.base is not None:
        base = manifest.base
        path = folder_of(path.parent, base.step)
        manifest = read_manifest(path)
        if digest_of(manifest) != base.digest or base.step >= chain[-1][1].step:
            raise DamagedError("is not the checkpoint that the later one builds on", field="base", value=path.name)
        chain.append((path, manifest))
    return chain


def read_manifest(path: Path) -> Manifest:
    """The manifest in a checkpoint's folder; `DamagedError` when it is missing, changed, or that of another step."""
    file = path / MANIFEST_NAME
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DamagedError(f"cannot be read: {error.strerror}", field="manifest", value=path.name) from error
    manifest = decode(content, path.name)
    if folder_of(path.parent, manifest.step) != path:
        raise DamagedError(f"belongs to step {manifest.step}", field="manifest", value=path.name)
    return manifest


def files_of(chain: Iterable[tuple[Path, Manifest]]) -> list[tuple[Path, FileEntry]]:
    """Every file of a chain with its folder."""
    return [(path, entry) for path, manifest in chain for entry in manifest.files]


def file_problems(files: Iterable[tuple[Path, FileEntry]], *, but_rows: bool = False) -> list[str]:
    """What is wrong with the files, one line each. but_rows: of files of tables only the sizes are looked at."""
    problems = [_problem(path, entry, is_read=not but_rows or entry.table is None) for path, entry in files]
    return [problem for problem in problems if problem is not None]


def _problem(path: Path, entry: FileEntry, *, is_read: bool) -> str | None:
    file = path / entry.name
    name = f"{path.name}/{entry.name}"
    try:
        size = file.stat().st_size
        if size != entry.bytes:
            return f"{name}: has {size} bytes, should have {entry.bytes}"
        if is_read and sha256_of(file) != entry.sha256:
            return f"{name}: its content does not match its digest"
    except OSError as error:
        return f"{name}: cannot be read: {error.strerror}"
    return None
