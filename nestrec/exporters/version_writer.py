"""A version told in full, made of files already written: the last full one, and what has changed since.

Nothing is asked of the tables in training, and no more than a file is in memory at a time: a full version costs a
training run no pause, however large its tables are.

Which versions may go: those that nobody is led to any more.

Writes versions: each rank its own files, the first one the manifests, and which version is the newest.

A version is there when its manifest is, and is served when `newest.json` names it. What could not be written goes,
and what a kill leaves, files that no manifest names in a folder of their own, goes with old versions.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.artifacts.atomic_files import safetensors_content
from nestrec.artifacts.storage import Place
from nestrec.artifacts.writer_group import Peers
from nestrec.base.config import to_plain
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.base.failpoints import fail_point
from nestrec.checkpoint.checkpoint_content import Chunk, check_finite
from nestrec.exporters.version_content import RankContent
from nestrec.serving.versions.version_manifest import (
    NEWEST_FILE,
    VERSIONS,
    Kind,
    Newest,
    Parent,
    PublishedTable,
    Times,
    VersionFile,
    VersionManifest,
    encode,
    manifest_file,
    version_of,
)
from nestrec.serving.versions.version_store import Versions, VersionStep, tensors_of


def can_merge(chain: Sequence[VersionStep], num_shards: int) -> bool:
    """Whether the files of a chain belong to the same shards as now."""
    return all(entry.num_shards == num_shards for step in chain for entry in step.manifest.files if _is_of_rows(entry))


def merged(versions: Versions, chain: Sequence[VersionStep], shard: tuple[int, int], *, owns_copy: bool) -> RankContent:
    """This shard's rows after the last of the chain, which begins with a full version, oldest first."""
    if not owns_copy:
        return RankContent(rows={}, shard=shard)
    names = [table.name for table in chain[-1].manifest.tables]
    return RankContent(
        rows={name: _newest_rows(versions, chain, shard, "rows", name) for name in names},
        index=_newest_rows(versions, chain, shard, "index", None),
        shard=shard,
    )


def _newest_rows(
    versions: Versions, chain: Sequence[VersionStep], shard: tuple[int, int], kind: str, table: str | None
) -> Iterator[Chunk]:
    """Each key once, with its last row; a key that was removed later than written is left out."""
    superseded: NDArray[np.int64] = np.zeros(0, np.int64)
    for step in reversed(chain):
        newer = [superseded]
        mine = [e for e in step.manifest.files if e.shard == shard[0] and e.table == table]
        for entry in mine:
            if entry.kind == kind:
                tensors = tensors_of(versions.read(step, entry), entry.name)
                keys = tensors["keys"].numpy()
                newer.append(keys)
                keep = torch.from_numpy(~np.isin(keys, superseded))
                if bool(keep.any()):
                    yield {name: values[keep] for name, values in tensors.items()}
        removed = [entry for entry in mine if entry.kind == "removed" and kind == "rows"]
        newer += [tensors_of(versions.read(step, entry), entry.name)["keys"].numpy() for entry in removed]
        superseded = np.unique(np.concatenate(newer))


def _is_of_rows(entry: VersionFile) -> bool:
    return entry.kind in {"rows", "removed", "index"}


def prune(versions: Versions, keep: int) -> list[str]:
    """Delete all but the last `keep` versions, what they build on down to a full one, and what lies at the address by
    chance; the names of the folders that went.

    Manifests go first: what is half deleted is not there.
    """
    kept: set[str] = set()
    for folder, version in versions.published():
        kept.add(folder)
        if len(kept) >= keep and _is_full(versions, folder, version):
            break
    else:
        return []  # what they build on may lie behind one that is damaged
    gone = [folder for folder in versions.place.folders(VERSIONS) if folder not in kept]
    for folder in gone:
        versions.place.remove(manifest_file(folder, "delta"))
        versions.place.remove(manifest_file(folder, "full"))
        fail_point("publish.during_pruning")
        versions.place.remove(f"{VERSIONS}/{folder}")
    return gone


def _is_full(versions: Versions, folder: str, version: str) -> bool:
    try:
        versions.manifest(folder, "full", version)
    except FileNotFoundError:
        return False
    return True


Pieces = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
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
    """All ranks make the same calls in the same order; `SaveError` on all of them where one could not write."""

    def __init__(self, place: Place, peers: Peers):
        self.place, self._peers = place, peers
        self.last_folder: str | None = None
        """of the version that was written last, or was to be"""
        self._begun: list[str] = []
        """files of this rank"""

    def write(self, kind: Kind, about: About, content: RankContent) -> VersionStep:
        """A new version, which is the newest when this returns."""
        token = self._peers.gather(secrets.token_hex(4))[0]
        self.last_folder = folder = f"{about.number:08d}-{token}"
        manifest = self._write(folder, kind, about, content, None)
        newest = Newest(folder=folder, version=manifest.version, number=manifest.number)
        self._first(lambda: self._point(newest), folder)
        return VersionStep(folder, manifest)

    def write_full(self, written: VersionStep, about: About, content: RankContent) -> VersionStep:
        """The same version once more, told in full."""
        return VersionStep(
            written.folder, self._write(written.folder, "full", about, content, written.manifest.version)
        )

    def _write(
        self, folder: str, kind: Kind, about: About, content: RankContent, version: str | None
    ) -> VersionManifest:
        self._begun = []
        try:
            files_of = self._files(folder, kind, about, content)
            parts = self._peers.agree(lambda: to_plain(list(files_of)), _problem(folder, self.place))
        except UserError:
            self._remove_begun(folder, is_new=version is None)
            raise
        run, times, published_s = self._peers.gather((about.run, to_plain(about.times), time.time()))[0]
        entries = sorted((from_plain(VersionFile, entry) for part in parts for entry in part), key=lambda e: e.name)
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
        self._first(lambda: self._commit(folder, manifest), folder)
        return manifest

    def _files(self, folder: str, kind: Kind, about: About, content: RankContent) -> Iterator[VersionFile]:
        fail_point(f"publish.{kind}.before_files")
        for entry in self._all_files(folder, kind, about, content):
            yield entry
            fail_point(f"publish.{kind}.between_files")

    def _all_files(self, folder: str, kind: Kind, about: About, content: RankContent) -> Iterator[VersionFile]:
        rank = self._peers.rank

        def put(name: str, tensors: Pieces, what: Any, table: str | None = None) -> VersionFile:
            size, digest = self._put(f"{VERSIONS}/{folder}/{name}", safetensors_content(tensors))
            shard, num_shards = content.shard
            return VersionFile(
                name=name, bytes=size, sha256=digest, kind=what, table=table, shard=shard, num_shards=num_shards
            )

        if self._peers.is_first:
            check_finite("the dense weights", about.weights)
            yield put(f"{kind}-weights.safetensors", about.weights, "weights")
            plain, tensors = about.descriptions
            text = memoryview(json.dumps(plain).encode())
            size, digest = self._put(f"{VERSIONS}/{folder}/{kind}-descriptions.json", iter([text]))
            yield VersionFile(name=f"{kind}-descriptions.json", bytes=size, sha256=digest, kind="descriptions")
            if tensors:
                yield put(f"{kind}-descriptions.safetensors", tensors, "descriptions")
        for table, keys in content.removed.items():
            if len(keys):
                yield put(f"{kind}-removed-{_safe(table)}-{rank:05d}.safetensors", {"keys": keys}, "removed", table)
        for table, chunks in content.rows.items():
            for part, chunk in enumerate(_checked(chunks, f"table {table!r}")):
                yield put(f"{kind}-rows-{_safe(table)}-{rank:05d}-{part:05d}.safetensors", chunk, "rows", table)
        for part, chunk in enumerate(_checked(content.index, "the retrieval index")):
            yield put(f"{kind}-index-{rank:05d}-{part:05d}.safetensors", chunk, "index")

    def _put(self, name: str, content: Iterator[memoryview]) -> tuple[int, str]:
        self._begun.append(name)
        return self.place.write(name, content)

    def _remove_begun(self, folder: str, *, is_new: bool) -> None:
        """What was written of a version that could not be: where there is no room, it would take what there is left."""
        with contextlib.suppress(OSError):
            for name in self._begun:
                self.place.remove(name)
            if is_new and self._peers.is_first:
                self.place.remove(f"{VERSIONS}/{folder}")

    def _commit(self, folder: str, manifest: VersionManifest) -> None:
        fail_point(f"publish.{manifest.kind}.before_manifest")
        self.place.replace(manifest_file(folder, manifest.kind), encode(manifest))
        fail_point(f"publish.{manifest.kind}.after_manifest")

    def _point(self, newest: Newest) -> None:
        self.place.replace(NEWEST_FILE, encode(newest))
        fail_point("publish.after_newest")

    def _first(self, action: Callable[[], None], folder: str) -> None:
        self._peers.agree(action if self._peers.is_first else lambda: None, _problem(folder, self.place))


def _checked(chunks: Iterable[Chunk], what: str) -> Iterator[Pieces]:
    for chunk in chunks:
        check_finite(what, chunk)
        yield chunk


def _problem(folder: str, place: Place) -> str:
    return f"the version {folder} could not be written to {place.address}"


def _safe(table: str) -> str:
    return quote(table, safe="")
