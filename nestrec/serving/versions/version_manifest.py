"""Manifest of a published version, and the freshness of its data.

How long it takes from an event to the first answer that has learnt from it, and what that time consists of.

    window     the event waits for the end of its window (mean over the events of a version)
    training   the window is trained on
    publish    what has changed is copied and written, until the version is there
    fetch      a server finds, fetches and verifies it
    apply      it waits for the end of a batch, and is copied
    answer     the next request comes and is answered

Clocks of several machines are taken at their word.

What versions say of themselves.

    ADDRESS/newest.json                       which version is the newest
    ADDRESS/versions/00000012-9f2c41d0/       one version; the number counts, the rest keeps two writers apart
        delta.json                            what has changed since its parent, written after the files that it names
        full.json                             all of it, in some versions: servers that begin, or have missed something
        *.safetensors, *.json

Both manifests of a version name the same version, and list their files with sizes and digests. Each carries a digest of
itself. Where `delta.json` names a parent, all files together make that parent's state into this one.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from nestrec.artifacts.manifest import FileEntry, decode_sealed, digest_of_plain, is_plain_name, plain_manifest, seal
from nestrec.base.config import config, to_plain
from nestrec.base.errors import CorruptFileError
from nestrec.embedding.table_config import InitConfig
from nestrec.serving.core.cost_model import LONG_BOUNDS_S, Histogram

FORMAT = 1
NEWEST_FILE, VERSIONS = "newest.json", "versions"

Kind = Literal["delta", "full"]


@config
class PublishedTable:
    """What is known of all rows of a table, also of those that no file holds: they are as they begin."""

    name: str
    """of the table"""
    num_rows: int
    """ids run from 0 to it"""
    dim: int
    """elements of a row"""
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    """of the weights"""
    seed: int
    """of initial rows"""
    init: InitConfig
    """how rows begin"""


@config
class Times:
    """Unix seconds, of the events that this version has learnt from and the one before has not."""

    first_event_s: float | None = None
    """when the oldest of them came"""
    mean_event_s: float | None = None
    """mean over them"""
    last_event_s: float | None = None
    """when the newest of them came"""
    closed_s: float | None = None
    """when their window was closed"""
    trained_s: float | None = None
    """when the last step on them had been made"""


@config
class Parent:
    folder: str
    """name of the version before"""
    version: str
    """digest of the version before"""


@config
class VersionManifest:
    """All that a version consists of, in one of two ways."""

    kind: Kind
    """what has changed since the parent, or all of it"""
    version: str
    """digest of what the version consists of, its parent included"""
    number: int
    """of the version, from 1"""
    step: int
    """training step of the weights"""
    run: str
    """name of the run"""
    parent: Parent | None
    """none where nothing is known of a version before it"""
    files: tuple[FileEntry, ...]
    """in the order of their names"""
    tables: tuple[PublishedTable, ...]
    """of the model"""
    times: Times = Times()
    """of what was learnt"""
    published_s: float = 0.0
    """when it was written, in Unix seconds"""
    format: int = FORMAT
    """version of this layout"""

    @property
    def num_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)


@config
class NewestPointer:
    folder: str
    """name of the newest version"""
    version: str
    """digest of the newest version"""
    number: int
    """its number"""
    format: int = FORMAT
    """version of this layout"""


def manifest_file(folder: str, kind: Kind) -> str:
    return f"{VERSIONS}/{folder}/{kind}.json"


def version_of(parent: Parent | None, number: int, step: int, files: tuple[FileEntry, ...]) -> str:
    """Return the digest of a version: two with the same digest came about in the same way from the same bytes."""
    told = {"parent": to_plain(parent), "number": number, "step": step, "files": [f.sha256 for f in files]}
    return digest_of_plain(told)


def encode(told: VersionManifest | NewestPointer) -> bytes:
    return seal(plain_manifest(told))


def decode_manifest(content: bytes | bytearray, where: str) -> VersionManifest:
    """`CorruptFileError` for what `encode` would not have written."""
    return decode_sealed(VersionManifest, content, where, version=FORMAT, damaged=damaged_version)


def decode_newest(content: bytes | bytearray, where: str) -> NewestPointer:
    """`CorruptFileError` for what `encode` would not have written."""
    newest = decode_sealed(NewestPointer, content, where, version=FORMAT, damaged=damaged_version)
    if not is_plain_name(newest.folder):
        raise damaged_version(where, f"names a folder outside the address: {newest.folder!r}")
    return newest


def damaged_version(where: str, problem: str) -> CorruptFileError:
    """Returns the error for a file of a version."""
    return CorruptFileError(problem, option="version", value=where, remedy="wait for the next full one")


PARTS = ("window", "training", "publish", "fetch", "apply", "answer")
_KEPT = 512


@dataclass(frozen=True, slots=True)
class FreshnessBreakdown:
    """Seconds of the parts of one version; none where a run does not tell, or nobody has asked yet."""

    number: int
    parts: tuple[tuple[str, float | None], ...]
    began_s: float | None
    """when its events came, on average; Unix seconds"""
    applied_s: float
    answered_s: float | None = None

    @property
    def seconds(self) -> float | None:
        """All of it; none where the times of events are not known, or nobody has been answered."""
        return None if self.began_s is None or self.answered_s is None else self.answered_s - self.began_s

    def told(self) -> dict[str, float | None]:
        answer = None if self.answered_s is None else self.answered_s - self.applied_s
        return {**dict(self.parts), "answer": answer}


class FreshnessTracker:
    """Of the versions that a server has served of late. One thread at a time changes it, any may read."""

    def __init__(self) -> None:
        self.recent: deque[FreshnessBreakdown] = deque(maxlen=_KEPT)
        self.times = Histogram(LONG_BOUNDS_S)
        """seconds from event to answer"""

    def began(self, manifest: VersionManifest, *, fetched_s: float, applied_s: float) -> None:
        """A version has come into service."""
        times = manifest.times
        came_s = times.mean_event_s if times.mean_event_s is not None else times.last_event_s
        closed_s = times.closed_s if times.closed_s is not None else times.last_event_s
        parts = (
            ("window", _between(came_s, closed_s)),
            ("training", _between(closed_s, times.trained_s)),
            ("publish", _between(times.trained_s, manifest.published_s)),
            ("fetch", _between(manifest.published_s, fetched_s)),
            ("apply", applied_s - fetched_s),
        )
        self.recent.append(FreshnessBreakdown(manifest.number, parts, came_s, applied_s))

    def answered(self, at_s: float | None) -> None:
        """When the version in service has first answered; none: not yet."""
        if at_s is None or not self.recent or self.recent[-1].answered_s is not None:
            return
        fresh = replace(self.recent[-1], answered_s=at_s)
        self.recent[-1] = fresh
        if fresh.seconds is not None:
            self.times.observe(fresh.seconds)

    @property
    def last(self) -> FreshnessBreakdown | None:
        """The newest that has answered, or the newest at all."""
        answered = [fresh for fresh in self.recent if fresh.answered_s is not None]
        return answered[-1] if answered else self.recent[-1] if self.recent else None


def _between(first_s: float | None, last_s: float | None) -> float | None:
    return None if first_s is None or last_s is None else last_s - first_s
