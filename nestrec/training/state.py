"""Where a run stands: everything besides weights that a checkpoint must hold."""

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import Any

from nestrec.balance.changes import CostChange
from nestrec.balance.cost import CostModel
from nestrec.base.config import from_plain, to_plain
from nestrec.data.batches import Batch
from nestrec.data.order import Position
from nestrec.pipeline.window_changes import WindowChange
from nestrec.training.config import TrainingConfig


@dataclass(frozen=True, slots=True)
class TrainState:
    step: int = 0
    """updates made"""
    first_step: int = 0
    """updates that were made before this run began, by the run that it began from"""
    position: Position = field(default_factory=Position)
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
    window_changes: tuple[WindowChange, ...] = ()
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

    def after(self, batch: Batch, following: Position) -> "TrainState":
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
        return replace(self, generation=generation, position=Position(epoch, 0))

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
