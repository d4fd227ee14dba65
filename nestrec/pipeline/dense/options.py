"""How weights follow gradients."""

from nestrec.base.bounds import Decay, Natural, NonNegative
from nestrec.base.config import config
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
    warmup_steps: Natural = 0
    """steps over which both learning rates grow linearly from 0"""

    def rates(self, step: int) -> Rates:
        """Learning rates of a step, from 1."""
        warmup = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        tables = self.learning_rate if self.table_learning_rate is None else self.table_learning_rate
        return Rates(dense=self.learning_rate * warmup, tables=tables * warmup)
