"""Writes published versions: each rank its own files, the first one the manifests and the name of the newest version.

A version is there when its manifest is, and is served when `newest.json` names it. The files of a version that could
not be written are removed; what a kill leaves, files that no manifest names in a folder of their own, goes with old
versions.

A version that is written as a delta can be written in full once more, from files already written: the last full version
and what has changed since. That reads nothing from the tables in training, and no more than a file is in memory at a
time, so a full version costs a training run no pause, however large its tables are.
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
    """Whether the files of a chain belong to the same shards as now."""
    return all(entry.num_shards == num_shards for step in chain for entry in step.manifest.files if _is_of_rows(entry))


def merged(
    versions: VersionStore, chain: Sequence[VersionStep], shard: tuple[int, int], *, owns_copy: bool
) -> RankVersionData:
    """This shard's rows after the last of the chain, which begins with a full version, oldest first."""
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
    """Each key once, with its last row; a key that was removed later than written is left out."""

    def chunks(step: VersionStep, kind: str) -> Iterator[Chunk]:
        for entry in step.manifest.files:
            if (entry.kind, entry.table, entry.shard) == (kind, table, shard[0]):
                yield versions.tensors(step, entry)

    layers = [(chunks(step, kind), chunks(step, "removed") if kind == "rows" else ()) for step in reversed(chain)]
    return newest_rows(layers)


def _is_of_rows(entry: FileEntry) -> bool:
    return entry.kind in {"rows", "removed", "index"}


def prune(versions: VersionStore, keep: int) -> list[str]:
    """Delete all but the last `keep` versions, what they build on down to a full one, and what lies at the address by
    chance; the names of the folders that went.

    Manifests go first: what is half deleted is not there.
    """
    newest = list(itertools.islice(versions.published(), keep))
    if len(newest) < keep:
        return []  # a damaged one may hide those before it
    digests = dict(newest)

    def base_of(folder: str) -> str | None:
        base = versions.step_at((folder, digests[folder])).manifest
        if base.kind == "full" or base.parent is None:
            return None
        digests[base.parent.folder] = base.parent.version
        return base.parent.folder

    gone = to_delete(versions.storage.list_folders(VERSIONS), [folder for folder, _ in newest], base_of)
    for folder in gone:
        versions.storage.remove(manifest_file(folder, "delta"))
        versions.storage.remove(manifest_file(folder, "full"))
        fail_point("publish.during_pruning")
        versions.storage.remove(f"{VERSIONS}/{folder}")
    return gone


Pieces = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInfo:
    """A version that is to be written."""

    number: int
    step: int
    run: str
    parent: Parent | None
    tables: tuple[PublishedTable, ...]
    times: Times
    weights: Pieces
    """dense weights; those of the first rank are written"""
    descriptions: tuple[Mapping[str, Any], Pieces]
    """what is not learnt, or has changed of it: JSON and tensors; likewise"""


class VersionWriter:
    """All ranks make the same calls in the same order; `CheckpointSaveError` on all of them where one could not
    write."""

    def __init__(self, storage: Storage, peers: CheckpointGroup):
        self._storage = storage
        self._peers = peers
        self.last_folder: str | None = None
        """of the version that was written last, or was to be"""
        self._begun: list[str] = []
        """files of this rank"""

    def write(self, kind: Kind, about: VersionInfo, content: RankVersionData) -> VersionStep:
        """A new version, which is the newest when this returns."""
        token = self._peers.gather(secrets.token_hex(4))[0]
        self.last_folder = folder = f"{about.number:08d}-{token}"
        manifest = self._write(folder, kind, about, content, None)
        newest = NewestPointer(folder=folder, version=manifest.version, number=manifest.number)
        self._peers.on_first(lambda: self._point(newest), _problem(folder, self._storage))
        return VersionStep(folder, manifest)

    def write_full(self, written: VersionStep, about: VersionInfo, content: RankVersionData) -> VersionStep:
        """The same version once more, told in full."""
        return VersionStep(
            written.folder, self._write(written.folder, "full", about, content, written.manifest.version)
        )

    def _write(
        self, folder: str, kind: Kind, about: VersionInfo, content: RankVersionData, version: str | None
    ) -> VersionManifest:
        self._begun = []
        try:
            files_of = self._files(folder, kind, about, content)
            parts = self._peers.agree(lambda: to_plain(list(files_of)), _problem(folder, self._storage))
        except UserError:
            self._remove_begun(folder, is_new=version is None)
            raise
        run, times, published_s = self._peers.gather((about.run, to_plain(about.times), time.time()))[0]
        entries = sorted((from_plain(FileEntry, entry) for part in parts for entry in part), key=lambda e: e.name)
        files = tuple(entries)
        manifest = VersionManifest(
            kind=kind,
            version=version or version_of(about.parent, about.number, about.step, files),
            number=about.number,
            step=about.step,
            run=run,
            parent=about.parent,
            files=files,
            tables=about.tables,
            times=from_plain(Times, times),
            published_s=published_s,
        )
        self._peers.on_first(lambda: self._commit(folder, manifest), _problem(folder, self._storage))
        return manifest

    def _files(self, folder: str, kind: Kind, about: VersionInfo, content: RankVersionData) -> Iterator[FileEntry]:
        fail_point(f"publish.{kind}.before_files")
        for entry in self._all_files(folder, kind, about, content):
            yield entry
            fail_point(f"publish.{kind}.between_files")

    def _all_files(self, folder: str, kind: Kind, about: VersionInfo, content: RankVersionData) -> Iterator[FileEntry]:
        rank = self._peers.rank

        def put(name: str, tensors: Pieces, kind: FileKind, table: str | None = None) -> FileEntry:
            written = self._put(f"{VERSIONS}/{folder}/{name}", safetensors_content(tensors))
            return entry_of(name, written, kind, table=table, shard=content.shard)

        if self._peers.is_first:
            check_finite("the dense weights", about.weights)
            yield put(f"{kind}-weights.safetensors", about.weights, "weights")
            plain, tensors = about.descriptions
            text = memoryview(json.dumps(plain).encode())
            name = f"{kind}-descriptions.json"
            yield entry_of(name, self._put(f"{VERSIONS}/{folder}/{name}", iter([text])), "descriptions")
            if tensors:
                yield put(f"{kind}-descriptions.safetensors", tensors, "descriptions")
        for table, keys in content.removed.items():
            if len(keys):
                yield put(f"{kind}-removed-{safe_name(table)}-{rank:05d}.safetensors", {"keys": keys}, "removed", table)
        for table, chunks in content.rows.items():
            for part, chunk in enumerate(_checked(chunks, f"table {table!r}")):
                yield put(f"{kind}-rows-{safe_name(table)}-{rank:05d}-{part:05d}.safetensors", chunk, "rows", table)
        for part, chunk in enumerate(_checked(content.index, "the retrieval index")):
            yield put(f"{kind}-index-{rank:05d}-{part:05d}.safetensors", chunk, "index")

    def _put(self, name: str, content: Iterator[memoryview]) -> tuple[int, str]:
        self._begun.append(name)
        return self._storage.write(name, content)

    def _remove_begun(self, folder: str, *, is_new: bool) -> None:
        """What was written of a version that could not be: where there is no room, it would take what there is left."""
        with contextlib.suppress(OSError):
            for name in self._begun:
                self._storage.remove(name)
            if is_new and self._peers.is_first:
                self._storage.remove(f"{VERSIONS}/{folder}")

    def _commit(self, folder: str, manifest: VersionManifest) -> None:
        fail_point(f"publish.{manifest.kind}.before_manifest")
        self._storage.replace(manifest_file(folder, manifest.kind), encode(manifest))
        fail_point(f"publish.{manifest.kind}.after_manifest")

    def _point(self, newest: NewestPointer) -> None:
        self._storage.replace(NEWEST_FILE, encode(newest))
        fail_point("publish.after_newest")


def _checked(chunks: Iterable[Chunk], what: str) -> Iterator[Pieces]:
    for chunk in chunks:
        check_finite(what, chunk)
        yield chunk


def _problem(folder: str, storage: Storage) -> str:
    return f"the version {folder} could not be written to {storage.address}"
