"""State of a run: training progress in checkpoints, digests to compare runs, and lost progress after a crash.

`TrainState` contains everything except weights and tables that a checkpoint must store. `run_digest` reduces a run to
digests of all tensors and tables, so that tests can compare two runs bitwise. `StepProgressFile` records the last
finished step in a few bytes per step, because metrics and checkpoints are written less often; after a crash it shows
how much work was lost.
"""

import hashlib
import math
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nestrec.balance.cost import CostChange, CostModel
from nestrec.base.config import to_plain
from nestrec.base.config_values import from_plain
from nestrec.checkpoint import CheckpointManager, LoadedCheckpoint
from nestrec.data.batch_loader import Batch
from nestrec.data.batch_order import BatchPosition
from nestrec.pipeline.window_cost_model import MicroBatchChange
from nestrec.training.run_config import TrainingConfig


@dataclass(frozen=True, slots=True)
class TrainState:
    """Training progress of a run, stored in every checkpoint."""

    step: int = 0
    """Number of optimizer steps."""
    first_step: int = 0
    """Number of steps of the run that this run was warm-started from."""
    position: BatchPosition = field(default_factory=BatchPosition)
    """Position of the next batch."""
    consumed: str = ""
    """Digest of all samples trained on, in order; independent of the number of ranks."""
    best_score: float | None = None
    """Best validation score so far."""
    best_step: int | None = None
    """Step with the best validation score."""
    evaluations_since_best: int = 0
    """Number of evaluations since the best one, for early stopping."""
    cost: CostModel | None = None
    """Configured cost model of samples, to which the changes apply."""
    cost_changes: tuple[CostChange, ...] = ()
    """Changes of the cost model of samples, with the first batch that each applies to."""
    window_changes: tuple[MicroBatchChange, ...] = ()
    """Changes of the number of micro-batches, with the first batch that each applies to."""
    windows_predicted: int = 0
    """Number of time windows that were evaluated before training on them (test-then-train)."""
    windows_done: int = 0
    """Number of time windows that were trained on completely."""
    window_step: int = 0
    """Last step of the last completed time window."""
    generation: int | None = None
    """Dataset generation whose newest events are trained on; only in online training."""
    loss_variant: str | None = None
    """Implementation of the loss that was chosen by measurement, if the config sets `auto`."""

    def after(self, batch: Batch, following: BatchPosition) -> "TrainState":
        """Return the state after training on `batch`; `following` is the position of the next batch."""
        digest = hashlib.sha256(self.consumed.encode())
        digest.update(batch.global_samples.tobytes())
        return replace(self, step=self.step + 1, position=following, consumed=digest.hexdigest())

    def after_window_evaluation(self, window: int) -> "TrainState":
        """Return the state after a time window was evaluated before training on it."""
        return replace(self, windows_predicted=window + 1)

    def at_window_start(self, generation: int) -> "TrainState":
        """Return the state before the first step of a stream window."""
        epoch = self.position.epoch + int(self.position.step > 0)  # the previous run may have ended within an epoch
        return replace(self, generation=generation, position=BatchPosition(epoch, 0))

    def after_window(self) -> "TrainState":
        """Return the state after the last step of a time window."""
        return replace(self, windows_done=self.windows_done + 1, window_step=self.step)

    def after_evaluation(self, score: float) -> "TrainState":
        """Return the state after a validation; if scores are undefined (NaN), the last weights count as the best."""
        if self.best_score is None or math.isnan(self.best_score) or score > self.best_score:
            return replace(self, best_score=score, best_step=self.step, evaluations_since_best=0)
        return replace(self, evaluations_since_best=self.evaluations_since_best + 1)

    def reached_limits(self, cfg: TrainingConfig) -> dict[str, int]:
        """Return the options whose limit is reached, with the current values; training ends if there is one."""
        limits = {
            "epochs": cfg.epochs,
            "max_steps": cfg.max_steps,
            "early_stopping_patience": cfg.early_stopping_patience,
        }
        reached = {
            "epochs": self.position.epoch,
            "max_steps": self.step - self.first_step,
            "early_stopping_patience": self.evaluations_since_best,
        }
        return {name: reached[name] for name, limit in limits.items() if limit is not None and reached[name] >= limit}

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain

    @staticmethod
    def from_plain(data: dict[str, Any]) -> "TrainState":
        return from_plain(TrainState, data)


def run_digest(run: Path) -> dict[str, str]:
    """Return digests of every dense weight, optimizer state and table, and of the consumed samples, by name."""
    restored = CheckpointManager(run / "checkpoints").restore_latest()
    assert restored is not None, f"{run} has no checkpoint"
    state = TrainState.from_plain(restored.state["train"])
    tensors = {f"tensor {name}": _digest(tensor) for name, tensor in restored.tensors.items()}
    tables = {f"table {name}": _table_digest(restored, name) for name in restored.tables}
    return {**tensors, **tables, "consumed": state.consumed, "state": repr(state)}


def _table_digest(restored: LoadedCheckpoint, table: str) -> str:
    chunks = list(restored.rows(table))
    if not chunks:
        return "empty"
    columns = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    order = columns["keys"].argsort()
    assert len(columns["keys"].unique()) == len(order), "duplicate key"
    return " ".join(f"{name}:{_digest(columns[name][order])}" for name in sorted(columns))


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


_ENTRY = struct.Struct("<qd")
_MARKS = 16
"""Number of stored resume points: more than saves can be in progress, so that the one resumed from is included."""


@dataclass(frozen=True, slots=True)
class LostProgress:
    """Training progress after the checkpoint that a run resumes from."""

    steps: int
    """Number of lost steps."""
    seconds: float | None
    """Time from the saved step to the last step, in seconds; None if the time of the save is unknown."""

    def __str__(self) -> str:
        time_of = "" if self.seconds is None else f", {self.seconds:.1f} s of work"
        return f"lost: {self.steps} step{'s' if self.steps > 1 else ''}{time_of}"


class StepProgressFile:
    """File with the last finished step and recent resume points of a run, written by rank 0; survives a kill."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.time):
        self._file = file
        self._clock = clock
        self._descriptor: int | None = None
        self._num_marks = 0

    def record_step(self, step: int) -> None:
        """Record a finished step."""
        self._put(0, step)

    def record_resume_point(self, step: int) -> None:
        """Record a step that a later start may resume from: the first step of training, or a saved step."""
        self._put(1 + self._num_marks % _MARKS, step)
        self._num_marks += 1

    def lost_progress(self, step: int) -> LostProgress | None:
        """Return the progress that is lost if the run resumes from `step`; None if nothing is lost."""
        if not self._file.exists():
            return None
        content = self._file.read_bytes()
        entries = list(_ENTRY.iter_unpack(content[: len(content) // _ENTRY.size * _ENTRY.size]))
        if not entries or entries[0][0] <= step:
            return None
        last, at_s = entries[0]
        saved_s = [time_s for saved, time_s in entries[1:] if saved == step and time_s > 0]
        return LostProgress(last - step, max(0.0, at_s - max(saved_s)) if saved_s else None)

    def _put(self, index: int, step: int) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        os.pwrite(self._descriptor, _ENTRY.pack(step, self._clock()), index * _ENTRY.size)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
