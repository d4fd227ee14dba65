"""Writes versions: each rank its own files, the first one the manifests, and which version is the newest.

A version is there when its manifest is, and is served when `newest.json` names it. What could not be written goes,
and what a kill leaves, files that no manifest names in a folder of their own, goes with old versions.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import torch

from nestrec.base.config import from_plain, to_plain
from nestrec.base.errors import UserError
from nestrec.base.failpoints import fail_point
from nestrec.checkpoint.content import Chunk, check_finite
from nestrec.checkpoint.durable import safetensors_content
from nestrec.checkpoint.peers import Peers
from nestrec.checkpoint.places import Place
from nestrec.serving.versions.content import RankContent
from nestrec.serving.versions.manifest import (
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
from nestrec.serving.versions.reader import VersionStep

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
