"""Is a checkpoint whole? Answered before anything is read from it."""

from collections.abc import Iterable
from pathlib import Path

from nestrec.base.errors import DamagedError
from nestrec.checkpoint.durable import sha256_of
from nestrec.checkpoint.folders import folder_of
from nestrec.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, decode, digest_of


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
