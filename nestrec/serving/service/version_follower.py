"""Following of published versions: polls an address for newer versions, verifies them and brings them into service.

A small delta is copied into the tables in service between two batches. If the delta is too large, or no chain of deltas
leads to the new version, the new model is loaded in full while the old one serves, and then swapped in. If files are
missing or corrupt, the version in service stays, and the follower tries again at the next poll; at the latest the next
full version can be loaded.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from nestrec.base.config import config
from nestrec.base.config_values import Natural, Positive
from nestrec.base.cuda import side_stream
from nestrec.base.errors import CorruptFileError, UserError
from nestrec.base.failpoints import fail_point
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.service.inference_service import Service
from nestrec.serving.versions.live_version import LiveModelVersion, ModelAddress, StagedVersion, TableFullError
from nestrec.serving.versions.version_manifest import NEWEST_FILE, FreshnessTracker
from nestrec.serving.versions.version_store import READ_TIMEOUT_S, VersionStep, VersionStore

_LOG = logging.getLogger(__name__)
_MAX_BACKOFF_S = 30.0
_CLOSE_TIMEOUT_S = 2.0

At = tuple[str, str]
"""Folder and digest of a version."""


@config
class VersionFollowConfig:
    enabled: bool = False
    """Follow newer versions of models that are loaded from an address of published versions; `--follow` is short for
    `--follow.enabled true`."""
    poll_interval_s: Positive = 1.0
    """Interval in seconds at which a server polls for a newer version."""
    mode: Literal["independent", "coordinated", "manual"] = "independent"
    """When servers switch to a newer version: `independent` (each server as soon as it finds it), `coordinated` (all
    instances of a gateway, or none), or `manual` (by `nestrec swap SERVER ADDRESS`)."""
    read_timeout_s: Positive = READ_TIMEOUT_S
    """Timeout in seconds for reading a file; the storage then counts as unavailable."""
    max_delta_bytes: Natural = 1 << 30
    """Maximum size in bytes of the rows of a delta that is staged next to the tables; with a larger delta, the model is
    loaded in full."""


@dataclass(slots=True)
class FollowCounts:
    """Counters and state of a follower."""

    applied: int = 0
    """Number of deltas that were applied to the model in service."""
    loaded: int = 0
    """Number of versions that were loaded in full and swapped in."""
    failures: dict[str, int] = field(default_factory=dict)
    """Number of failed polls by reason: corrupt (corrupt or missing files), unavailable (storage not reachable), or
    rejected (the version cannot be served)."""
    versions_behind: int = 0
    """Number of versions that are newer than the one in service, also while a version is pinned."""
    problem: str = ""
    """Error of the last poll; empty if the newest version is in service."""


class VersionFollower:
    """Moves one model of a service to newer versions. Thread-safe."""

    def __init__(
        self,
        service: Service,
        role: str,
        followed: LiveModelVersion,
        source: ModelAddress,
        cfg: VersionFollowConfig,
        *,
        device: torch.device | str = "cpu",
        tables: TablesConfig | None = None,
        scratch: Path | None = None,
    ):
        """Create a follower; `start` starts polling.

        Args:
            service: The service whose model is updated.
            role: Role of the model.
            followed: The version in service.
            source: Address of the versions; if it names a version, the follower stays at it.
            cfg: Options of following.
            device: Device of the model.
            tables: Options of the embedding tables.
            scratch: Folder for memory-mapped tables; None keeps all tables in memory.
        """
        self._service = service
        self._role = role
        self._live = followed
        self.source = source
        self._cfg = cfg
        self._device = device
        self._tables = tables
        self._scratch = scratch
        self._versions = VersionStore(source.storage, cfg.read_timeout_s)
        self.counts = FollowCounts()
        self.freshness = FreshnessTracker()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._stream = side_stream(torch.device(device))

    @property
    def version(self) -> str:
        """Name of the version in service."""
        return self._live.step.folder

    @property
    def digest(self) -> str:
        """Digest of the version in service."""
        return self._live.step.manifest.version

    @property
    def version_number(self) -> int:
        """Number of the version in service; versions count from 1."""
        return self._live.step.manifest.number

    def start(self) -> None:
        """Poll for newer versions on a background thread."""
        self._thread = threading.Thread(target=self._loop, name=f"nestrec-follow-{self._role}", daemon=True)
        self._thread.start()

    def warm_up(self) -> None:
        """Apply the version in service to itself, so that the first delta does not wait for lazily loaded kernels."""
        with self._lock:
            self._service.apply_version(self._role, self._live.servable, self._live.warm_up)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause polling during the block; a poll in progress is completed first."""
        with self._lock:
            yield

    def stop(self) -> None:
        """Start no further polls."""
        self._is_closed.set()

    def close(self) -> None:
        """Stop polling. A poll that does not finish soon is abandoned on its daemon thread, because storage may never
        respond."""
        self.stop()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def poll(self) -> bool:
        """Move to the newest version; if the follower is pinned to a version, only count the newer versions.

        Errors are logged and counted; the version in service then stays.

        Returns:
            Whether the follower is now at its target version.
        """
        with self._lock:
            if self._is_closed.is_set():
                return True
            try:
                newest = self._versions.newest()
                if newest is None:  # the version in service was loaded from there, so there was one
                    raise OSError(
                        f"{self.source.address} contains no versions any more: it was deleted, or is not mounted"
                    )
                self.counts.versions_behind = max(0, newest.number - self.version_number)
                if self.source.version is None:
                    self._move((newest.folder, newest.version), is_explicit=False)
                    self.counts.versions_behind = 0
            except Exception as error:
                self._record_failure(error)
                return False
            self.counts.problem = ""
            return True

    def move_to(self, version: str | None) -> None:
        """Move to a version; if that fails, the version in service and the follower stay unchanged.

        Args:
            version: Name, number or prefix of a version (see `VersionStore.find`), to which the follower is then
                pinned; None moves to the newest version and follows newer ones.

        Raises:
            UserError: No version, or more than one, matches.
            CorruptFileError: The version cannot be read.
        """
        with self._lock:
            target = self._versions.find(version) if version is not None else self._newest()
            self._move(target, is_explicit=True)
            self.source = self.source.at(None if version is None else target[0])
            if version is None:
                self.counts.versions_behind = 0

    def _newest(self) -> At:
        newest = self._versions.newest()
        if newest is None:
            remedy = f"its {NEWEST_FILE} is missing: publish a version, or name one as ADDRESS@VERSION"
            raise UserError(
                "the address contains no versions", option="address", value=self.source.address, remedy=remedy
            )
        return newest.folder, newest.version

    def _move(self, target: At, *, is_explicit: bool) -> None:
        if target[1] == self.digest:
            return
        try:
            for step in self._versions.delta_chain(target, self.digest):
                self._apply(step)
            return
        except (CorruptFileError, FileNotFoundError, TableFullError, _TooLargeError) as error:
            chain = self._versions.chain_from_full(target)
            # A full version before the one in service leads through the same broken delta, unless the address was
            # emptied and published again.
            is_ahead = chain[0].manifest.number > self.version_number or self._versions.is_removed(
                self._live.step.folder
            )
            if not (is_ahead or is_explicit or isinstance(error, TableFullError | _TooLargeError)):
                raise
        self._load(chain)

    def _apply(self, step: VersionStep) -> None:
        """Apply one delta between two batches."""
        staged = self.stage(step)
        if staged.num_bytes > self._cfg.max_delta_bytes:
            raise _TooLargeError
        fetched_s = time.time()
        fail_point("follow.before_apply")
        self._record_first_response()
        self._service.apply_version(self._role, staged.after.servable, staged.apply)
        fail_point("follow.after_apply")
        self._record_applied(staged, fetched_s)
        self.counts.applied += 1

    def stage(self, step: VersionStep) -> StagedVersion:
        """Fetch and verify a delta of the version in service, and copy its rows to the device, without applying it."""
        with self._side_stream():
            return self._live.stage(self._versions, step)

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Run host-to-device copies on a separate CUDA stream, so that batches do not wait for them. The copies are
        complete at the end of the block, before another thread reads them."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _record_applied(self, staged: StagedVersion, fetched_s: float) -> None:
        self._live = staged.after
        self.freshness.record_applied(staged.after.step.manifest, fetched_s=fetched_s, applied_s=time.time())
        self._log_version("applied a delta")

    def _load(self, chain: list[VersionStep]) -> None:
        """Load the last version of a chain in full while the old one serves, and swap it in."""
        with self._side_stream():
            new = LiveModelVersion.open(self._versions, chain, self._device, self._tables, self._scratch)
        fetched_s = time.time()
        fail_point("follow.before_swap")
        self._record_first_response()
        self._service.swap(new.servable)
        self._live = new
        self.freshness.record_applied(new.step.manifest, fetched_s=fetched_s, applied_s=time.time())
        self.counts.loaded += 1
        self._log_version("loaded in full")

    def _log_version(self, how: str) -> None:
        step = self._live.step
        _LOG.info("%s model: now serving version %s of step %d: %s", self._role, step.folder, step.manifest.step, how)

    def _record_first_response(self) -> None:
        """Record when the version in service sent its first response; called before another version replaces it."""
        times = [engine.first_response_s for engine in self._service.deployment(self._role).engines]
        self.freshness.record_response(min((at_s for at_s in times if at_s is not None), default=None))

    def current_freshness(self) -> FreshnessTracker:
        """Return the freshness, including the first response of the version in service if there was one."""
        self._record_first_response()
        return self.freshness

    def _record_failure(self, error: Exception) -> None:
        reason = "corrupt" if isinstance(error, CorruptFileError | FileNotFoundError) else "rejected"
        reason = "unavailable" if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) else reason
        self.counts.failures[reason] = self.counts.failures.get(reason, 0) + 1
        problem = str(error) or type(error).__name__
        if problem != self.counts.problem:  # log repeated failures once
            is_expected = isinstance(error, UserError | OSError)
            text = "%s model: staying at version %s: %s"
            _LOG.error(text, self._role, self.version, problem, exc_info=None if is_expected else error)
        self.counts.problem = problem

    def _loop(self) -> None:
        pause_s = self._cfg.poll_interval_s
        while not self._is_closed.wait(pause_s):
            pause_s = (
                self._cfg.poll_interval_s
                if self.poll()
                else min(max(_MAX_BACKOFF_S, self._cfg.poll_interval_s), 2 * pause_s)
            )


class _TooLargeError(Exception):
    """A delta is larger than `max_delta_bytes`."""
