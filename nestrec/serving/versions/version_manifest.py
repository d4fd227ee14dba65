"""Manifests of published versions, and the freshness of served models.

Layout of an address:

    ADDRESS/newest.json                       pointer to the newest version
    ADDRESS/versions/00000012-9f2c41d0/       one version: its number, and a suffix that keeps two writers apart
        delta.json                            manifest of the changes since the parent, written after its files
        full.json                             manifest of the full state, in some versions, for servers that start or
                                              cannot apply the deltas
        *.safetensors, *.json

Both manifests of a version contain the same version digest and list their files with sizes and SHA-256 digests. Each
manifest contains a digest of itself. The files of `delta.json` turn the state of its parent into that of the version.

Freshness is the time from an event to the first response of a model that learned from it. It consists of:

    window     the event waits for the end of its stream window (mean over the events of a version)
    training   the window is trained on
    publish    changes are copied and written, until the version is visible
    fetch      a server finds, downloads and verifies the version
    apply      the server waits for the end of a batch and copies the changes
    response   the next request arrives and is processed

The times are from the clocks of several machines, which are assumed to be synchronized.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from nestrec.artifacts.manifest import (
    FileEntry,
    decode_sealed,
    digest_of_plain,
    dump_with_digest,
    is_plain_name,
    plain_manifest,
)
from nestrec.base.config import config, to_plain
from nestrec.base.errors import CorruptFileError
from nestrec.embedding.table_config import InitConfig
from nestrec.serving.core.cost_model import LONG_BOUNDS_S, Histogram

FORMAT = 1
NEWEST_FILE, VERSIONS = "newest.json", "versions"

Kind = Literal["delta", "full"]


@config
class PublishedTable:
    """Embedding table of a version. Rows that no file contains have initial values, a function of seed and id."""

    name: str
    """Name of the table."""
    num_rows: int
    """Number of rows; ids are smaller than it."""
    dim: int
    """Number of elements per row."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    """Data type of the weights."""
    seed: int
    """Seed of the initial values."""
    init: InitConfig
    """Distribution of the initial values."""


@config
class Times:
    """Times of the events that are new in this version, in Unix seconds; None if unknown."""

    first_event_s: float | None = None
    """Time of the oldest event in Unix seconds."""
    mean_event_s: float | None = None
    """Mean time of the events in Unix seconds."""
    last_event_s: float | None = None
    """Time of the newest event in Unix seconds."""
    closed_s: float | None = None
    """Time at which the stream window of the events was closed, in Unix seconds."""
    trained_s: float | None = None
    """Time at which the last training step on the events was finished, in Unix seconds."""


@config
class Parent:
    """Version to which a delta applies."""

    folder: str
    """Name of the parent version."""
    version: str
    """Digest of the parent version."""


@config
class VersionManifest:
    """Manifest of a published version, either of a delta or of the full state."""

    kind: Kind
    """Content of the files: `delta` (changes since the parent) or `full` (complete state)."""
    version: str
    """Digest of the version's content, including its parent."""
    number: int
    """Number of the version, from 1."""
    step: int
    """Training step of the weights."""
    run: str
    """Digest of the identity of the training run up to `step`; empty if it is unknown."""
    parent: Parent | None
    """Parent of the version; None if no earlier version is known."""
    files: tuple[FileEntry, ...]
    """Files of the version, sorted by name."""
    tables: tuple[PublishedTable, ...]
    """Embedding tables of the model."""
    times: Times = Times()
    """Times of the events that are new in this version."""
    published_s: float = 0.0
    """Time at which the version was published, in Unix seconds."""
    format: int = FORMAT
    """Version of the manifest format."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)


@config
class NewestPointer:
    """Content of newest.json."""

    folder: str
    """Name of the newest version."""
    version: str
    """Digest of the newest version."""
    number: int
    """Number of the newest version."""
    format: int = FORMAT
    """Version of the format of newest.json."""


def manifest_file(folder: str, kind: Kind) -> str:
    return f"{VERSIONS}/{folder}/{kind}.json"


def version_of(parent: Parent | None, number: int, step: int, files: tuple[FileEntry, ...]) -> str:
    """Return the digest of a version; versions with equal digests have the same history and the same bytes."""
    content = {"parent": to_plain(parent), "number": number, "step": step, "files": [f.sha256 for f in files]}
    return digest_of_plain(content)


def encode(manifest: VersionManifest | NewestPointer) -> bytes:
    """Serialize a manifest or pointer to JSON with a digest of itself."""
    return dump_with_digest(plain_manifest(manifest))


def decode_manifest(content: bytes | bytearray, where: str) -> VersionManifest:
    """Parse a manifest; raise `CorruptFileError` if `encode` cannot have written it."""
    return decode_sealed(VersionManifest, content, where, version=FORMAT, make_error=corrupt_version_error)


def decode_newest(content: bytes | bytearray, where: str) -> NewestPointer:
    """Parse newest.json; raise `CorruptFileError` if `encode` cannot have written it."""
    newest = decode_sealed(NewestPointer, content, where, version=FORMAT, make_error=corrupt_version_error)
    if not is_plain_name(newest.folder):
        raise corrupt_version_error(where, f"the folder {newest.folder!r} is outside the address")
    return newest


def corrupt_version_error(where: str, problem: str) -> CorruptFileError:
    """Return the error for a corrupt file of a version."""
    return CorruptFileError(problem, option="version", value=where, remedy="wait for the next full version")


PARTS = ("window", "training", "publish", "fetch", "apply", "response")
_MAX_RECENT = 512


@dataclass(frozen=True, slots=True)
class FreshnessBreakdown:
    """Freshness of one version, by phase (see the module's docstring)."""

    number: int
    """Number of the version."""
    parts: tuple[tuple[str, float | None], ...]
    """Duration of each phase in seconds by name, without `response`; None if the run did not record it."""
    event_s: float | None
    """Mean time of the version's new events in Unix seconds; None if unknown."""
    applied_s: float
    """Time at which the version was brought into service, in Unix seconds."""
    first_response_s: float | None = None
    """Time of the first response of the version, in Unix seconds; None if there was none yet."""

    @property
    def seconds(self) -> float | None:
        """Freshness in seconds: from the events to the first response; None if either time is unknown."""
        return None if self.event_s is None or self.first_response_s is None else self.first_response_s - self.event_s

    def to_json(self) -> dict[str, float | None]:
        """Return the duration of each phase in seconds, including `response`; None if unknown."""
        response = None if self.first_response_s is None else self.first_response_s - self.applied_s
        return {**dict(self.parts), "response": response}


class FreshnessTracker:
    """Freshness of the versions that a server served recently. One thread at a time may write, any thread may read."""

    def __init__(self) -> None:
        self.recent: deque[FreshnessBreakdown] = deque(maxlen=_MAX_RECENT)
        self.times = Histogram(LONG_BOUNDS_S)
        """Histogram of the freshness in seconds."""

    def record_applied(self, manifest: VersionManifest, *, fetched_s: float, applied_s: float) -> None:
        """Add a version that was brought into service.

        Args:
            manifest: Manifest of the version.
            fetched_s: Time at which it was fetched and verified, in Unix seconds.
            applied_s: Time at which it was in service, in Unix seconds.
        """
        times = manifest.times
        event_s = times.mean_event_s if times.mean_event_s is not None else times.last_event_s
        closed_s = times.closed_s if times.closed_s is not None else times.last_event_s
        parts = (
            ("window", _between(event_s, closed_s)),
            ("training", _between(closed_s, times.trained_s)),
            ("publish", _between(times.trained_s, manifest.published_s)),
            ("fetch", _between(manifest.published_s, fetched_s)),
            ("apply", applied_s - fetched_s),
        )
        self.recent.append(FreshnessBreakdown(manifest.number, parts, event_s, applied_s))

    def record_response(self, at_s: float | None) -> None:
        """Record the first response of the version in service.

        Args:
            at_s: Time of the response in Unix seconds; None if there was none yet.
        """
        if at_s is None or not self.recent or self.recent[-1].first_response_s is not None:
            return
        breakdown = replace(self.recent[-1], first_response_s=at_s)
        self.recent[-1] = breakdown
        if breakdown.seconds is not None:
            self.times.observe(breakdown.seconds)

    @property
    def last(self) -> FreshnessBreakdown | None:
        """Freshness of the newest version that has sent a response; if there is none, of the newest version."""
        served = [breakdown for breakdown in self.recent if breakdown.first_response_s is not None]
        candidates = served or self.recent
        return candidates[-1] if candidates else None


def _between(first_s: float | None, last_s: float | None) -> float | None:
    return None if first_s is None or last_s is None else last_s - first_s
