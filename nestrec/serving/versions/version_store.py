"""Reading versions: which there are, how one follows from another, what they hold. Nothing is believed unverified."""

import contextlib
import json
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
    damaged_version,
    decode_manifest,
    decode_newest,
    manifest_file,
    version_of,
)

READ_TIMEOUT_S = 60.0
_MOST_CANDIDATES = 10
"""versions that an error lists, the newest first"""
KINDS: tuple[Kind, Kind] = ("delta", "full")
At = tuple[str, str]
"""Folder and digest of a version."""
VersionRows = tuple[torch.Tensor, torch.Tensor]
"""(n,) int64 ids and (n, D) rows, on the host"""


@dataclass(frozen=True, slots=True)
class VersionStep:
    """One version on the way to another."""

    folder: str
    """name of the version"""
    manifest: VersionManifest

    @property
    def servable_version(self) -> str:
        """Version of the servable in memory: the name, which `shown_version` shows, and the digest."""
        return f"{self.folder}:{self.manifest.version}"


class VersionStore:
    """What lies at an address. `CorruptFileError` for what is not as it was written, `OSError` where it cannot be
    asked."""

    def __init__(self, storage: Storage, read_timeout_s: float = READ_TIMEOUT_S):
        """read_timeout_s: seconds after which a file that is not read yet counts as away."""
        self.storage = storage
        self._reads = TimedReads(storage, read_timeout_s)
        self._verified = VerifiedReads(self._reads, damaged_version)

    def newest(self) -> NewestPointer | None:
        """None where nothing was published yet."""
        try:
            content = self._reads.read(NEWEST_FILE)
        except FileNotFoundError:
            return None
        return decode_newest(content, NEWEST_FILE)

    def manifest(self, folder: str, kind: Kind, version: str) -> VersionManifest:
        """Of the version of this name; `FileNotFoundError` where it is not told in this way."""
        where = manifest_file(folder, kind)
        manifest = decode_manifest(self._reads.read(where), where)
        is_named = manifest.version == version
        if manifest.kind == "delta" or manifest.parent is None:
            made_of = version_of(manifest.parent, manifest.number, manifest.step, manifest.files)
            is_named = is_named and made_of == version
        if not is_named or manifest.kind != kind:
            raise damaged_version(where, "is that of another version")
        return manifest

    def history(self) -> Iterator[At]:
        """(folder, version) from the newest back, as far as they are told of."""
        newest = self.newest()
        return self._back_from(None if newest is None else (newest.folder, newest.version))

    def _back_from(self, at: At | None) -> Iterator[At]:
        while at is not None and (manifest := self.told(*at)) is not None:
            yield at
            parent = manifest.parent
            at = None if parent is None else (parent.folder, parent.version)

    def published(self) -> Iterator[At]:
        """The same, and on behind a version that builds on none: those that were published before it."""
        last = None
        for last in self.history():
            yield last
        while last is not None and self._builds_on_none(*last):
            number = last[0].partition("-")[0]
            earlier = [name for name in self._reads.list_folders(VERSIONS) if name.partition("-")[0] < number]
            begun = next((at for at in map(self._named, sorted(earlier, reverse=True)) if at is not None), None)
            last = None
            for last in self._back_from(begun):
                yield last

    def find(self, prefix: str) -> At:
        """Return (folder, version) of the version that a user names.

        Args:
            prefix: Beginning of the version's name (00000012-9f2c41d0), of the part after its number, or of its digest.

        Raises:
            UserError: No version, or more than one, is named so; the remedy lists the candidates.
            CorruptFileError: The version is there and cannot be read.
        """
        told = dict(self.published())
        digests = {folder: told.get(folder) or self._digest_of(folder) for folder in self._reads.list_folders(VERSIONS)}
        matches = [folder for folder, digest in digests.items() if _is_prefix_of(prefix, folder, digest)]
        if len(matches) == 1:
            folder = matches[0]
            return folder, digests[folder] or self._read_digest(folder)
        candidates = matches or list(digests)
        problem = "names more than one version" if matches else "is not there"
        listed = ", ".join(candidates[: -_MOST_CANDIDATES - 1 : -1])
        remedy = f"name one of {listed}" if candidates else "publish one: nestrec publish RUN ADDRESS"
        raise UserError(problem, option="version", value=prefix, remedy=remedy)

    def _digest_of(self, folder: str) -> str | None:
        try:
            return self._read_digest(folder)
        except CorruptFileError:
            return None

    def _read_digest(self, folder: str) -> str:
        """Return the version that a folder holds; `CorruptFileError` if no manifest of it can be read."""
        problem: CorruptFileError | None = None
        for kind in KINDS:
            where = manifest_file(folder, kind)
            try:
                manifest = decode_manifest(self._reads.read(where), where)
                self.manifest(folder, kind, manifest.version)
                if folder.partition("-")[0] != f"{manifest.number:08d}":
                    raise damaged_version(where, "is that of another version")
                return manifest.version
            except FileNotFoundError:
                continue
            except CorruptFileError as error:
                problem = error
        raise problem or damaged_version(f"{VERSIONS}/{folder}", "has neither full.json nor delta.json")

    def _builds_on_none(self, folder: str, version: str) -> bool:
        manifest = self.told(folder, version)
        return manifest is not None and manifest.parent is None

    def _named(self, folder: str) -> At | None:
        """(folder, version) of what lies in a folder; none where that is not told, or damaged."""
        for kind in KINDS:
            with contextlib.suppress(FileNotFoundError, CorruptFileError):
                where = manifest_file(folder, kind)
                version = decode_manifest(self._reads.read(where), where).version
                return (folder, version) if self.told(folder, version) is not None else None
        return None

    def is_gone(self, folder: str) -> bool:
        """Whether nothing tells of what was published in a folder any more."""
        for kind in KINDS:
            with contextlib.suppress(FileNotFoundError):
                self._reads.read(manifest_file(folder, kind))
                return False
        return True

    def way(self, target: At, current: str) -> list[VersionStep]:
        """What leads from a version to another, oldest first. A `CorruptFileError` or `FileNotFoundError` where nothing
        does."""
        if target[1] == current:
            return []

        def base_of(step: VersionStep) -> VersionStep | None:
            parent = _parent(step)
            return None if parent[1] == current else self._delta(parent)

        return list(chain_of(self._delta(target), base_of))[::-1]

    def way_from_full(self, target: At) -> list[VersionStep]:
        """The like from the newest that is told in full, which comes first."""
        return list(chain_of(self.step_at(target), self._base_of))[::-1]

    def step_at(self, at: At) -> VersionStep:
        """Returns a version by its full manifest if that can be read, else by its delta.

        Raises:
            CorruptFileError: It has neither, or they are damaged.
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
            text = "has neither full.json nor delta.json"
            raise problem or damaged_version(f"{VERSIONS}/{folder}", text) from missing

    def _base_of(self, step: VersionStep) -> VersionStep | None:
        """Returns the version that a delta completes; None for a full manifest."""
        return None if step.manifest.kind == "full" else self.step_at(_parent(step))

    def _delta(self, at: At) -> VersionStep:
        return VersionStep(at[0], self.manifest(at[0], "delta", at[1]))

    def tensors(self, step: VersionStep, entry: FileEntry) -> dict[str, torch.Tensor]:
        """Returns the tensors of a file whose content is that of its digest."""
        return self._verified.tensors(f"{VERSIONS}/{step.folder}", entry)

    def weights(self, step: VersionStep) -> dict[str, torch.Tensor]:
        """Dense weights by name."""
        (entry,) = _of_kind(step.manifest, "weights")
        return self.tensors(step, entry)

    def descriptions(self, step: VersionStep) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What is not learnt, as `differences` of JSON and of tensors."""
        plain, tensors = {}, {}
        for entry in _of_kind(step.manifest, "descriptions"):
            if entry.name.endswith(".json"):
                plain = json.loads(self._verified.content(f"{VERSIONS}/{step.folder}", entry))
            else:
                tensors = self.tensors(step, entry)
        return plain, tensors

    def rows(self, step: VersionStep, table: PublishedTable) -> Iterator[VersionRows]:
        """Rows of a table, file by file."""
        for entry in _of_kind(step.manifest, "rows"):
            if entry.table == table.name:
                yield self._rows(step, entry, table.num_rows)

    def index(self, step: VersionStep, num_items: int) -> Iterator[VersionRows]:
        """Vectors that are retrieved, file by file, and the rows of the index that they are in."""
        for entry in _of_kind(step.manifest, "index"):
            yield self._rows(step, entry, num_items)

    def removed(self, step: VersionStep, table: PublishedTable) -> torch.Tensor:
        """Keys that are as they begin again."""
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
            raise damaged_version(entry.name, "holds rows that are not finite, or not one a key")
        return keys, weight

    def told(self, folder: str, version: str) -> VersionManifest | None:
        """A manifest of a version, in whichever way it is told; none where it is not, or is damaged."""
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


def _is_prefix_of(prefix: str, folder: str, digest: str | None) -> bool:
    token = folder.partition("-")[2]
    return any(text.startswith(prefix) for text in (folder, token, digest or ""))


def _of_kind(manifest: VersionManifest, kind: str) -> list[FileEntry]:
    return [entry for entry in manifest.files if entry.kind == kind]


def _check_keys(keys: torch.Tensor, num_rows: int, where: str) -> None:
    if len(keys) and (int(keys.min()) < 0 or int(keys.max()) >= num_rows):
        raise damaged_version(where, f"holds keys beyond the {num_rows} rows of the table")


def tables_of(manifest: VersionManifest) -> Mapping[str, PublishedTable]:
    """By name."""
    return {table.name: table for table in manifest.tables}
