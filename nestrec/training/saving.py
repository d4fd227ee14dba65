"""The checkpoints of a run: the last ones, to go on from, and the one with the best validation score."""

from collections.abc import Callable
from dataclasses import replace

from nestrec.base.errors import DamagedError, UserError
from nestrec.checkpoint import IDENTITY, Checkpoints, Peers, Restored
from nestrec.checkpoint.elsewhere import damaged_elsewhere
from nestrec.checkpoint.folders import folder_of
from nestrec.checkpoint.places import place_of
from nestrec.distributed.exchange import all_gather_json
from nestrec.training.identity import (
    Identity,
    check_kept_elsewhere,
    check_restored,
    check_same_run,
    identity_of,
    is_of_another_course,
)
from nestrec.training.listener import Listener
from nestrec.training.run_folder import RunFolder
from nestrec.training.session import Session, on_first
from nestrec.training.state import TrainState


class Saving:
    """Saves and restores a session. All ranks make the same calls in the same order."""

    def __init__(self, session: Session, folder: RunFolder, listener: Listener):
        self._session, self._cfg, self._folder = session, session.cfg.training, folder
        self._best = Checkpoints(
            folder.best,
            keep=1,
            peers=Peers.of_topology(session.topology),
            report=listener.warned,
            address=self._address("best"),
        )
        self._last = Checkpoints(
            folder.checkpoints,
            keep=self._cfg.keep_checkpoints,
            max_deltas=self._cfg.incremental_saves,
            peers=Peers.of_topology(session.topology),
            report=listener.warned,
            note=listener.noted,
            address=self._address("checkpoints"),
            beside=self._best,
        )
        self._is_best = False
        # Of the first rank alone: it writes what checkpoints name, and checks it.
        self._named = folder.identity()
        self._mine = Identity.of(session.cfg, self._named)

    def _address(self, name: str) -> str:
        address = self._cfg.checkpoint_address
        if address:
            _check_address(address, self._session.topology.world)
        return f"{address.rstrip('/')}/{name}" if address else ""

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
        restored = self._restored(self._last)
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
        """Write what the run is called, and set aside best weights that are no part of it any more."""
        self._folder.name(self._mine)
        topology = self._session.topology
        steps = all_gather_json(topology.control, self._best_steps() if topology.is_first else None)[0]
        for step, is_foreign in steps:
            if is_foreign:
                self._best.set_aside(step)
        if steps and all(is_foreign for _, is_foreign in steps):
            # Where a better score was reached than any to come, its weights are gone: the next one is the best.
            return replace(state, best_score=None, best_step=None)
        return state

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
                    field="training.checkpoint_address",
                    value=self._cfg.checkpoint_address,
                    remedy="give each run an address of its own; to go on from these, train into an empty folder "
                    "(--output)",
                )
        damaged = {copy.step: copy.problem for _, copies in sent for copy in copies}
        are_ours = any(mine.has_digest(copy.step, copy.digest) for mine, copies in sent for copy in copies)
        if damaged and not readable and not are_ours:
            raise damaged_elsewhere(self._cfg.checkpoint_address, damaged)

    def _restored(self, checkpoints: Checkpoints) -> Restored | None:
        """The newest that is whole, taken from the second place where the folder has none."""
        on_first(self._session.topology, lambda: self._check_before_fetched(checkpoints))
        return checkpoints.restore_latest(self._take)

    def _check_before_fetched(self, checkpoints: Checkpoints) -> None:
        """Refuse what is of another run before it is copied here, where it would stay and be refused again."""
        states = [] if checkpoints.steps() else [copy.state for copy in checkpoints.copies() if copy.state is not None]
        saved = identity_of(states[-1]) if states else None
        if saved is not None:
            mine = self._mine if self._named is not None else Identity.of(self._session.cfg, saved)
            check_kept_elsewhere(saved, mine, self._cfg.checkpoint_address)

    def _take(self, restored: Restored) -> None:
        on_first(self._session.topology, lambda: self._check(restored))
        self._session.tables.take(restored)

    def _check(self, restored: Restored) -> None:
        saved = identity_of(restored.state)
        if saved is not None and self._named is None:
            # Checkpoints that were copied into a new folder: the run goes on under its name.
            self._named, self._mine = saved, Identity.of(self._session.cfg, saved)
        check_restored(restored, self._mine)

    def restore_last(self) -> TrainState:
        """The session as last saved."""
        state = self.find_last()
        if state is None:
            raise UserError("has no checkpoint yet", field="RUN", value=str(self._folder.path), remedy="train it first")
        return state

    def restore_best(self) -> TrainState:
        """The session with the weights that are for use: of its best validation score, or as last saved where nothing
        was validated since."""
        self._wait()
        if self._folder.best not in self._folder.for_use:
            return self.restore_last()
        try:
            restored = self._restored(self._best)
        except DamagedError as error:
            remedy = "take the last weights instead with --last, or train again"
            raise DamagedError(error.problem, field="best", value=str(self._folder.best), remedy=remedy) from error
        return self.restore_last() if restored is None else self._session.settle(restored)

    def close(self) -> None:
        """Wait until everything is written, and raise what went wrong."""
        self._wait()

    def _wait(self) -> None:
        self._last.wait()
        self._best.wait()

    def _save(self, state: TrainState, base: int | None, also: Checkpoints | None) -> None:
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
    if address.endswith("://"):
        raise UserError("names no place", field=field, value=address, remedy=remedy)
    if address.startswith("memory:") and world > 1:
        problem = "is memory of each process, and no rank has all of a checkpoint there"
        raise UserError(problem, field=field, value=address, remedy=remedy)
    try:
        place_of(address)
    except UserError as error:
        raise UserError(error.problem, field=field, value=address, remedy=error.remedy) from error
