"""Writes published model versions: each rank writes its own files, the first rank writes manifests and `newest.json`.

A version is committed when its manifest exists and is served when `newest.json` names it. If writing a version fails,
its files are removed; files without a manifest that a killed process leaves are removed together with old versions.

A version that was written as a delta can be rewritten as a full version by merging files that are already written: the
last full version and the deltas since then. This does not read the tables in training and has at most one file in
memory, so that a full version does not pause the training run, regardless of the size of its tables.
"""

import contextlib
import itertools
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nestrec.artifacts.atomic_files import safetensors_content
from nestrec.artifacts.delta import newest_rows, to_delete
from nestrec.artifacts.manifest import FileEntry, entry_of, safe_name
from nestrec.artifacts.manifest import Kind as FileKind
from nestrec.artifacts.storage import Storage
from nestrec.artifacts.writer_group import CheckpointGroup
from nestrec.base.config import to_plain
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.base.failpoints import fail_point
from nestrec.checkpoint.checkpoint_content import Chunk, check_finite
from nestrec.exporters.version_content import RankVersionData
from nestrec.serving.versions.version_manifest import (
    NEWEST_FILE,
    VERSIONS,
    Kind,
    NewestPointer,
    Parent,
    PublishedTable,
    Times,
    VersionManifest,
    encode,
    manifest_file,
    version_of,
)
from nestrec.serving.versions.version_store import VersionStep, VersionStore


def can_merge(chain: Sequence[VersionStep], num_shards: int) -> bool:
    """Return whether the files of a chain were written with the current number of shards."""
    return all(
        entry.num_shards == num_shards for step in chain for entry in step.manifest.files if _contains_rows(entry)
    )


def merge_chain(
    versions: VersionStore, chain: Sequence[VersionStep], shard: tuple[int, int], *, owns_copy: bool
) -> RankVersionData:
    """Merge a chain of versions into the full content of its last version, for one shard.

    Args:
        versions: Store that contains the chain.
        chain: A full version and the deltas that build on it, oldest first.
        shard: Index of this rank's shard and number of shards.
        owns_copy: Whether this rank writes the rows of its shard; False on all replicas but the first.
    """
    if not owns_copy:
        return RankVersionData(rows={}, shard=shard)
    names = [table.name for table in chain[-1].manifest.tables]
    return RankVersionData(
        rows={name: _newest_rows(versions, chain, shard, "rows", name) for name in names},
        index=_newest_rows(versions, chain, shard, "index", None),
        shard=shard,
    )


def _newest_rows(
    versions: VersionStore, chain: Sequence[VersionStep], shard: tuple[int, int], kind: str, table: str | None
) -> Iterator[Chunk]:
    """Yield the newest row of each key; keys that were deleted after their last write are left out."""

    def chunks(step: VersionStep, kind: str) -> Iterator[Chunk]:
        for entry in step.manifest.files:
            if (entry.kind, entry.table, entry.shard) == (kind, table, shard[0]):
                yield versions.tensors(step, entry)

    layers = [(chunks(step, kind), chunks(step, "removed") if kind == "rows" else ()) for step in reversed(chain)]
    return newest_rows(layers)


def _contains_rows(entry: FileEntry) -> bool:
    return entry.kind in {"rows", "removed", "index"}


def prune(versions: VersionStore, max_versions: int) -> list[str]:
    """Delete old versions (retention policy).

    The last `max_versions` versions are retained, together with the versions that they build on down to a full one.
    Folders without a manifest are deleted, too. Manifests are deleted first, so that a partly deleted version is
    ignored by readers.

    Returns:
        Names of the deleted folders.
    """
    newest = list(itertools.islice(versions.published(), max_versions))
    if len(newest) < max_versions:
        return []  # a corrupt manifest can hide the versions before it
    digests = dict(newest)

    def base_of(folder: str) -> str | None:
        base = versions.step_at((folder, digests[folder])).manifest
        if base.kind == "full" or base.parent is None:
            return None
        digests[base.parent.folder] = base.parent.version
        return base.parent.folder

    deleted = to_delete(versions.storage.list_folders(VERSIONS), [folder for folder, _ in newest], base_of)
    for folder in deleted:
        versions.storage.remove(manifest_file(folder, "delta"))
        versions.storage.remove(manifest_file(folder, "full"))
        fail_point("publish.during_pruning")
        versions.storage.remove(f"{VERSIONS}/{folder}")
    return deleted


NamedTensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInfo:
    """Metadata and dense content of a version to write."""

    number: int
    step: int
    run: str
    parent: Parent | None
    tables: tuple[PublishedTable, ...]
    times: Times
    weights: NamedTensors
    """Dense weights; those of the first rank are written."""
    descriptions: tuple[Mapping[str, Any], NamedTensors]
    """Content without trained parameters, or its changes, as JSON and tensors; that of the first rank is written."""


class VersionWriter:
    """Writes versions to a storage backend. Collective: every rank must make the same calls in the same order.

    If one rank cannot write, `CheckpointSaveError` is raised on all ranks.
    """

    def __init__(self, storage: Storage, peers: CheckpointGroup):
        self._storage = storage
        self._peers = peers
        self.last_folder: str | None = None
        """Folder of the last version that was written or attempted."""
        self._started_files: list[str] = []
        """Files of the current version that this rank has started to write."""

    def write(self, kind: Kind, info: VersionInfo, content: RankVersionData) -> VersionStep:
        """Write a new version and make it the newest one."""
        token = self._peers.gather(secrets.token_hex(4))[0]
        self.last_folder = folder = f"{info.number:08d}-{token}"
        manifest = self._write(folder, kind, info, content, None)
        newest = NewestPointer(folder=folder, version=manifest.version, number=manifest.number)
        self._peers.run_on_first_rank(lambda: self._set_newest(newest), _write_problem(folder, self._storage))
        return VersionStep(folder, manifest)

    def write_full(self, written: VersionStep, info: VersionInfo, content: RankVersionData) -> VersionStep:
        """Write an existing version again, with its full content instead of a delta."""
        return VersionStep(written.folder, self._write(written.folder, "full", info, content, written.manifest.version))

    def _write(
        self, folder: str, kind: Kind, info: VersionInfo, content: RankVersionData, version: str | None
    ) -> VersionManifest:
        self._started_files = []
        try:
            files_of = self._files(folder, kind, info, content)
            parts = self._peers.run_on_all_ranks(
                lambda: to_plain(list(files_of)), _write_problem(folder, self._storage)
            )
        except UserError:
            self._remove_started_files(folder, is_new=version is None)
            raise
        run, times, published_s = self._peers.gather((info.run, to_plain(info.times), time.time()))[0]
        entries = sorted((from_plain(FileEntry, entry) for part in parts for entry in part), key=lambda e: e.name)
        files = tuple(entries)
        manifest = VersionManifest(
            kind=kind,
            version=version or version_of(info.parent, info.number, info.step, files),
            number=info.number,
            step=info.step,
            run=run,
            parent=info.parent,
            files=files,
            tables=info.tables,
            times=from_plain(Times, times),
            published_s=published_s,
        )
        self._peers.run_on_first_rank(lambda: self._commit(folder, manifest), _write_problem(folder, self._storage))
        return manifest

    def _files(self, folder: str, kind: Kind, info: VersionInfo, content: RankVersionData) -> Iterator[FileEntry]:
        fail_point(f"publish.{kind}.before_files")
        for entry in self._all_files(folder, kind, info, content):
            yield entry
            fail_point(f"publish.{kind}.between_files")

    def _all_files(self, folder: str, kind: Kind, info: VersionInfo, content: RankVersionData) -> Iterator[FileEntry]:
        rank = self._peers.rank

        def put(name: str, tensors: NamedTensors, kind: FileKind, table: str | None = None) -> FileEntry:
            written = self._put(f"{VERSIONS}/{folder}/{name}", safetensors_content(tensors))
            return entry_of(name, written, kind, table=table, shard=content.shard)

        if self._peers.is_first:
            check_finite("the dense weights", info.weights)
            yield put(f"{kind}-weights.safetensors", info.weights, "weights")
            plain, tensors = info.descriptions
            text = memoryview(json.dumps(plain).encode())
            name = f"{kind}-descriptions.json"
            yield entry_of(name, self._put(f"{VERSIONS}/{folder}/{name}", iter([text])), "descriptions")
            if tensors:
                yield put(f"{kind}-descriptions.safetensors", tensors, "descriptions")
        for table, keys in content.removed.items():
            if len(keys):
                yield put(f"{kind}-removed-{safe_name(table)}-{rank:05d}.safetensors", {"keys": keys}, "removed", table)
        for table, chunks in content.rows.items():
            for part, chunk in enumerate(_check_chunks(chunks, f"table {table!r}")):
                yield put(f"{kind}-rows-{safe_name(table)}-{rank:05d}-{part:05d}.safetensors", chunk, "rows", table)
        for part, chunk in enumerate(_check_chunks(content.index, "the retrieval index")):
            yield put(f"{kind}-index-{rank:05d}-{part:05d}.safetensors", chunk, "index")

    def _put(self, name: str, content: Iterator[memoryview]) -> tuple[int, str]:
        self._started_files.append(name)
        return self._storage.write(name, content)

    def _remove_started_files(self, folder: str, *, is_new: bool) -> None:
        """Remove the files of a failed version, because on a full disk they would occupy the remaining space."""
        with contextlib.suppress(OSError):
            for name in self._started_files:
                self._storage.remove(name)
            if is_new and self._peers.is_first:
                self._storage.remove(f"{VERSIONS}/{folder}")

    def _commit(self, folder: str, manifest: VersionManifest) -> None:
        fail_point(f"publish.{manifest.kind}.before_manifest")
        self._storage.replace(manifest_file(folder, manifest.kind), encode(manifest))
        fail_point(f"publish.{manifest.kind}.after_manifest")

    def _set_newest(self, newest: NewestPointer) -> None:
        self._storage.replace(NEWEST_FILE, encode(newest))
        fail_point("publish.after_newest")


def _check_chunks(chunks: Iterable[Chunk], what: str) -> Iterator[NamedTensors]:
    for chunk in chunks:
        check_finite(what, chunk)
        yield chunk


def _write_problem(folder: str, storage: Storage) -> str:
    return f"the version {folder} could not be written to {storage.address}"
