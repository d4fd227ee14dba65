"""Publishes versions of a model, during training or from a finished run (`nestrec publish`).

During training, everything that has changed since the last version is copied after a step and written in the background
while training continues.

A resumed run continues with deltas if the newest version at the address belongs to the step from which the run resumes.
Changes since any other step are unknown, so that a full version is published first. If a version cannot be written, the
run continues, and the next version contains all changes since the last version that was written.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nestrec.artifacts.storage import storage_of
from nestrec.artifacts.writer_group import BackgroundWorker, CheckpointGroup, CheckpointSaveError
from nestrec.base.config import config, to_plain
from nestrec.base.config_values import Count, from_plain
from nestrec.base.errors import CorruptFileError, UserError
from nestrec.exporters.servable_writer import restored_session
from nestrec.exporters.version_content import (
    ModelDescription,
    RankVersionData,
    copy_dense_weights,
    delta_content,
    full_content,
)
from nestrec.exporters.version_writer import VersionInfo, VersionWriter, can_merge, merge_chain, prune
from nestrec.serving.model.serving_spec import check_publishable
from nestrec.serving.versions.version_manifest import Parent, Times, VersionManifest
from nestrec.serving.versions.version_store import VersionStep, VersionStore
from nestrec.training.run_config import PublishConfig
from nestrec.training.run_folder import RunFolder
from nestrec.training.run_identity import Identity
from nestrec.training.training_session import Session, WindowEnd, run_on_first_rank

_LOG = logging.getLogger(__name__)
_WINDOW_TIMES = {
    "first_event_s": "first_at_s",
    "mean_event_s": "mean_at_s",
    "last_event_s": "read_at_s",
    "closed_s": "closed_at_s",
}
"""Names of the times in a version manifest, and of the corresponding attributes of `WindowEnd`."""


class Publisher:
    """Publishes the versions of one run. Collective: every rank must make the same calls in the same order.

    Args:
        cfg: Where versions are published and how often.
        session: The run's session.
        identity: Identity of the run, on the first rank.
        step: Step from which the run continues.
        warn: Called with the text of each failure that does not end the run.
        note: Called on the first rank with one line for each published version.
    """

    def __init__(
        self,
        cfg: PublishConfig,
        session: Session,
        identity: Identity | None = None,
        step: int = 0,
        *,
        warn: Callable[[str], None] = _LOG.warning,
        note: Callable[[str], None] = lambda _: None,
    ):

        run_on_first_rank(session.topology, lambda: check_publishable(session.cfg.task))
        self._cfg = cfg
        self._identity = identity
        self._warn = warn
        self._note = note
        self._versions = VersionStore(storage_of(cfg.address))
        self._peers = CheckpointGroup.of_topology(session.topology)
        self._writer = VersionWriter(self._versions.storage, self._peers)
        self._background = BackgroundWorker()
        self._cached_description: tuple[object, ModelDescription] | None = None
        self._base: VersionStep | None = None
        """Version that the next delta builds on; None if the next version is a full one."""
        self._newest: VersionStep | None = None
        self._base_description: ModelDescription | None = None
        """Description of the base version; None if an earlier process wrote it."""
        self._derived_rows: Mapping[str, torch.Tensor] = {}
        """This rank's derived rows by table, as in the base version."""
        self._chain: list[VersionStep] = []
        """Delta chain: the versions from the last full one to the base."""
        self._number = 0
        self._newest_seen: str | None = None
        """Folder of the newest version when this publisher last checked, on the first rank."""
        run_on_first_rank(session.topology, lambda: self._find_base(step) if self._peers.is_first else None)
        self._share_start()
        self._next_step = None if cfg.every_s is None else step + 1
        self._last = (step, time.monotonic())
        session.tables.retain_evictions_from(None if self._base is None else step)

    def is_due(self, step: int) -> bool:
        """Return whether a version must be published after this step."""
        every = self._cfg.every_steps
        return (every is not None and step % every == 0) or (self._next_step is not None and step >= self._next_step)

    def publish(self, session: Session, step: int, times: Times | None = None) -> None:
        """Copy all changes since the last version and write them in the background.

        The first version is full and is written before this method returns. Does nothing if this step is already
        published.

        Args:
            session: Session of the run, after the step.
            step: Number of training steps done.
            times: Event and window times, for freshness metrics.
        """
        self._background.join()
        if self._base is not None and self._base.manifest.step == step:
            return
        self._check_other_publishers()
        session.tables.retain_evictions_from(None if self._base is None else self._base.manifest.step)
        description = self._description(session, step)
        info = VersionInfo(
            number=self._number + 1,
            step=step,
            run=self._run_digests(step)[0],
            parent=None,
            tables=description.tables,
            times=replace(times or Times(), trained_s=time.time()),
            weights=copy_dense_weights(session),
            descriptions=self._changed_descriptions(description),
        )
        if self._base is None:
            # Rows are read while they are written, so this must finish before the next training step.
            self._try_write(lambda: self._write_first_full(info, full_content(session, description), description))
            session.tables.retain_evictions_from(None if self._base is None else step)
        else:
            base = self._base
            info = replace(info, parent=Parent(folder=base.folder, version=base.manifest.version))
            changes = delta_content(session, description, base.manifest, self._derived_rows)
            owns_copy = session.topology.replica == 0
            self._background.start(
                lambda: self._try_write(lambda: self._write_delta(info, changes, description, owns_copy=owns_copy))
            )
        self._schedule_next(step)

    def on_window(self, end: WindowEnd) -> None:
        """Publish a version at the end of a training window."""
        times = {name: getattr(end, at, None) for name, at in _WINDOW_TIMES.items()}
        self.publish(end.session, end.state.step, Times(**times))

    def close(self) -> None:
        """Wait for the background write to finish."""
        self._background.join()

    @property
    def newest(self) -> VersionStep | None:
        """Last version that this run has published; valid after `close`."""
        return self._newest

    def _find_base(self, step: int) -> None:
        """Set the base to the newest version if it belongs to the step from which this run resumes."""
        try:
            newest = self._versions.newest()
            if newest is None:
                return
            self._number = newest.number
            self._newest_seen = newest.folder
            manifest = self._versions.read_description(newest.folder, newest.version)
            if manifest is not None and manifest.step == step and manifest.run in self._run_digests(step):
                self._chain = self._versions.chain_from_full((newest.folder, newest.version))
                self._base = VersionStep(newest.folder, manifest)
        except (CorruptFileError, OSError) as error:  # training must start even if the storage is unavailable
            self._warn(f"cannot continue from the published versions, the next version will be a full one: {error}")

    def _check_other_publishers(self) -> None:
        """Switch to a full version if another publisher has published to the address or deleted our versions.

        Servers that follow the address cannot apply a delta that builds on our last version any more. Collective.
        """
        number = self._peers.gather(self._newest_of_others() if self._peers.is_first else None)[0]
        if number is not None:
            self._number, self._base, self._newest, self._chain = max(self._number, number), None, None, []

    def _newest_of_others(self) -> int | None:
        """Return the number of the newest version if another publisher wrote it, 0 if it was deleted, or else None."""
        try:
            newest = self._versions.newest()
        except (CorruptFileError, OSError):
            return None  # the next version overwrites the pointer to the newest one
        folder = None if newest is None else newest.folder
        if folder in (self._newest_seen, self._writer.last_folder):
            self._newest_seen = folder
            return None
        known, self._newest_seen = self._newest_seen, folder
        what = "no version" if newest is None else f"version {newest.folder} of another publisher"
        self._warn(
            f"the newest version at {self._cfg.address} is {what}, expected {known or 'no version'}; the next version "
            "will be a full one. Use a separate address per run: servers that follow this one alternate between models"
        )
        return 0 if newest is None else newest.number

    def _share_start(self) -> None:
        manifests = [(v.folder, to_plain(v.manifest)) for v in ([self._base] if self._base else []) + self._chain]
        self._number, manifests = self._peers.gather((self._number, manifests))[0]
        steps = [VersionStep(folder, from_plain(VersionManifest, plain)) for folder, plain in manifests]
        if steps:
            self._base, *self._chain = steps
            self._newest = self._base

    def _description(self, session: Session, step: int) -> ModelDescription:
        """Return the description of the model; it is cached per dataset, because a catalog can be large."""
        if self._cached_description is None or self._cached_description[0] is not session.dataset:
            self._cached_description = (session.dataset, ModelDescription.of(session, step))
        return self._cached_description[1].at_step(step)

    def _changed_descriptions(self, description: ModelDescription) -> Any:
        old = None if self._base is None else self._base_description
        return description.diff_since(old) if self._peers.is_first else ({}, {})

    def _try_write(self, write: Callable[[], None]) -> None:
        """Call `write`; if it fails, which it does on all ranks alike, warn and let the run continue."""
        try:
            write()
        except CheckpointSaveError as error:
            if self._peers.is_first:
                self._warn(f"{error.problem}; the next version will include its changes")

    def _write_first_full(self, info: VersionInfo, content: RankVersionData, description: ModelDescription) -> None:
        written = self._writer.write("full", info, content)
        self._base = self._newest = written
        self._base_description = description
        self._derived_rows = content.derived_rows
        self._number = info.number
        self._chain = [self._base]
        self._log_version(written)
        self._prune()

    def _write_delta(
        self, info: VersionInfo, changes: RankVersionData, description: ModelDescription, *, owns_copy: bool
    ) -> None:
        written = self._writer.write("delta", info, changes)
        self._base = self._newest = written
        self._base_description = description
        self._derived_rows = changes.derived_rows
        self._number = info.number
        self._chain = [*self._chain, self._base]
        self._log_version(written)
        if len(self._chain) > self._cfg.full_every_versions:
            self._rewrite_as_full(info, description, changes.shard, owns_copy=owns_copy)
        self._prune()

    def _rewrite_as_full(
        self, info: VersionInfo, description: ModelDescription, shard: tuple[int, int], *, owns_copy: bool
    ) -> None:
        """Rewrite the last version as a full one by merging the files of its delta chain."""
        assert self._base is not None
        if not can_merge(self._chain, shard[1]):
            self._base = None  # written with other shards: the next version is full and read from the tables
            return
        info = replace(info, descriptions=description.diff_since(None) if self._peers.is_first else ({}, {}))
        content = merge_chain(self._versions, self._chain, shard, owns_copy=owns_copy)
        try:
            written = self._writer.write_full(self._base, info, content)
        except CheckpointSaveError as error:
            if any(self._peers.gather(isinstance(error.__cause__, CorruptFileError))):
                self._base = None  # files of the chain are corrupt: the next version is full, too
            raise
        self._chain = [written]

    def _log_version(self, written: VersionStep) -> None:
        if self._peers.is_first:
            manifest = written.manifest
            size = f"{manifest.num_bytes / 1e6:.1f} MB"
            self._note(f"published version {written.folder} of step {manifest.step} to {self._cfg.address}: {size}")

    def _prune(self) -> None:
        if not self._peers.is_first:
            return
        try:
            prune(self._versions, self._cfg.max_versions)
        except (OSError, CorruptFileError) as error:
            self._warn(f"old versions could not be deleted: {error}")

    def _run_digests(self, step: int) -> list[str]:
        """Return the digests of the run's identity up to a step, the present one first; used on the first rank only."""
        return [""] if self._identity is None else self._identity.digests_at(step)

    def _schedule_next(self, step: int) -> None:
        """Estimate the step at which `every_s` will have passed; the first rank decides for all ranks."""
        if self._cfg.every_s is None:
            return
        (last_step, last_s) = self._last
        now_s = time.monotonic()
        step_s = max(1e-6, (now_s - last_s) / max(1, step - last_step))
        self._last = (step, now_s)
        self._next_step = self._peers.gather(step + max(1, round(self._cfg.every_s / step_s)))[0]


@config
class PublishRunConfig:
    """Options of `nestrec publish`."""

    max_versions: Count = PublishConfig().max_versions
    """Number of versions to retain when one is added, in addition to those they build on; a server can be pinned to any
    of them."""


def publish_run(run: Path, address: str, cfg: PublishRunConfig | None = None, *, best: bool = True) -> VersionStep:
    """Publish the best (or last) weights of a run as a full version, unless the newest version already contains them.

    Args:
        run: Folder of the run.
        address: Folder or fsspec URL to publish to.
        cfg: Retention options.
        best: Publish the weights with the best validation score instead of the last ones.

    Returns:
        The newest version at the address.

    Raises:
        UserError: The version could not be written.
    """
    problems: list[str] = []
    with restored_session(run, best=best) as (session, step):
        publisher = Publisher(
            PublishConfig(address=address, max_versions=(cfg or PublishRunConfig()).max_versions),
            session,
            RunFolder(run).identity(),
            step,
            warn=problems.append,
        )
        publisher.publish(session, step)
        publisher.close()
    if publisher.newest is None:
        remedy = "fix the cause and publish again"
        raise UserError("; ".join(problems), option="ADDRESS", value=address, remedy=remedy)
    return publisher.newest


def open_publishing(
    cfg: PublishConfig,
    session: Session,
    identity: Identity | None,
    step: int,
    *,
    warn: Callable[[str], None],
    note: Callable[[str], None],
) -> Publisher | None:
    """Return the publisher of a run, or None if the run publishes nothing. Collective.

    Args:
        cfg: Where versions are published and how often.
        session: The run's session.
        identity: Identity of the run, on the first rank.
        step: Step from which the run continues.
        warn: Called with the text of each failure that does not end the run.
        note: Called with one line for each published version.
    """
    return Publisher(cfg, session, identity, step, warn=warn, note=note) if cfg.address else None
