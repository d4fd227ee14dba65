"""Names and manifests of checkpoints: what a folder contains, what it builds on, and whether it is whole.

step-00000100             committed; the newest one that verifies is the latest: there is no pointer to go stale
step-00000100.partial     being written
step-00000100.deleted     on its way out
step-00000100.abandoned   set aside: newer than the step that training went on from, or damaged and written again

The manifest of a checkpoint is one sealed JSON file, written last. It lists each file with its size and SHA-256.
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
    file_problem,
    plain_manifest,
    seal,
)
from nestrec.artifacts.storage import LocalStorage
from nestrec.base.config import config
from nestrec.base.errors import CorruptFileError, UserError

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
        raise UserError(f"{what}: checkpoints lie under this name", option="RUN", value=str(parent), remedy=remedy)
    steps = [step_of(path.name) for path in parent.iterdir() if path.is_dir()]
    return sorted(step for step in steps if step is not None)


def step_of(name: str) -> int | None:
    """The step whose checkpoint lies in a folder of this name; none where it is no such folder."""
    match = _COMMITTED.fullmatch(name)
    return int(match[1]) if match and f"step-{int(match[1]):08d}" == name else None


def leftovers(parent: Path) -> list[Path]:
    """What an interrupted save or deletion left behind."""
    return [path for suffix in ("partial", "deleted") for path in parent.glob(f"step-*.{suffix}")]


FORMAT = 1
MANIFEST_NAME = "manifest.json"


@config
class BaseCheckpoint:
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
    base: BaseCheckpoint | None = None
    """Set where the tables hold only the rows touched since an earlier checkpoint."""
    format: int = FORMAT
    """Version of this layout."""


def digest_of(manifest: Manifest) -> str:
    """SHA-256 over the canonical JSON of the manifest."""
    return digest_of_plain(plain_manifest(manifest))


def encode(manifest: Manifest) -> bytes:
    """The content of the manifest file."""
    return seal(plain_manifest(manifest))


def decode(content: bytes | bytearray, where: str) -> Manifest:
    """Returns the manifest that `encode` was given; `CorruptFileError` for content that it would not have written."""
    manifest = decode_sealed(Manifest, content, where, version=FORMAT, damaged=_damaged)
    if any(entry.name == MANIFEST_NAME for entry in manifest.files):
        raise _damaged(where, "lists itself")
    return manifest


def _damaged(where: str, problem: str) -> CorruptFileError:
    return CorruptFileError(problem, option="manifest", value=where)


def damaged_file(where: str, problem: str) -> CorruptFileError:
    """Returns the error for a file of a checkpoint."""
    return CorruptFileError(problem, option="checkpoint", value=where)


def local_reads(folder: Path) -> VerifiedReads:
    """Returns the reads of the checkpoints in a folder; a file that cannot be read is damaged."""
    return VerifiedReads(LocalStorage(folder), damaged_file, unreadable=(OSError,))


def manifest_in(reads: VerifiedReads, name: str) -> Manifest:
    """Returns the manifest in a folder; `CorruptFileError` if it is missing, changed, or of another step."""
    manifest = decode(reads.read(f"{name}/{MANIFEST_NAME}"), name)
    if folder_of(Path(), manifest.step).name != name:
        raise _damaged(name, f"belongs to step {manifest.step}")
    return manifest


def chain_in(reads: VerifiedReads, name: str) -> list[Manifest]:
    """Returns the manifest in a folder and those that it builds on, newest first.

    Raises:
        CorruptFileError: One of them is missing or changed.
    """

    def base_of(manifest: Manifest) -> Manifest | None:
        if manifest.base is None:
            return None
        folder = folder_of(Path(), manifest.base.step).name
        base = manifest_in(reads, folder)
        if digest_of(base) != manifest.base.digest or base.step >= manifest.step:
            raise CorruptFileError("is not the checkpoint that the later one builds on", option="base", value=folder)
        return base

    return list(chain_of(manifest_in(reads, name), base_of))


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest in the folder of a checkpoint as `manifest_in` does."""
    return manifest_in(local_reads(path.parent), path.name)


def read_chain(path: Path) -> list[tuple[Path, Manifest]]:
    """Returns the folders and manifests of a checkpoint and its bases, newest first, as `chain_in` does."""
    chain = chain_in(local_reads(path.parent), path.name)
    return [(folder_of(path.parent, manifest.step), manifest) for manifest in chain]


def verify(path: Path) -> list[str]:
    """What is wrong with the checkpoint in a folder and the earlier ones that it builds on; empty when it is whole."""
    try:
        chain = read_chain(path)
    except CorruptFileError as error:
        return [str(error)]
    return file_problems(files_of(chain))


def files_of(chain: Iterable[tuple[Path, Manifest]]) -> list[tuple[Path, FileEntry]]:
    """Every file of a chain with its folder."""
    return [(path, entry) for path, manifest in chain for entry in manifest.files]


def file_problems(files: Iterable[tuple[Path, FileEntry]], *, but_rows: bool = False) -> list[str]:
    """What is wrong with the files, one line each. but_rows: of files of tables only the sizes are looked at."""
    found = []
    for path, entry in files:
        problem = file_problem(path / entry.name, entry, is_read=not but_rows or entry.table is None)
        if problem is not None:
            found.append(f"{path.name}/{entry.name}: {problem}")
    return found
