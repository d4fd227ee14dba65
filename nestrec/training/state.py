"""Where a run stands: everything besides weights that a checkpoint must hold.

What a run has come to, as text that two runs can be compared by: every tensor, every table, and where it stands.

How far a run has come, step by step, in a small file: what a start that follows a crash says has been lost.

Metrics are written every so many steps and checkpoints more seldom; this is a few bytes a step, and outlives a kill.
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
    step: int = 0
    """updates made"""
    first_step: int = 0
    """updates that were made before this run began, by the run that it began from"""
    position: BatchPosition = field(default_factory=BatchPosition)
    """the next batch"""
    consumed: str = ""
    """digest of all samples trained on, in order; the same for any number of ranks"""
    best_score: float | None = None
    """best validation score so far"""
    best_step: int | None = None
    """the step at which it was reached"""
    evaluations_since_best: int = 0
    """for early stopping"""
    cost: CostModel | None = None
    """the cost model of samples that the run was configured with, from which the changes begin"""
    cost_changes: tuple[CostChange, ...] = ()
    """changes of the cost model of samples, with the batches from which they hold"""
    window_changes: tuple[MicroBatchChange, ...] = ()
    """changes of the number of micro-batches, likewise"""
    windows_predicted: int = 0
    """windows of time that were predicted before they were trained on"""
    windows_done: int = 0
    """windows that were trained on to their end"""
    window_step: int = 0
    """the step with which the last of them ended"""
    generation: int | None = None
    """of the dataset, where the run follows a stream: the one whose newest events it trains on, or has trained on"""
    loss_variant: str | None = None
    """how the loss is computed, where the config left it to measurement"""

    def after(self, batch: Batch, following: BatchPosition) -> "TrainState":
        """The state after training on `batch`."""
        digest = hashlib.sha256(self.consumed.encode())
        digest.update(batch.global_samples.tobytes())
        return replace(self, step=self.step + 1, position=following, consumed=digest.hexdigest())

    def predicted(self, window: int) -> "TrainState":
        """The state after a window was predicted."""
        return replace(self, windows_predicted=window + 1)

    def began_window(self, generation: int) -> "TrainState":
        """The state before the first step of a window of a stream."""
        epoch = self.position.epoch + int(self.position.step > 0)  # a run may have ended in the middle of an epoch
        return replace(self, generation=generation, position=BatchPosition(epoch, 0))

    def ended_window(self) -> "TrainState":
        """The state after the last step of a window."""
        return replace(self, windows_done=self.windows_done + 1, window_step=self.step)

    def evaluated(self, score: float) -> "TrainState":
        """The state after an evaluation on the validation part. Where no score is known, the last weights are the best:
        none are better than others, and patience has nothing to wait for."""
        if self.best_score is None or math.isnan(self.best_score) or score > self.best_score:
            return replace(self, best_score=score, best_step=self.step, evaluations_since_best=0)
        return replace(self, evaluations_since_best=self.evaluations_since_best + 1)

    def ends(self, cfg: TrainingConfig) -> dict[str, int]:
        """The options by which a run is at its end, and how far it has come by each of them."""
        limits = {"epochs": cfg.epochs, "max_steps": cfg.max_steps, "patience": cfg.patience}
        reached = {
            "epochs": self.position.epoch,
            "max_steps": self.step - self.first_step,
            "patience": self.evaluations_since_best,
        }
        return {name: reached[name] for name, most in limits.items() if most is not None and reached[name] >= most}

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain

    @staticmethod
    def from_plain(data: dict[str, Any]) -> "TrainState":
        return from_plain(TrainState, data)


def run_digest(run: Path) -> dict[str, str]:
    """Name to digest of every dense weight, optimiser state and table, and of the consumed samples."""
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
    assert len(columns["keys"].unique()) == len(order), "a key comes twice"
    return " ".join(f"{name}:{_digest(columns[name][order])}" for name in sorted(columns))


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


_ENTRY = struct.Struct("<qd")
_MARKS = 16
"""More saves than can be under way, so that the one that is resumed from is among them."""


@dataclass(frozen=True, slots=True)
class LostProgress:
    """What was trained and is not in the checkpoint that a run goes on from."""

    steps: int
    seconds: float | None
    """From the step that was saved to the last one; none where that moment is not known any more."""

    def __str__(self) -> str:
        time_of = "" if self.seconds is None else f", {self.seconds:.1f} s of work"
        return f"lost: {self.steps} step{'s' if self.steps > 1 else ''}{time_of}"


class StepProgressFile:
    """The file of one run, kept by its first rank."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.time):
        self._file = file
        self._clock = clock
        self._descriptor: int | None = None
        self._num_marks = 0

    def reached(self, step: int) -> None:
        """A step is over."""
        self._put(0, step)

    def mark(self, step: int) -> None:
        """A step that a later start may go on from: the one that training begins at, or one that is being saved."""
        self._put(1 + self._num_marks % _MARKS, step)
        self._num_marks += 1

    def lost(self, step: int) -> LostProgress | None:
        """Of what an earlier start has reached, what one that goes on from `step` makes again; none: nothing."""
        if not self._file.exists():
            return None
        content = self._file.read_bytes()
        entries = list(_ENTRY.iter_unpack(content[: len(content) // _ENTRY.size * _ENTRY.size]))
        if not entries or entries[0][0] <= step:
            return None
        last, at_s = entries[0]
        begun = [marked_s for marked, marked_s in entries[1:] if marked == step and marked_s > 0]
        return LostProgress(last - step, max(0.0, at_s - max(begun)) if begun else None)

    def _put(self, place: int, step: int) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        os.pwrite(self._descriptor, _ENTRY.pack(step, self._clock()), place * _ENTRY.size)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
