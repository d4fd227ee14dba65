"""Row optimizer: Lion (arXiv 2302.06675) on embedding rows.

w -= lr * sign(beta1 * m + (1 - beta1) * g);   m <- beta2 * m + (1 - beta2) * g
"""

from collections.abc import Sequence

import torch

from nestrec import RowOptimizerSpec
from nestrec.embedding.row_optimizer import RowStep, StateColumn


def _formula(states: Sequence[torch.Tensor], grad: torch.Tensor, step: RowStep) -> torch.Tensor:
    [momentum] = states
    beta1, beta2 = step.option("beta1"), step.option("beta2")
    change = step.learning_rate * torch.sign(beta1 * momentum + (1 - beta1) * grad)
    momentum.mul_(beta2).add_((1 - beta2) * grad)
    return change


LION = RowOptimizerSpec(
    state=(StateColumn("state_momentum", is_row_wise=False),),
    formula=_formula,
    options={"beta1": 0.9, "beta2": 0.99},
)
