"""A server's side of following: what is new at an address is fetched, verified and brought into service.

A delta is copied into the tables in service between two batches, where it is small; the model is loaded beside the old
one, and swapped for it, where it is not, or where deltas do not lead there. Whatever is missing or damaged leaves the
version in service as it is, and is tried again with the next look: the next full version heals it.
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
_LONGEST_PAUSE_S = 30.0
_CLOSE_S = 2.0

At = tuple[str, str]
"""(folder, version)"""


@config
class VersionFollowConfig:
    on: bool = False
    """models of an address go on to its newer versions"""
    poll_s: Positive = 1.0
    """how often a server looks for a newer version"""
    moves: Literal["itself", "together", "told"] = "itself"
    """each server goes to a newer version by itself; all instances of a front go together, or none; or when they are
    told to (`nestrec swap SERVER ADDRESS`)"""
    read_timeout_s: Positive = READ_TIMEOUT_S
    """seconds after which a file that is not read yet counts as away, since its storage may never answer"""
    most_bytes: Natural = 1 << 30
    """rows of a delta that are brought beside the tables at once; what is larger is loaded as a whole"""


@dataclass(slots=True)
class FollowCounts:
    """What came of it so far."""

    applied: int = 0
    """deltas that were copied into the model in service"""
    loaded: int = 0
    """versions that were loaded beside it, in full"""
    failures: dict[str, int] = field(default_factory=dict)
    """looks that left the version as it was although there is another, by reason: damaged, away, refused"""
    behind: int = 0
    """versions that are newer than the one in service"""
    problem: str = ""
    """why it is behind; empty where it is not"""


class VersionFollower:
    """Moves one model of a service. Thread safe."""

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
        """followed: the version in service. source: where from, and whether one version of it is to stay."""
        self._service = service
        self._role = role
        self._followed = followed
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
        return self._followed.step.folder

    @property
    def digest(self) -> str:
        """Digest of the version in service."""
        return self._followed.step.manifest.version

    @property
    def number(self) -> int:
        """Of the version in service."""
        return self._followed.step.manifest.number

    def start(self) -> None:
        """Look for newer versions from now on, on a thread of its own."""
        self._thread = threading.Thread(target=self._loop, name=f"nestrec-follow-{self._role}", daemon=True)
        self._thread.start()

    def rehearse(self) -> None:
        """Go to the version in service, so that the first newer one finds all that it needs loaded."""
        with self._lock:
            self._service.advance(self._role, self._followed.servable, self._followed.rehearse)

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """Nothing is looked for and taken while the block lasts; a look that is under way is finished before."""
        with self._lock:
            yield

    def end(self) -> None:
        """No further look."""
        self._is_closed.set()

    def close(self) -> None:
        """End looking for newer versions. A look that does not finish soon is left to its daemon thread, since the
        storage that it reads from may never answer."""
        self.end()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def look(self) -> bool:
        """Go to the newest version where there is a newer one, unless one is to stay; whether it is there now. Nothing
        is raised: the version in service stays where that fails."""
        with self._lock:
            if self.source.version is not None or self._is_closed.is_set():
                return True
            try:
                newest = self._versions.newest()
                if newest is None:  # it was there when the version in service was
                    raise OSError(f"{self.source.address} names no version any more: it was emptied, or is elsewhere")
                self.counts.behind = max(0, newest.number - self.number)
                self._go((newest.folder, newest.version), is_asked=False)
            except Exception as error:
                self._failed(error)
                return False
            self.counts.behind = 0
            self.counts.problem = ""
            return True

    def move(self, version: str | None) -> None:
        """Go to the version that `VersionStore.find` finds, which then stays; none: to the newest, and on from there.
        An error leaves all as it is."""
        with self._lock:
            found = self._versions.find(version) if version is not None else self._newest()
            self._go(found, is_asked=True)
            self.source = self.source.at(None if version is None else found[0])

    def _newest(self) -> At:
        newest = self._versions.newest()
        if newest is None:
            remedy = f"its {NEWEST_FILE} is missing: publish a version, or name one as ADDRESS@VERSION"
            raise UserError("names no version", option="address", value=self.source.address, remedy=remedy)
        return newest.folder, newest.version

    def _go(self, target: At, *, is_asked: bool) -> None:
        if target[1] == self.digest:
            return
        try:
            for step in self._versions.way(target, self.digest):
                self._apply(step)
            return
        except (CorruptFileError, FileNotFoundError, TableFullError, _TooLargeError) as error:
            way = self._versions.way_from_full(target)
            # A full version from before this one would lead the same way, unless all was deleted and published anew.
            is_ahead = way[0].manifest.number > self.number or self._versions.is_gone(self._followed.step.folder)
            if not (is_ahead or is_asked or isinstance(error, TableFullError | _TooLargeError)):
                raise
        self._load(way)

    def _apply(self, step: VersionStep) -> None:
        """One delta, between two batches."""
        staged = self.stage(step)
        if staged.num_bytes > self._cfg.most_bytes:
            raise _TooLargeError
        fetched_s = time.time()
        fail_point("follow.before_apply")
        self._end_freshness()
        self._service.advance(self._role, staged.after.servable, staged.apply)
        fail_point("follow.after_apply")
        self._in_service(staged, fetched_s)
        self.counts.applied += 1

    def stage(self, step: VersionStep) -> StagedVersion:
        """The version after the one in service, verified and beside it."""
        with self._beside():
            return self._followed.staged(self._versions, step)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """What this thread brings to the device goes past the batches: on the stream that they run on, they would wait
        for it. All of it is there at the end, before another thread reads it."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _in_service(self, staged: StagedVersion, fetched_s: float) -> None:
        self._followed = staged.after
        self.freshness.began(staged.after.step.manifest, fetched_s=fetched_s, applied_s=time.time())
        self._log_version("changed rows were copied")

    def _load(self, way: list[VersionStep]) -> None:
        """The last version of a way, beside the one in service."""
        with self._beside():
            fresh = LiveModelVersion.open(self._versions, way, self._device, self._tables, self._scratch)
        fetched_s = time.time()
        fail_point("follow.before_swap")
        self._end_freshness()
        self._service.swap(fresh.servable)
        self._followed = fresh
        self.freshness.began(fresh.step.manifest, fetched_s=fetched_s, applied_s=time.time())
        self.counts.loaded += 1
        self._log_version("loaded in full")

    def _log_version(self, how: str) -> None:
        now = self._followed.step
        _LOG.info("the %s model serves version %s of step %d now: %s", self._role, now.folder, now.manifest.step, how)

    def _end_freshness(self) -> None:
        """What is known of the version in service before another takes its place."""
        answered = [engine.answered_s for engine in self._service.fleet(self._role).engines]
        self.freshness.answered(min((at_s for at_s in answered if at_s is not None), default=None))

    def told_freshness(self) -> FreshnessTracker:
        """With the first answer of the version in service, where there was one."""
        self._end_freshness()
        return self.freshness

    def _failed(self, error: Exception) -> None:
        reason = "damaged" if isinstance(error, CorruptFileError | FileNotFoundError) else "refused"
        reason = "away" if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) else reason
        self.counts.failures[reason] = self.counts.failures.get(reason, 0) + 1
        problem = str(error) or type(error).__name__
        if problem != self.counts.problem:  # said once
            is_told = isinstance(error, UserError | OSError)
            text = "the %s model stays at version %s: %s"
            _LOG.error(text, self._role, self.version, problem, exc_info=None if is_told else error)
        self.counts.problem = problem

    def _loop(self) -> None:
        pause_s = self._cfg.poll_s
        while not self._is_closed.wait(pause_s):
            pause_s = self._cfg.poll_s if self.look() else min(max(_LONGEST_PAUSE_S, self._cfg.poll_s), 2 * pause_s)


class _TooLargeError(Exception):
    """A delta that is not worth staging."""
