"""The checkpoints of a run: the last ones, to go on from, and the one with the best validation score.

SIGTERM and SIGINT ask a run to save and end.
"""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TypeVar

from nestrec.artifacts.storage import storage_of
from nestrec.base.config import dumps
from nestrec.base.config_values import from_plain
from nestrec.base.errors import CorruptFileError, UserError, require
from nestrec.checkpoint import IDENTITY, CheckpointGroup, CheckpointManager, LoadedCheckpoint
from nestrec.checkpoint.checkpoint_manifest import folder_of
from nestrec.checkpoint.mirror import damaged_elsewhere, read_at
from nestrec.data.dataset_card import CARD_FILE, DatasetCard
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json
from nestrec.training.callbacks import TrainingCallback
from nestrec.training.run_config import RunConfig
from nestrec.training.run_folder import RunFolder
from nestrec.training.run_identity import (
    Identity,
    check_kept_elsewhere,
    check_restored,
    check_same_run,
    identity_of,
    is_of_another_course,
    read_json,
    refuse_other_data,
)
from nestrec.training.state import TrainState
from nestrec.training.training_session import Session, on_first

T = TypeVar("T")
Take = Callable[[LoadedCheckpoint], object]
_LOG = logging.getLogger(__name__)


class RunWeights:
    """The checkpoints of a run, and the answer to which of them holds its best weights.

    Every command that uses the weights of a run asks here. They are read from the run folder; if that has none, they
    are fetched into it from `training.checkpoint_address`. All ranks make the same calls in the same order.
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
            keep=cfg.training.keep_checkpoints,
            max_deltas=cfg.training.incremental_saves,
            peers=CheckpointGroup.of_topology(topology),
            report=report,
            note=note,
            address=self._address("checkpoints"),
            beside=self.best,
        )
        self.named = folder.identity()
        """What the run is called; None if that is not known yet. Of the first rank alone."""

    def restore(self, *, best: bool, take: Take | None = None) -> tuple[LoadedCheckpoint, bool]:
        """Returns the best weights of the run, or its last ones, and whether they are the best.

        The best weights have the best validation score. If nothing was validated, or not since the run began to follow
        a stream, there are none, and the last ones are returned. take: see `CheckpointManager.restore_latest`.

        Raises:
            CorruptFileError: the best weights are lost or damaged; the last ones never stand in for them.
        """
        restored = self._restore_best(take) if best else None
        if restored is not None:
            return restored, True
        restored = self.newest(self.last, take)
        if restored is None:
            raise UserError("has no checkpoint yet", option="RUN", value=str(self._folder.path), remedy="train it first")
        return restored, False

    def newest(self, checkpoints: CheckpointManager, take: Take | None = None) -> LoadedCheckpoint | None:
        """Returns the newest checkpoint that is whole, or None if there is none."""
        on_first(self._topology, lambda: self._check_before_fetched(checkpoints))
        return checkpoints.restore_latest(take)

    def check_data(self, card: DatasetCard) -> None:
        """Refuse an address whose run was trained on other data, if the run folder does not know its data. Local."""
        address = self._cfg.training.checkpoint_address
        if not address or (self._folder.path / CARD_FILE).exists():
            return
        where = f"{address.rstrip('/')}/{CARD_FILE}"
        content = read_at(address, CARD_FILE)
        if content is not None:
            trained_on = read_json(lambda: content, where, partial(from_plain, DatasetCard))
            refuse_other_data(trained_on, card, where, or_later=True)

    def send_card(self, card: DatasetCard) -> None:
        """Store the card of the data at the address, for a run that is resumed on another machine. Local."""
        address = self._cfg.training.checkpoint_address
        if not address:
            return
        try:
            storage_of(address).replace(CARD_FILE, dumps(card).encode())
        except Exception as error:  # some file systems of fsspec raise errors of their own
            self._report(f"{CARD_FILE} could not be copied to {address}: {type(error).__name__}: {error}")

    def secure_best(self, step: int) -> bool:
        """Make sure that RUN/best holds the best weights, those of a step: they are fetched from the address, or shared
        with the checkpoint of that step. Returns whether it does."""
        if self._of_first(lambda: any(s >= step and self.best.state(s) is not None for s in self.best.steps())):
            return True
        for unfit in self._of_first(self.best.steps):
            self.best.set_aside(unfit)
        try:
            restored = self.newest(self.best)
        except CorruptFileError as error:
            self._report(str(error))
            restored = None
        return (restored is not None and restored.step >= step) or self.best.adopt(self.last, step)

    def _restore_best(self, take: Take | None) -> LoadedCheckpoint | None:
        state = self._of_first(self.last.newest_state)
        train = None if state is None else TrainState.from_plain(state["train"])
        step = None if train is None else train.best_step
        if train is not None and (train.generation is not None or (step is None and not self.best.steps())):
            return None
        problem = f"the best weights of the run (step {step}) are lost"
        try:
            restored = self.newest(self.best, take)
            if restored is None and step is None:
                return None
            if restored is not None and (step is None or restored.step >= step):
                return restored
        except CorruptFileError as error:
            problem = f"the best weights of the run are damaged: {error}"
        if step is not None and step in self._of_first(self.last.steps):
            try:
                return self._restore_last_of(step, take)
            except CorruptFileError as error:
                self._report(str(error))
        raise CorruptFileError(
            problem,
            option="best",
            value=str(self._folder.best),
            remedy="take the last weights instead (--last); or move this folder away and train "
            "on, which keeps the best of the epochs to come",
        )

    def _restore_last_of(self, step: int, take: Take | None) -> LoadedCheckpoint:
        """Returns the checkpoint that was saved together with the best weights, and holds the same ones."""
        restored = self.last.restore(step)
        if take is not None:
            take(restored)
        return restored

    def _check_before_fetched(self, checkpoints: CheckpointManager) -> None:
        """Refuse copies of another run before they are fetched into the folder: there they would be refused again."""
        states = [] if checkpoints.steps() else [copy.state for copy in checkpoints.copies() if copy.state is not None]
        saved = identity_of(states[-1]) if states else None
        if saved is not None:
            mine = Identity.of(self._cfg, self.named or saved)
            check_kept_elsewhere(saved, mine, self._cfg.training.checkpoint_address)

    def _of_first(self, action: Callable[[], T]) -> T:
        """Returns the result of an action on the first rank, to all ranks."""
        found: T = all_gather_json(self._topology.control, on_first(self._topology, action))[0]
        return found

    def _address(self, name: str) -> str:
        address = self._cfg.training.checkpoint_address
        return f"{address.rstrip('/')}/{name}" if address else ""


class RunCheckpointer:
    """Saves and restores a session. All ranks make the same calls in the same order."""

    def __init__(self, session: Session, folder: RunFolder, listener: TrainingCallback):
        self._session = session
        self._cfg = session.cfg.training
        self._folder = folder
        self._listener = listener
        if self._cfg.checkpoint_address:
            _check_address(self._cfg.checkpoint_address, session.topology.world)
        self._weights = RunWeights(session.cfg, folder, session.topology, report=listener.warned, note=listener.noted)
        self._best = self._weights.best
        self._last = self._weights.last
        self._is_best = False
        # Of the first rank alone: it writes what checkpoints name, and checks it.
        self._mine = Identity.of(session.cfg, self._weights.named)

    def save(self, state: TrainState) -> None:
        """The state to go on from."""
        is_best, self._is_best = self._is_best, False
        self._wait()  # rows are read by one save at a time
        self._save(state, None if is_best else self._last.base_for_next(), self._best if is_best else None)
        self._session.tables.build_on(state.step)

    def mark_best(self) -> None:
        """The state that is saved next is the one to measure and serve."""
        self._is_best = True

    def find_last(self) -> TrainState | None:
        """The session as last saved, or none where nothing was saved yet."""
        self._wait()
        on_first(self._session.topology, lambda: self._weights.check_data(self._session.dataset.card))
        restored = self._weights.newest(self._last, self._take)
        return None if restored is None else self._session.settle(restored)

    def find_to_go_on(self, begin: Callable[[], TrainState] = TrainState) -> TrainState:
        """The session as last saved, or as it begins; a UserError where it, or the best one, is another run's."""
        state = self.find_last() or begin()
        topology = self._session.topology
        self._mine = self._mine.going_on(state.step, self._session.cfg, topology.world)
        on_first(topology, self._check_best)
        on_first(topology, self._check_sent)
        return state

    def begin(self, state: TrainState) -> TrainState:
        """Write what the run is called, and set aside best weights that do not belong to it any more. If those that
        the state names are lost, the best of the epochs to come is saved."""
        self._folder.name(self._mine)
        topology = self._session.topology
        on_first(topology, lambda: self._weights.send_card(self._session.dataset.card))
        steps = all_gather_json(topology.control, self._best_steps() if topology.is_first else None)[0]
        for step, is_foreign in steps:
            if is_foreign:
                self._best.set_aside(step)
        if steps and all(is_foreign for _, is_foreign in steps):
            # Where a better score was reached than any to come, its weights are gone: the next one is the best.
            return replace(state, best_score=None, best_step=None)
        if state.best_step is None or state.generation is not None or self._weights.secure_best(state.best_step):
            return state
        text = f"the best weights (step {state.best_step}) are lost: the best of the epochs to come is saved"
        self._folder.record("event", step=state.step, text=text)
        self._listener.warned(text)
        return replace(state, best_score=None, best_step=None)

    def _best_steps(self) -> list[tuple[int, bool]]:
        """Steps that are saved as best, and whether they are of another course; what is damaged is left alone."""
        states = [(step, self._best.state(step)) for step in self._best.steps()]
        return [(s, is_of_another_course(identity_of(state), s, self._mine)) for s, state in states if state]

    def _check_best(self) -> None:
        for step in self._best.steps():
            saved = identity_of(self._best.state(step) or {})
            check_same_run(saved, self._mine, folder_of(self._folder.best, step))

    def _check_sent(self) -> None:
        """Refuse an address whose copies are of another run, or so damaged that their run cannot be identified: the
        first save would replace them."""
        sent = [(checkpoints, checkpoints.copies()) for checkpoints in (self._last, self._best)]
        readable = [copy.state for _, copies in sent for copy in copies if copy.state is not None]
        for saved in map(identity_of, readable):
            if saved is not None and saved.run != self._mine.run:
                raise UserError(
                    "holds checkpoints of another run, which those of this one would replace",
                    option="training.checkpoint_address",
                    value=self._cfg.checkpoint_address,
                    remedy="give each run an address of its own; to go on from these, train into an empty folder "
                    "(--output)",
                )
        damaged = {copy.step: copy.problem for _, copies in sent for copy in copies}
        are_ours = any(mine.has_digest(copy.step, copy.digest) for mine, copies in sent for copy in copies)
        if damaged and not readable and not are_ours:
            raise damaged_elsewhere(self._cfg.checkpoint_address, damaged)

    def _take(self, restored: LoadedCheckpoint) -> None:
        on_first(self._session.topology, lambda: self._check(restored))
        self._session.tables.take(restored)

    def _check(self, restored: LoadedCheckpoint) -> None:
        saved = identity_of(restored.state)
        if saved is not None and self._weights.named is None:
            # Checkpoints that were copied into a new folder: the run goes on under its name.
            self._weights.named = saved
            self._mine = Identity.of(self._session.cfg, saved)
        check_restored(restored, self._mine)

    def restore_last(self) -> TrainState:
        """The session as last saved."""
        state = self.find_last()
        if state is None:
            raise UserError("has no checkpoint yet", option="RUN", value=str(self._folder.path), remedy="train it first")
        return state

    def restore_best(self) -> tuple[TrainState, bool]:
        """Restore the weights that are for use, and return whether they are the best; see `RunWeights.restore`."""
        self._wait()
        restored, is_best = self._weights.restore(best=True, take=self._take)
        return self._session.settle(restored), is_best

    def close(self) -> None:
        """Wait until everything is written, and raise what went wrong."""
        self._wait()

    def _wait(self) -> None:
        self._last.wait()
        self._best.wait()

    def _save(self, state: TrainState, base: int | None, also: CheckpointManager | None) -> None:
        aside_bytes = self._cfg.checkpoint_aside_mib << 20 if self._cfg.checkpoint_async else None
        content = self._session.content(state, base, aside_bytes=aside_bytes)
        named = {**content.state, IDENTITY: self._mine.at(state.step).to_plain()}
        content = replace(content, state=named)
        if self._cfg.checkpoint_async:
            self._last.save_async(state.step, content, is_copied=True, also=also)
        else:
            self._last.save(state.step, content, also=also)


def _check_address(address: str, world: int) -> None:
    """Raise a UserError where nothing could be kept there; nothing is asked of the place yet."""
    field, remedy = "training.checkpoint_address", "name a folder or a store that all ranks reach: s3://bucket/run"
    require(not address.endswith("://"), "names no place", option=field, value=address, remedy=remedy)
    if address.startswith("memory:") and world > 1:
        problem = "is memory of each process, and no rank has all of a checkpoint there"
        raise UserError(problem, option=field, value=address, remedy=remedy)
    try:
        storage_of(address)
    except UserError as error:
        raise UserError(error.problem, option=field, value=address, remedy=error.remedy) from error


class RunInterruptedError(Exception):
    """The run was told to stop; its state has been saved."""


class StopRequest:
    """Set by a signal; the loop looks at it between steps. A second SIGINT interrupts at once, as usual."""

    def __init__(self) -> None:
        self.is_set = False

    @contextlib.contextmanager
    def listening(self) -> Iterator["StopRequest"]:
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
