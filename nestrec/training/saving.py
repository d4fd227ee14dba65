"""The checkpoints of a run: the last ones, to go on from, and the one with the best validation score."""

from collections.abc import Callable

from nestrec.base.errors import DamagedError, UserError
from nestrec.checkpoint import Checkpoints, Peers
from nestrec.training.run_folder import RunFolder
from nestrec.training.session import Session
from nestrec.training.state import TrainState


class Saving:
    """Saves and restores a session. All ranks make the same calls in the same order."""

    def __init__(self, session: Session, folder: RunFolder, report: Callable[[str], None]):
        self._session, self._cfg, self._folder = session, session.cfg.training, folder
        # Each has a communicator of its own: both may be writing in the background at the same time.
        self._last = Checkpoints(
            folder.checkpoints, keep=self._cfg.keep_checkpoints, max_deltas=self._cfg.incremental_saves,
            peers=Peers.of_topology(session.topology), report=report,
        )  # fmt: skip
        self._best = Checkpoints(folder.best, keep=1, peers=Peers.of_topology(session.topology), report=report)

    def save(self, state: TrainState) -> None:
        """The state to go on from."""
        base = self._last.base_for_next()
        self._save(self._last, state, base)
        self._session.tables.build_on(state.step)

    def save_best(self, state: TrainState) -> None:
        """The state to measure and serve."""
        self._save(self._best, state, None)

    def find_last(self) -> TrainState | None:
        """The session as last saved, or none where nothing was saved yet."""
        restored = self._last.restore_latest()
        return None if restored is None else self._session.restore(restored)

    def restore_last(self) -> TrainState:
        """The session as last saved."""
        state = self.find_last()
        if state is None:
            raise UserError("has no checkpoint yet", field="RUN", value=str(self._folder.path), remedy="train it first")
        return state

    def restore_best(self) -> TrainState:
        """The session at its best validation score; as last saved where nothing was validated."""
        try:
            restored = self._best.restore_latest()
        except DamagedError as error:
            remedy = "take the last weights instead with --last, or train again"
            raise DamagedError(error.problem, field="best", value=str(self._folder.best), remedy=remedy) from error
        return self.restore_last() if restored is None else self._session.restore(restored)

    def close(self) -> None:
        """Wait until everything is written, and raise what went wrong."""
        self._last.close()
        self._best.close()

    def _save(self, checkpoints: Checkpoints, state: TrainState, base: int | None) -> None:
        content = self._session.content(state, base, copied=self._cfg.checkpoint_async)
        if self._cfg.checkpoint_async:
            checkpoints.save_async(state.step, content, is_copied=True)
        else:
            checkpoints.save(state.step, content)
