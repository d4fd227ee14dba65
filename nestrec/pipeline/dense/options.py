"""How weights follow gradients."""

import math
from typing import Literal

from nestrec.base.bounds import Decay, Natural, NonNegative, Positive, Share
from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.pipeline.stages import Rates


@config
class OptimizerConfig:
    learning_rate: NonNegative = 1e-3
    """size of an update of the dense weights (AdamW)"""
    table_learning_rate: NonNegative | None = None
    """size of an update of the tables' rows; none takes that of the dense weights"""
    beta1: Decay = 0.9
    """AdamW: decay of the running mean of gradients; nearer to 1 follows them more slowly"""
    beta2: Decay = 0.98
    """AdamW: decay of the running mean of squared gradients; nearer to 1 remembers longer"""
    eps: NonNegative = 1e-8
    """AdamW: added to the root of that mean, so that weights with tiny gradients do not leap"""
    weight_decay: NonNegative = 0.0
    """AdamW: part of a dense weight that is taken away at each update, times the learning rate; tables have none"""
    weight_decay_of: Literal["all", "matrices"] = "all"
    """dense weights that decay: all, or only those of two dimensions and more, not biases and scales of norms"""
    clip_norm: Positive | None = None
    """longest gradient of the dense weights, all of them together: that of the loss of the global batch, so summed over
    ranks and micro-batches before it is measured; a longer one is scaled to it. Rows of tables are no part of it"""
    warmup_steps: Natural = 0
    """steps over which both learning rates grow linearly from 0"""
    decay: Literal["none", "linear", "cosine"] = "none"
    """how both learning rates fall after the warm-up, over `decay_steps`"""
    decay_steps: Natural = 0
    """steps after the warm-up until the rates have fallen to `final_rate` of what they were; they stay there"""
    final_rate: Share = 0.0
    """part of the learning rates that is left after `decay_steps`"""
    ema: Decay | None = None
    """running mean of the dense weights, of which each step keeps this part and takes the rest from the weights:
    evaluated, exported and published in their place. None: the weights themselves. Rows of tables have none"""

    def __post_init__(self) -> None:
        if (self.decay == "none") != (self.decay_steps == 0):
            raise UserError(
                "goes with decay_steps",
                field="optimizer.decay",
                value=f"{self.decay}, decay_steps={self.decay_steps}",
                remedy="give both a decay (linear, cosine) and its decay_steps, or neither",
            )

    def rates(self, step: int) -> Rates:
        """Learning rates of a step, from 1."""
        part = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        if self.decay != "none":
            part *= self._left(min(1.0, max(0, step - self.warmup_steps) / self.decay_steps))
        tables = self.learning_rate if self.table_learning_rate is None else self.table_learning_rate
        return Rates(dense=self.learning_rate * part, tables=tables * part)

    def _left(self, progress: float) -> float:
        falling = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_rate + (1.0 - self.final_rate) * falling
