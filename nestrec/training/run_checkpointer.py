"""Checkpoints of a run: the latest ones, from which it resumes, and the one with the best validation score.

SIGTERM and SIGINT make a run save a checkpoint and stop (graceful shutdown); see `StopRequest`.
"""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

from nestrec.artifacts.storage import storage_of
from nestrec.base.config import dumps
from nestrec.base.config_values import from_plain
from nestrec.base.errors import CorruptFileError, UserError, require
from nestrec.checkpoint import IDENTITY, CheckpointGroup, CheckpointManager, LoadedCheckpoint
from nestrec.checkpoint.checkpoint_manifest import folder_of
from nestrec.checkpoint.mirror import corrupt_mirror_error, read_at
from nestrec.data.dataset_card import CARD_FILE, DatasetCard
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json
from nestrec.training.callbacks import TrainingCallback
from nestrec.training.run_config import RunConfig
from nestrec.training.run_folder import RunFolder
from nestrec.training.run_identity import (
    Identity,
    check_mirror_identity,
    check_restored,
    check_same_card,
    check_same_run,
    identity_of,
    is_from_other_run_options,
    read_json,
)
from nestrec.training.state import TrainState
from nestrec.training.training_session import Session, run_on_first_rank

T = TypeVar("T")
Take = Callable[[LoadedCheckpoint], object]
_LOG = logging.getLogger(__name__)


class RunWeights:
    """Finds and loads the best or last weights of a run; used by every command that needs the weights of a run.

    Checkpoints are read from the run folder; if it has none, they are downloaded from the mirror
    `training.checkpoint_mirror`. All ranks make the same calls in the same order.
    """

    def __init__(
        self,
        cfg: RunConfig,
        folder: RunFolder,
        topology: Topology,
        *,
        report: Callable[[str], None] = _LOG.warning,
        note: Callable[[str], None] = _LOG.info,
    ):
        self._cfg = cfg
        self._folder = folder
        self._topology = topology
        self._report = report
        self.best = CheckpointManager(
            folder.best,
            keep=1,
            peers=CheckpointGroup.of_topology(topology),
            report=report,
            address=self._address("best"),
        )
        self.last = CheckpointManager(
            folder.checkpoints,
            keep=cfg.training.max_checkpoints,
            max_deltas=cfg.training.incremental_checkpoints,
            peers=CheckpointGroup.of_topology(topology),
            report=report,
            note=note,
            address=self._address("checkpoints"),
            sibling=self.best,
        )
        self.identity = folder.identity()
        """Identity of the run from its folder; None if the folder is new. Only used on rank 0."""

    def restore(self, *, best: bool, take: Take | None = None) -> tuple[LoadedCheckpoint, bool]:
        """Load the weights with the best validation score, or the last ones.

        Args:
            best: Whether to load the best weights. If the run has none, because it was not validated or is trained
                online, the last weights are loaded.
            take: See `CheckpointManager.restore_latest`.

        Returns:
            The checkpoint, and whether it contains the best weights.

        Raises:
            CorruptFileError: If the best weights are lost or corrupt; they are never replaced by the last weights.
        """
        restored = self._restore_best(take) if best else None
        if restored is not None:
            return restored, True
        restored = self.restore_newest(self.last, take)
        if restored is None:
            problem = "the run does not have a checkpoint yet"
            raise UserError(problem, option="RUN", value=str(self._folder.path), remedy="train it first")
        return restored, False

    def restore_newest(self, checkpoints: CheckpointManager, take: Take | None = None) -> LoadedCheckpoint | None:
        """Load the newest complete checkpoint; return None if there is none."""
        run_on_first_rank(self._topology, lambda: self._check_before_fetched(checkpoints))
        return checkpoints.restore_latest(take)

    def check_mirror_data(self, data: Path, card: DatasetCard) -> None:
        """Raise a UserError if the mirrored run was trained on other data; only if the run folder has no card.

        Not collective.

        Args:
            data: Folder of the dataset.
            card: Card of the dataset.
        """
        address = self._cfg.training.checkpoint_mirror
        if not address or (self._folder.path / CARD_FILE).exists():
            return
        where = f"{address.rstrip('/')}/{CARD_FILE}"
        content = read_at(address, CARD_FILE)
        if content is not None:
            trained_on = read_json(lambda: content, where, partial(from_plain, DatasetCard))
            check_same_card(trained_on, where, data, card, or_later=True)

    def mirror_card(self, card: DatasetCard) -> None:
        """Upload the dataset card to the mirror, for runs that resume on another machine. Not collective."""
        address = self._cfg.training.checkpoint_mirror
        if not address:
            return
        try:
            storage_of(address).replace(CARD_FILE, dumps(card).encode())
        except Exception as error:  # fsspec file systems raise their own error classes
            self._report(f"cannot upload {CARD_FILE} to {address}: {type(error).__name__}: {error}")

    def ensure_best(self, step: int) -> bool:
        """Ensure that RUN/best contains the best weights, those after `step`.

        If they are missing, they are downloaded from the mirror or linked from the checkpoint of that step.

        Returns:
            Whether RUN/best contains the best weights.
        """
        if self._of_first(lambda: any(s >= step and self.best.state(s) is not None for s in self.best.steps())):
            return True
        for outdated in self._of_first(self.best.steps):
            self.best.quarantine(outdated)
        try:
            restored = self.restore_newest(self.best)
        except CorruptFileError as error:
            self._report(str(error))
            restored = None
        return (restored is not None and restored.step >= step) or self.best.adopt(self.last, step)

    def _restore_best(self, take: Take | None) -> LoadedCheckpoint | None:
        state = self._of_first(self.last.latest_state)
        train = None if state is None else TrainState.from_plain(state["train"])
        step = None if train is None else train.best_step
        if train is not None and (train.generation is not None or (step is None and not self.best.steps())):
            return None
        problem = f"the best weights of the run (step {step}) are lost"
        try:
            restored = self.restore_newest(self.best, take)
            if restored is None and step is None:
                return None
            if restored is not None and (step is None or restored.step >= step):
                return restored
        except CorruptFileError as error:
            problem = f"the best weights of the run are corrupt: {error}"
        if step is not None and step in self._of_first(self.last.steps):
            try:
                return self._restore_last_of(step, take)
            except CorruptFileError as error:
                self._report(str(error))
        raise CorruptFileError(
            problem,
            option="best",
            value=str(self._folder.best),
            remedy="use the last weights instead (--last); or move this folder away and resume training, which saves "
            "the best of the following epochs",
        )

    def _restore_last_of(self, step: int, take: Take | None) -> LoadedCheckpoint:
        """Load the last checkpoint that was saved together with the best weights, and so contains the same weights."""
        restored = self.last.restore(step)
        if take is not None:
            take(restored)
        return restored

    def _check_before_fetched(self, checkpoints: CheckpointManager) -> None:
        """Raise a UserError if the mirror has checkpoints of another run, before they are downloaded."""
        states = [] if checkpoints.steps() else [copy.state for copy in checkpoints.copies() if copy.state is not None]
        saved = identity_of(states[-1]) if states else None
        if saved is not None:
            current = Identity.of(self._cfg, self.identity or saved)
            check_mirror_identity(saved, current, self._cfg.training.checkpoint_mirror)

    def _of_first(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0 and return its result on all ranks."""
        result: T = all_gather_json(self._topology.control, run_on_first_rank(self._topology, action))[0]
        return result

    def _address(self, name: str) -> str:
        address = self._cfg.training.checkpoint_mirror
        return f"{address.rstrip('/')}/{name}" if address else ""


class RunCheckpointer:
    """Saves and restores the checkpoints of a session. All ranks make the same calls in the same order."""

    def __init__(self, session: Session, folder: RunFolder, callback: TrainingCallback):
        self._session = session
        self._cfg = session.cfg.training
        self._folder = folder
        self._callback = callback
        if self._cfg.checkpoint_mirror:
            _check_address(self._cfg.checkpoint_mirror, session.topology.world)
        self._weights = RunWeights(
            session.cfg, folder, session.topology, report=callback.on_warning, note=callback.on_message
        )
        self._best = self._weights.best
        self._last = self._weights.last
        self._is_best = False
        # Only used on rank 0, which writes the identity into checkpoints and checks it.
        self._identity = Identity.of(session.cfg, self._weights.identity)

    @property
    def identity(self) -> Identity:
        """Identity of the run; valid on rank 0 only."""
        return self._identity

    def save(self, state: TrainState) -> None:
        """Save a checkpoint of the session."""
        is_best, self._is_best = self._is_best, False
        self._wait()  # only one save at a time may read table rows
        self._save(state, None if is_best else self._last.next_base_step(), self._best if is_best else None)
        self._session.tables.set_base(state.step)

    def mark_best(self) -> None:
        """Mark the next saved checkpoint as the one with the best validation score."""
        self._is_best = True

    def restore_last_if_any(self) -> TrainState | None:
        """Restore the session from the last checkpoint; return None if there is none."""
        self._wait()
        data = self._session.dataset
        run_on_first_rank(self._session.topology, lambda: self._weights.check_mirror_data(data.folder, data.card))
        restored = self._weights.restore_newest(self._last, self._take)
        return None if restored is None else self._session.restore_dense(restored)

    def restore_or_start(self, begin: Callable[[], TrainState] = TrainState) -> TrainState:
        """Restore the session from the last checkpoint, or initialize it with `begin`.

        Raises:
            UserError: If a checkpoint in the folder or the mirror belongs to another run.
        """
        state = self.restore_last_if_any() or begin()
        topology = self._session.topology
        self._identity = self._identity.continued_at(state.step, self._session.cfg, topology.world)
        run_on_first_rank(topology, self._check_best)
        run_on_first_rank(topology, self._check_sent)
        return state

    def start(self, state: TrainState) -> TrainState:
        """Write the identity of the run, and quarantine best weights that no longer belong to it.

        Returns:
            The state; if the best weights are lost, without best score, so that the best of the following epochs is
            saved.
        """
        self._folder.write_identity(self._identity)
        topology = self._session.topology
        run_on_first_rank(topology, lambda: self._weights.mirror_card(self._session.dataset.card))
        steps = all_gather_json(topology.control, self._best_steps() if topology.is_first else None)[0]
        for step, is_foreign in steps:
            if is_foreign:
                self._best.quarantine(step)
        if steps and all(is_foreign for _, is_foreign in steps):
            # The weights of the best score are gone, so the next evaluation defines the best weights.
            return replace(state, best_score=None, best_step=None)
        if state.best_step is None or state.generation is not None or self._weights.ensure_best(state.best_step):
            return state
        text = f"the best weights (step {state.best_step}) are lost; the best of the following epochs is saved"
        self._folder.record("event", step=state.step, text=text)
        self._callback.on_warning(text)
        return replace(state, best_score=None, best_step=None)

    def _best_steps(self) -> list[tuple[int, bool]]:
        """Return the steps saved as best and whether they come from other run options; corrupt ones are skipped."""
        states = [(step, self._best.state(step)) for step in self._best.steps()]
        return [(s, is_from_other_run_options(identity_of(state), s, self._identity)) for s, state in states if state]

    def _check_best(self) -> None:
        for step in self._best.steps():
            saved = identity_of(self._best.state(step) or {})
            check_same_run(saved, self._identity, folder_of(self._folder.best, step))

    def _check_sent(self) -> None:
        """Raise a UserError if the mirror has checkpoints of another or an unknown run, which a save would replace."""
        mirrored = [(checkpoints, checkpoints.copies()) for checkpoints in (self._last, self._best)]
        readable = [copy.state for _, copies in mirrored for copy in copies if copy.state is not None]
        for saved in map(identity_of, readable):
            if saved is not None and saved.run != self._identity.run:
                raise UserError(
                    "contains checkpoints of another run, which this run would overwrite",
                    option="training.checkpoint_mirror",
                    value=self._cfg.checkpoint_mirror,
                    remedy="use a different mirror for each run; to resume from these checkpoints, train into an empty "
                    "folder (--output)",
                )
        damaged = {copy.step: copy.problem for _, copies in mirrored for copy in copies}
        are_ours = any(local.has_digest(copy.step, copy.digest) for local, copies in mirrored for copy in copies)
        if damaged and not readable and not are_ours:
            raise corrupt_mirror_error(self._cfg.checkpoint_mirror, damaged)

    def _take(self, restored: LoadedCheckpoint) -> None:
        run_on_first_rank(self._session.topology, lambda: self._check(restored))
        self._session.tables.load_rows(restored)

    def _check(self, restored: LoadedCheckpoint) -> None:
        saved = identity_of(restored.state)
        if saved is not None and self._weights.identity is None:
            # Checkpoints were copied into a new folder: the run keeps its identity.
            self._weights.identity = saved
            self._identity = Identity.of(self._session.cfg, saved)
        check_restored(restored, self._identity)
        if saved is not None:  # the run folder may already contain the option names of this release
            self._identity = replace(self._identity, stored=saved.stored)

    def restore_last(self) -> TrainState:
        """Restore the session from the last checkpoint.

        Raises:
            UserError: If the run has no checkpoint.
        """
        state = self.restore_last_if_any()
        if state is None:
            problem = "the run does not have a checkpoint yet"
            raise UserError(problem, option="RUN", value=str(self._folder.path), remedy="train it first")
        return state

    def restore_best(self) -> tuple[TrainState, bool]:
        """Restore the best weights, or the last ones if there are none; see `RunWeights.restore`."""
        self._wait()
        restored, is_best = self._weights.restore(best=True, take=self._take)
        return self._session.restore_dense(restored), is_best

    def close(self) -> None:
        """Wait until all checkpoints are written, and raise the error of a failed save."""
        self._wait()

    def _wait(self) -> None:
        self._last.wait()
        self._best.wait()

    def _save(self, state: TrainState, base: int | None, also: CheckpointManager | None) -> None:
        buffer_bytes = self._cfg.checkpoint_buffer_mib << 20 if self._cfg.checkpoint_async else None
        content = self._session.checkpoint_content(state, base, buffer_bytes=buffer_bytes)
        state_with_identity = {**content.state, IDENTITY: self._identity.at(state.step).to_plain()}
        content = replace(content, state=state_with_identity)
        if self._cfg.checkpoint_async:
            self._last.save_async(state.step, content, is_copied=True, link_to=also)
        else:
            self._last.save(state.step, content, link_to=also)


def _check_address(address: str, world: int) -> None:
    """Raise a UserError if the address cannot be a mirror; the storage is not accessed."""
    field, remedy = "training.checkpoint_mirror", "use storage that all ranks can access, for example s3://bucket/run"
    require(not address.endswith("://"), "the address has no path", option=field, value=address, remedy=remedy)
    if address.startswith("memory:") and world > 1:
        problem = "memory is local to each process, so no rank would have a complete checkpoint"
        raise UserError(problem, option=field, value=address, remedy=remedy)
    try:
        storage_of(address)
    except UserError as error:
        raise UserError(error.problem, option=field, value=address, remedy=error.remedy) from error


class RunInterruptedError(Exception):
    """Raised if a run was asked to stop by a signal, after its state was saved."""


class StopRequest:
    """Graceful shutdown: a flag set by SIGTERM or SIGINT and checked after each step.

    A second SIGINT raises KeyboardInterrupt immediately.
    """

    def __init__(self) -> None:
        self.is_set = False

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator["StopRequest"]:
        """Install the signal handlers inside the block; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_set = True
