"""Publishes versions of a model, during training or from a finished run.

`nestrec publish`: a run that is not under way, as the newest version at an address.

A run's side of publishing: what has changed since the last version is copied after a step and written beside the
next ones.

A run that is started again goes on with deltas where the newest version at the address is that of the very step it
starts from; what changed since any other is not known any more, and a full version comes first. A version that could
not be written costs nothing but time: the next one holds what has changed since the last that was.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nestrec.artifacts.manifest import digest_of_plain
from nestrec.artifacts.storage import storage_of
from nestrec.artifacts.writer_group import BackgroundWorker, CheckpointGroup, CheckpointSaveError
from nestrec.base.config import config, to_plain
from nestrec.base.config_values import Count, from_plain
from nestrec.base.errors import CorruptFileError, UserError
from nestrec.exporters.servable_writer import restored_session
from nestrec.exporters.version_content import ModelDescription, RankVersionData, changes_of, everything_of, weights_of
from nestrec.exporters.version_writer import VersionInfo, VersionWriter, can_merge, merged, prune
from nestrec.serving.model.serving_spec import check_published
from nestrec.serving.versions.version_manifest import Parent, Times, VersionManifest
from nestrec.serving.versions.version_store import VersionStep, VersionStore
from nestrec.training.run_config import PublishConfig
from nestrec.training.run_folder import RunFolder
from nestrec.training.run_identity import Identity
from nestrec.training.training_session import Session, WindowEnd, on_first

_LOG = logging.getLogger(__name__)
_TIMES = {
    "first_event_s": "first_at_s",
    "mean_event_s": "mean_at_s",
    "last_event_s": "read_at_s",
    "closed_s": "closed_at_s",
}
"""what a version calls the times of a window's end"""


class Publisher:
    """Publishes the versions of one run. All ranks make the same calls in the same order."""

    def __init__(
        self,
        cfg: PublishConfig,
        session: Session,
        identity: Identity | None = None,
        step: int = 0,
        *,
        warn: Callable[[str], None] = _LOG.warning,
        tell: Callable[[str], None] = lambda _: None,
    ):
        """identity: of the run, on the first rank. step: from which it goes on. warn: told what went wrong and does not
        end the run. tell: called with a line per published version, on the first rank. Collective."""
        on_first(session.topology, lambda: check_published(session.cfg.task))
        self._cfg = cfg
        self._identity = identity
        self._warn = warn
        self._tell = tell
        self._versions = VersionStore(storage_of(cfg.address))
        self._peers = CheckpointGroup.of_topology(session.topology)
        self._writer = VersionWriter(self._versions.storage, self._peers)
        self._background = BackgroundWorker()
        self._described: tuple[object, ModelDescription] | None = None
        self._base: VersionStep | None = None
        """the version that the next one builds on; none where the next one is told in full"""
        self._newest: VersionStep | None = None
        self._base_described: ModelDescription | None = None
        """what that says beside what is learnt; none where it was said before this start"""
        self._compared: Mapping[str, torch.Tensor] = {}
        """this rank's rows of tables that are compared, as that version holds them"""
        self._chain: list[VersionStep] = []
        """the versions from the last full one to that"""
        self._number = 0
        self._seen: str | None = None
        """folder of the version that was the newest when this publisher last looked, on the first rank"""
        on_first(session.topology, lambda: self._find(step) if self._peers.is_first else None)
        self._agree_on_beginning()
        self._next_step = None if cfg.every_s is None else step + 1
        self._last = (step, time.monotonic())
        session.tables.hold_from(None if self._base is None else step)

    def is_due(self, step: int) -> bool:
        """Whether a version of this step is to be published."""
        every = self._cfg.every_steps
        return (every is not None and step % every == 0) or (self._next_step is not None and step >= self._next_step)

    def publish(self, session: Session, step: int, times: Times | None = None) -> None:
        """What has changed is copied, and written in the background. Nothing where this step is published already."""
        self._background.join()
        if self._base is not None and self._base.manifest.step == step:
            return
        self._look_for_others()
        session.tables.hold_from(None if self._base is None else self._base.manifest.step)
        now = self._describe(session, step)
        about = VersionInfo(
            number=self._number + 1,
            step=step,
            run=self._run_at(step),
            parent=None,
            tables=now.tables,
            times=replace(times or Times(), trained_s=time.time()),
            weights=weights_of(session),
            descriptions=self._changed_descriptions(now),
        )
        if self._base is None:
            # Rows are read as they are written, so the next step waits for it.
            self._attempt(lambda: self._write_everything(about, everything_of(session, now), now))
            session.tables.hold_from(None if self._base is None else step)
        else:
            base = self._base
            about = replace(about, parent=Parent(folder=base.folder, version=base.manifest.version))
            changes = changes_of(session, now, base.manifest, self._compared)
            owns_copy = session.topology.replica == 0
            self._background.start(
                lambda: self._attempt(lambda: self._write_changes(about, changes, now, owns_copy=owns_copy))
            )
        self._agree_on_next(step)

    def on_window(self, end: WindowEnd) -> None:
        """After a window of a run."""
        times = {name: getattr(end, at, None) for name, at in _TIMES.items()}
        self.publish(end.session, end.state.step, Times(**times))

    def close(self) -> None:
        """Wait until everything is written."""
        self._background.join()

    @property
    def newest(self) -> VersionStep | None:
        """The last version of this run that is at the address; after `close`."""
        return self._newest

    def _find(self, step: int) -> None:
        """The newest version, where this run can go on from it."""
        try:
            newest = self._versions.newest()
            if newest is None:
                return
            self._number = newest.number
            self._seen = newest.folder
            told = self._versions.told(newest.folder, newest.version)
            if told is not None and told.step == step and told.run == self._run_at(step):
                self._chain = self._versions.way_from_full((newest.folder, newest.version))
                self._base = VersionStep(newest.folder, told)
        except (CorruptFileError, OSError) as error:  # training does not wait for a store that is away
            self._warn(f"what was published before cannot be gone on from, so a full version follows: {error}")

    def _look_for_others(self) -> None:
        """Where another publisher has named a newer version, or taken ours away, servers have no way to what builds on
        ours: a full version follows, behind theirs. Collective."""
        found = self._peers.gather(self._others() if self._peers.is_first else None)[0]
        if found is not None:
            self._number, self._base, self._newest, self._chain = max(self._number, found), None, None, []

    def _others(self) -> int | None:
        """The number of the newest version where it is not that which this publisher knows; 0 where it is gone."""
        try:
            newest = self._versions.newest()
        except (CorruptFileError, OSError):
            return None  # the next version will name itself the newest
        folder = None if newest is None else newest.folder
        if folder in (self._seen, self._writer.last_folder):
            self._seen = folder
            return None
        known, self._seen = self._seen, folder
        what = "nothing any more" if newest is None else f"version {newest.folder} of another publisher"
        self._warn(
            f"{self._cfg.address} names {what} as the newest, where {known or 'nothing'} was: a full version follows. "
            "Give each run an address of its own: those who follow this one go to and fro between their models"
        )
        return 0 if newest is None else newest.number

    def _agree_on_beginning(self) -> None:
        told = [(at.folder, to_plain(at.manifest)) for at in ([self._base] if self._base else []) + self._chain]
        self._number, told = self._peers.gather((self._number, told))[0]
        steps = [VersionStep(folder, from_plain(VersionManifest, plain)) for folder, plain in told]
        if steps:
            self._base, *self._chain = steps
            self._newest = self._base

    def _describe(self, session: Session, step: int) -> ModelDescription:
        """Made anew where the dataset is another one: a catalogue is long."""
        if self._described is None or self._described[0] is not session.dataset:
            self._described = (session.dataset, ModelDescription.of(session, step))
        return self._described[1].at(step)

    def _changed_descriptions(self, now: ModelDescription) -> Any:
        old = None if self._base is None else self._base_described
        return now.since(old) if self._peers.is_first else ({}, {})

    def _attempt(self, write: Callable[[], None]) -> None:
        """What cannot be written is told, on all ranks alike; the run goes on."""
        try:
            write()
        except CheckpointSaveError as error:
            if self._peers.is_first:
                self._warn(f"{error.problem}; the next version will hold it as well")

    def _write_everything(self, about: VersionInfo, content: RankVersionData, now: ModelDescription) -> None:
        written = self._writer.write("full", about, content)
        self._base = self._newest = written
        self._base_described = now
        self._compared = content.compared
        self._number = about.number
        self._chain = [self._base]
        self._tell_of(written)
        self._prune()

    def _write_changes(
        self, about: VersionInfo, changes: RankVersionData, now: ModelDescription, *, owns_copy: bool
    ) -> None:
        written = self._writer.write("delta", about, changes)
        self._base = self._newest = written
        self._base_described = now
        self._compared = changes.compared
        self._number = about.number
        self._chain = [*self._chain, self._base]
        self._tell_of(written)
        if len(self._chain) > self._cfg.snapshot_every:
            self._write_full(about, now, changes.shard, owns_copy=owns_copy)
        self._prune()

    def _write_full(
        self, about: VersionInfo, now: ModelDescription, shard: tuple[int, int], *, owns_copy: bool
    ) -> None:
        """The last version once more, told in full, out of the files of those before it."""
        assert self._base is not None
        if not can_merge(self._chain, shard[1]):
            self._base = None  # other ranks wrote them: the next version is read from the tables
            return
        about = replace(about, descriptions=now.since(None) if self._peers.is_first else ({}, {}))
        content = merged(self._versions, self._chain, shard, owns_copy=owns_copy)
        try:
            written = self._writer.write_full(self._base, about, content)
        except CheckpointSaveError as error:
            if any(self._peers.gather(isinstance(error.__cause__, CorruptFileError))):
                self._base = None  # they were damaged: likewise
            raise
        self._chain = [written]

    def _tell_of(self, written: VersionStep) -> None:
        if self._peers.is_first:
            manifest = written.manifest
            size = f"{manifest.num_bytes / 1e6:.1f} MB"
            self._tell(f"published version {written.folder} of step {manifest.step} to {self._cfg.address}: {size}")

    def _prune(self) -> None:
        if not self._peers.is_first:
            return
        try:
            prune(self._versions, self._cfg.keep)
        except (OSError, CorruptFileError) as error:
            self._warn(f"old versions could not be deleted: {error}")

    def _run_at(self, step: int) -> str:
        """The same text for the same run on the same course up to a step; only the first rank's counts."""
        return "" if self._identity is None else digest_of_plain(self._identity.at(step).to_plain())[:16]

    def _agree_on_next(self, step: int) -> None:
        """The step of the next version, one value for all ranks."""
        if self._cfg.every_s is None:
            return
        (last_step, last_s) = self._last
        now_s = time.monotonic()
        step_s = max(1e-6, (now_s - last_s) / max(1, step - last_step))
        self._last = (step, now_s)
        self._next_step = self._peers.gather(step + max(1, round(self._cfg.every_s / step_s)))[0]


@config
class PublishRunConfig:
    keep: Count = PublishConfig().keep
    """newest versions that stay when one is added, and what they build on; a server can be pinned to any of them"""


def publish_run(run: Path, address: str, cfg: PublishRunConfig | None = None, *, best: bool = True) -> VersionStep:
    """The best (or last) weights of a run, in full, unless the newest version is that already."""
    problems: list[str] = []
    with restored_session(run, best=best) as (session, step):
        publisher = Publisher(
            PublishConfig(address=address, keep=(cfg or PublishRunConfig()).keep),
            session,
            RunFolder(run).identity(),
            step,
            warn=problems.append,
        )
        publisher.publish(session, step)
        publisher.close()
    if publisher.newest is None:
        remedy = "mend the cause, and publish again"
        raise UserError("; ".join(problems), option="ADDRESS", value=address, remedy=remedy)
    return publisher.newest


def open_publishing(
    cfg: PublishConfig,
    session: Session,
    identity: Identity | None,
    step: int,
    *,
    warn: Callable[[str], None],
    tell: Callable[[str], None],
) -> Publisher | None:
    """Returns the publisher of a run, or None if the run publishes nothing. Collective.

    Args:
        cfg: Where versions are published and how often.
        session: The run's session.
        identity: Identity of the run, on the first rank.
        step: Step from which the run continues.
        warn: Called with the text of each failure that does not end the run.
        tell: Called with one line for each published version.
    """
    return Publisher(cfg, session, identity, step, warn=warn, tell=tell) if cfg.address else None
