"""Names and manifests of checkpoints: files of a checkpoint, its base, and whether it is complete.

step-00000100             committed; the newest one that verifies is the latest: there is no pointer that could be stale
step-00000100.partial     being written step-00000100.deleted     being deleted step-00000100.abandoned   quarantined:
newer than the step from which training was resumed, or corrupt and written again

The manifest of a checkpoint is one JSON file with a digest of itself, written last. It lists each file with its size
and SHA-256 digest.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from nestrec.artifacts.delta import chain_of
from nestrec.artifacts.manifest import (
    FileEntry,
    VerifiedReads,
    decode_sealed,
    digest_of_plain,
    dump_with_digest,
    file_problem,
    plain_manifest,
)
from nestrec.artifacts.storage import LocalStorage
from nestrec.base.config import config
from nestrec.base.errors import CorruptFileError, UserError

_COMMITTED = re.compile(r"step-(\d{8,})")


def folder_of(parent: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return parent / f"step-{step:08d}"


def committed_steps(parent: Path) -> list[int]:
    """Return the steps with a committed checkpoint in order, without verifying them.

    Raises:
        UserError: The path is a file or a dangling link, so existing checkpoints may be missed and none can be saved.
    """
    if not parent.is_dir() and not os.path.lexists(parent):
        return []
    if not parent.is_dir():  # checked again, because another process may have created the folder in between
        what = f"is a link to {parent.readlink()}, which does not exist" if parent.is_symlink() else "is not a folder"
        remedy = "restore or mount the folder, or move this path away to start without checkpoints"
        raise UserError(f"the checkpoint path {what}", option="RUN", value=str(parent), remedy=remedy)
    steps = [step_of(path.name) for path in parent.iterdir() if path.is_dir()]
    return sorted(step for step in steps if step is not None)


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint folder by its name, or None if the name is not that of a checkpoint."""
    match = _COMMITTED.fullmatch(name)
    return int(match[1]) if match and f"step-{int(match[1]):08d}" == name else None


def leftovers(parent: Path) -> list[Path]:
    """Return the folders that interrupted saves and deletions have left."""
    return [path for suffix in ("partial", "deleted") for path in parent.glob(f"step-*.{suffix}")]


FORMAT = 1
MANIFEST_NAME = "manifest.json"


@config
class BaseCheckpoint:
    """Reference to the earlier checkpoint on which an incremental checkpoint is based."""

    step: int
    """Step of the base checkpoint."""
    digest: str
    """Digest of the manifest of the base checkpoint."""


@config
class Manifest:
    """Manifest of a checkpoint."""

    step: int
    """Number of training steps completed."""
    num_ranks: int
    """Number of ranks that wrote the checkpoint."""
    files: tuple[FileEntry, ...]
    """Files of the checkpoint, sorted by name."""
    tables: tuple[str, ...] = ()
    """Tables of the checkpoint, including those without rows."""
    base: BaseCheckpoint | None = None
    """Base checkpoint, if the tables contain only the rows touched since then; None for a full checkpoint."""
    format: int = FORMAT
    """Version of the checkpoint format."""


def digest_of(manifest: Manifest) -> str:
    """Return the SHA-256 digest of the canonical JSON of a manifest."""
    return digest_of_plain(plain_manifest(manifest))


def encode(manifest: Manifest) -> bytes:
    """Return the content of the manifest file."""
    return dump_with_digest(plain_manifest(manifest))


def decode(content: bytes | bytearray, where: str) -> Manifest:
    """Return the manifest from the content of its file.

    Raises:
        CorruptFileError: The content was not written by `encode`.
    """
    manifest = decode_sealed(Manifest, content, where, version=FORMAT, make_error=_corrupt_manifest)
    if any(entry.name == MANIFEST_NAME for entry in manifest.files):
        raise _corrupt_manifest(where, "the manifest lists itself")
    return manifest


def _corrupt_manifest(where: str, problem: str) -> CorruptFileError:
    return CorruptFileError(problem, option="manifest", value=where)


def corrupt_file_error(where: str, problem: str) -> CorruptFileError:
    """Return the error for a corrupt file of a checkpoint."""
    return CorruptFileError(problem, option="checkpoint", value=where)


def local_reads(folder: Path) -> VerifiedReads:
    """Return verified reads of the checkpoints in a folder; a file that cannot be read counts as corrupt."""
    return VerifiedReads(LocalStorage(folder), corrupt_file_error, unreadable=(OSError,))


def manifest_in(reads: VerifiedReads, name: str) -> Manifest:
    """Return the manifest in the folder `name`.

    Raises:
        CorruptFileError: The manifest is missing, modified, or belongs to another step.
    """
    manifest = decode(reads.read(f"{name}/{MANIFEST_NAME}"), name)
    if folder_of(Path(), manifest.step).name != name:
        raise _corrupt_manifest(name, f"the manifest belongs to step {manifest.step}")
    return manifest


def chain_in(reads: VerifiedReads, name: str) -> list[Manifest]:
    """Return the manifest in the folder `name` and those of its base checkpoints, newest first.

    Raises:
        CorruptFileError: One of them is missing or modified.
    """

    def base_of(manifest: Manifest) -> Manifest | None:
        if manifest.base is None:
            return None
        folder = folder_of(Path(), manifest.base.step).name
        base = manifest_in(reads, folder)
        if digest_of(base) != manifest.base.digest or base.step >= manifest.step:
            raise CorruptFileError("this is not the base of the later checkpoint", option="base", value=folder)
        return base

    return list(chain_of(manifest_in(reads, name), base_of))


def read_manifest(path: Path) -> Manifest:
    """Read the manifest in the folder of a checkpoint; see `manifest_in`."""
    return manifest_in(local_reads(path.parent), path.name)


def read_chain(path: Path) -> list[tuple[Path, Manifest]]:
    """Return the folders and manifests of a checkpoint and its bases, newest first; see `chain_in`."""
    chain = chain_in(local_reads(path.parent), path.name)
    return [(folder_of(path.parent, manifest.step), manifest) for manifest in chain]


def verify(path: Path) -> list[str]:
    """Return the problems of a checkpoint and of its base checkpoints; empty if all are complete and intact."""
    try:
        chain = read_chain(path)
    except CorruptFileError as error:
        return [str(error)]
    return file_problems(files_of(chain))


def files_of(chain: Iterable[tuple[Path, Manifest]]) -> list[tuple[Path, FileEntry]]:
    """Return all files of a chain with their folders."""
    return [(path, entry) for path, manifest in chain for entry in manifest.files]


def file_problems(files: Iterable[tuple[Path, FileEntry]], *, skip_row_content: bool = False) -> list[str]:
    """Return the problems of files, one line each; with `skip_row_content`, check only the sizes of table files."""
    problems = []
    for path, entry in files:
        problem = file_problem(path / entry.name, entry, is_read=not skip_row_content or entry.table is None)
        if problem is not None:
            problems.append(f"{path.name}/{entry.name}: {problem}")
    return problems
