"""Reader of published versions: lists versions, finds chains of deltas between them, and reads and verifies files."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nestrec.artifacts.delta import chain_of
from nestrec.artifacts.manifest import FileEntry, VerifiedReads
from nestrec.artifacts.storage import Storage, TimedReads
from nestrec.base.errors import CorruptFileError, UserError
from nestrec.serving.versions.version_manifest import (
    NEWEST_FILE,
    VERSIONS,
    Kind,
    NewestPointer,
    PublishedTable,
    VersionManifest,
    corrupt_version_error,
    decode_manifest,
    decode_newest,
    manifest_file,
    version_of,
)

READ_TIMEOUT_S = 60.0
_MAX_LISTED = 10
"""Maximum number of versions that an error lists, newest first."""
_NUMBER_DIGITS = 8
"""Number of digits of the version number in the name of a version."""
_NUMBER = re.compile(r"[0-9]{1,8}")
_MIN_PREFIX = 4
"""Minimum length of a prefix of a digest that selects a version."""
KINDS: tuple[Kind, Kind] = ("delta", "full")
At = tuple[str, str]
"""Folder and digest of a version."""
VersionRows = tuple[torch.Tensor, torch.Tensor]
"""Ids (n,) int64 and rows (n, D), in host memory."""


@dataclass(frozen=True, slots=True)
class VersionStep:
    """Version in a chain of a full version and deltas."""

    folder: str
    """Name of the version."""
    manifest: VersionManifest
    """Manifest of the delta or of the full state."""

    @property
    def servable_version(self) -> str:
        """Version of the servable in memory: the name of the version (which `shown_version` returns) and its digest."""
        return f"{self.folder}:{self.manifest.version}"


class VersionStore:
    """Published versions at an address. All content is verified against its digest.

    Methods raise `CorruptFileError` if a file is not as it was written, and `OSError` if the storage is unavailable.
    """

    def __init__(self, storage: Storage, read_timeout_s: float = READ_TIMEOUT_S):
        """Open the versions at an address.

        Args:
            storage: Storage backend of the address.
            read_timeout_s: Timeout in seconds for reading a file; the storage then counts as unavailable.
        """
        self.storage = storage
        self._reads = TimedReads(storage, read_timeout_s)
        self._verified = VerifiedReads(self._reads, corrupt_version_error)

    def newest(self) -> NewestPointer | None:
        """Return the pointer to the newest version; None if no version was published yet."""
        try:
            content = self._reads.read(NEWEST_FILE)
        except FileNotFoundError:
            return None
        return decode_newest(content, NEWEST_FILE)

    def manifest(self, folder: str, kind: Kind, version: str) -> VersionManifest:
        """Read and verify a manifest of a version.

        Args:
            folder: Name of the version.
            kind: Manifest to read: delta or full.
            version: Expected digest of the version.

        Raises:
            FileNotFoundError: The version has no manifest of this kind.
            CorruptFileError: The manifest is corrupt, or belongs to another version.
        """
        where = manifest_file(folder, kind)
        manifest = decode_manifest(self._reads.read(where), where)
        is_match = manifest.version == version
        if manifest.kind == "delta" or manifest.parent is None:
            content_digest = version_of(manifest.parent, manifest.number, manifest.step, manifest.files)
            is_match = is_match and content_digest == version
        if not is_match or manifest.kind != kind:
            raise corrupt_version_error(where, "the manifest belongs to another version")
        return manifest

    def history(self) -> Iterator[At]:
        """Yield folder and digest of the newest version and its ancestors, as far as their manifests are readable."""
        newest = self.newest()
        return self._back_from(None if newest is None else (newest.folder, newest.version))

    def _back_from(self, at: At | None) -> Iterator[At]:
        while at is not None and (manifest := self.read_description(*at)) is not None:
            yield at
            parent = manifest.parent
            at = None if parent is None else (parent.folder, parent.version)

    def published(self) -> Iterator[At]:
        """Same as `history`, but continues after a version without a parent with the versions published before it."""
        last = None
        for last in self.history():
            yield last
        while last is not None and self._is_root(*last):
            number = last[0].partition("-")[0]
            earlier = [name for name in self._reads.list_folders(VERSIONS) if name.partition("-")[0] < number]
            start = next((at for at in map(self._read_at, sorted(earlier, reverse=True)) if at is not None), None)
            last = None
            for last in self._back_from(start):
                yield last

    def find(self, name: str) -> At:
        """Return folder and digest of the version with a name.

        Args:
            name: Name of the version (00000012-9f2c41d0) or a prefix of it with the complete number; its number, with
                or without leading zeros (12); or a prefix of the part after the number or of the digest, with at least
                4 characters. A value of up to 8 digits is always a number.

        Raises:
            UserError: No version, or more than one, matches; the remedy lists candidates.
            CorruptFileError: The version exists but cannot be read.
        """
        readable = dict(self.published())
        digests = {
            folder: readable.get(folder) or self._digest_of(folder) for folder in self._reads.list_folders(VERSIONS)
        }
        matches = [folder for folder, digest in digests.items() if _is_named(name, folder, digest)]
        if len(matches) == 1:
            folder = matches[0]
            return folder, digests[folder] or self._read_digest(folder)
        candidates = matches or list(digests)
        problem = "several versions match" if matches else "no version matches"
        listed = ", ".join(candidates[: -_MAX_LISTED - 1 : -1])
        order = "" if matches else ", newest first"
        remedy = (
            f"choose one of {listed}{order}" if candidates else "publish a version with: nestrec publish RUN ADDRESS"
        )
        raise UserError(problem, option="version", value=name, remedy=remedy)

    def _digest_of(self, folder: str) -> str | None:
        try:
            return self._read_digest(folder)
        except CorruptFileError:
            return None

    def _read_digest(self, folder: str) -> str:
        """Return the digest of the version in a folder; raise `CorruptFileError` if it has no readable manifest."""
        problem: CorruptFileError | None = None
        for kind in KINDS:
            where = manifest_file(folder, kind)
            try:
                manifest = decode_manifest(self._reads.read(where), where)
                self.manifest(folder, kind, manifest.version)
                if folder.partition("-")[0] != f"{manifest.number:08d}":
                    raise corrupt_version_error(where, "the manifest belongs to another version")
                return manifest.version
            except FileNotFoundError:
                continue
            except CorruptFileError as error:
                problem = error
        raise problem or corrupt_version_error(
            f"{VERSIONS}/{folder}", "the folder contains neither full.json nor delta.json"
        )

    def _is_root(self, folder: str, version: str) -> bool:
        manifest = self.read_description(folder, version)
        return manifest is not None and manifest.parent is None

    def _read_at(self, folder: str) -> At | None:
        """Return folder and digest of the version in a folder; None if it is missing or corrupt."""
        for kind in KINDS:
            with contextlib.suppress(FileNotFoundError, CorruptFileError):
                where = manifest_file(folder, kind)
                version = decode_manifest(self._reads.read(where), where).version
                return (folder, version) if self.read_description(folder, version) is not None else None
        return None

    def is_removed(self, folder: str) -> bool:
        """Return whether a version was deleted: its folder contains no manifest."""
        for kind in KINDS:
            with contextlib.suppress(FileNotFoundError):
                self._reads.read(manifest_file(folder, kind))
                return False
        return True

    def delta_chain(self, target: At, current: str) -> list[VersionStep]:
        """Return the deltas that lead from a version to a later one, oldest first.

        Args:
            target: Folder and digest of the later version.
            current: Digest of the version to start from.

        Raises:
            CorruptFileError: A manifest is corrupt, or the deltas do not lead there.
            FileNotFoundError: A delta is missing.
        """
        if target[1] == current:
            return []

        def base_of(step: VersionStep) -> VersionStep | None:
            parent = _parent(step)
            return None if parent[1] == current else self._delta(parent)

        return list(chain_of(self._delta(target), base_of))[::-1]

    def chain_from_full(self, target: At) -> list[VersionStep]:
        """Return the chain to a version: the newest full version before it, then the deltas, oldest first."""
        return list(chain_of(self.step_at(target), self._base_of))[::-1]

    def step_at(self, at: At) -> VersionStep:
        """Return a version with its full manifest if that is readable, otherwise with its delta.

        Raises:
            CorruptFileError: Both manifests are missing or corrupt.
        """
        folder, version = at
        problem: CorruptFileError | None = None
        try:
            return VersionStep(folder, self.manifest(folder, "full", version))
        except FileNotFoundError:
            pass
        except CorruptFileError as error:
            problem = error
        try:
            return self._delta(at)
        except FileNotFoundError as missing:
            text = "the folder contains neither full.json nor delta.json"
            raise problem or corrupt_version_error(f"{VERSIONS}/{folder}", text) from missing

    def _base_of(self, step: VersionStep) -> VersionStep | None:
        """Return the parent of a delta; None for a full version."""
        return None if step.manifest.kind == "full" else self.step_at(_parent(step))

    def _delta(self, at: At) -> VersionStep:
        return VersionStep(at[0], self.manifest(at[0], "delta", at[1]))

    def tensors(self, step: VersionStep, entry: FileEntry) -> dict[str, torch.Tensor]:
        """Return the tensors of a file after verifying its digest."""
        return self._verified.tensors(f"{VERSIONS}/{step.folder}", entry)

    def weights(self, step: VersionStep) -> dict[str, torch.Tensor]:
        """Return the dense weights by name."""
        (entry,) = _of_kind(step.manifest, "weights")
        return self.tensors(step, entry)

    def descriptions(self, step: VersionStep) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the changes of the description files: differences of JSON (`apply_json_diff`) and tensors
        (`apply_rows_diff`)."""
        plain, tensors = {}, {}
        for entry in _of_kind(step.manifest, "descriptions"):
            if entry.name.endswith(".json"):
                plain = json.loads(self._verified.content(f"{VERSIONS}/{step.folder}", entry))
            else:
                tensors = self.tensors(step, entry)
        return plain, tensors

    def rows(self, step: VersionStep, table: PublishedTable) -> Iterator[VersionRows]:
        """Yield the rows of a table that a version contains, file by file."""
        for entry in _of_kind(step.manifest, "rows"):
            if entry.table == table.name:
                yield self._rows(step, entry, table.num_rows)

    def index(self, step: VersionStep, num_items: int) -> Iterator[VersionRows]:
        """Yield rows of the search index and their item vectors, file by file."""
        for entry in _of_kind(step.manifest, "index"):
            yield self._rows(step, entry, num_items)

    def removed_keys(self, step: VersionStep, table: PublishedTable) -> torch.Tensor:
        """Return the keys of removed rows, which get their initial values again."""
        keys = [torch.zeros(0, dtype=torch.int64)]
        for entry in _of_kind(step.manifest, "removed"):
            if entry.table == table.name:
                keys.append(self.tensors(step, entry)["keys"])
                _check_keys(keys[-1], table.num_rows, entry.name)
        return torch.cat(keys)

    def _rows(self, step: VersionStep, entry: FileEntry, num_rows: int) -> VersionRows:
        tensors = self.tensors(step, entry)
        keys, weight = tensors["keys"], tensors["weight"]
        _check_keys(keys, num_rows, entry.name)
        if not bool(weight.isfinite().all()) or len(keys) != len(weight):
            raise corrupt_version_error(
                entry.name, "rows are not finite, or their number differs from that of the keys"
            )
        return keys, weight

    def read_description(self, folder: str, version: str) -> VersionManifest | None:
        """Return a manifest of a version, delta or full; None if both are missing or corrupt."""
        for kind in KINDS:
            try:
                return self.manifest(folder, kind, version)
            except (FileNotFoundError, CorruptFileError):
                continue
        return None


def _parent(step: VersionStep) -> At:
    parent = step.manifest.parent
    assert parent is not None, "a delta has a parent"
    return parent.folder, parent.version


def _is_named(name: str, folder: str, digest: str | None) -> bool:
    """Return whether `name` selects the version in a folder; see `VersionStore.find`."""
    number, _, token = folder.partition("-")
    if _NUMBER.fullmatch(name):  # never a prefix of a digest: a mistyped number must not select another version
        return number == name.zfill(_NUMBER_DIGITS)
    if "-" in name:
        return folder.startswith(name)
    return len(name) >= _MIN_PREFIX and (token.startswith(name) or (digest or "").startswith(name))


def _of_kind(manifest: VersionManifest, kind: str) -> list[FileEntry]:
    return [entry for entry in manifest.files if entry.kind == kind]


def _check_keys(keys: torch.Tensor, num_rows: int, where: str) -> None:
    if len(keys) and (int(keys.min()) < 0 or int(keys.max()) >= num_rows):
        raise corrupt_version_error(where, f"a key is not an index of the table's {num_rows} rows")


def tables_of(manifest: VersionManifest) -> Mapping[str, PublishedTable]:
    """Return the tables of a version by name."""
    return {table.name: table for table in manifest.tables}
