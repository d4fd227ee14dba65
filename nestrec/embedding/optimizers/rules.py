"""Row optimisers on whole rows; the formulas stand in nestrec.ops.rows.update.

t: global step from 1, lr: learning rate of that step; Adam's lr_t = lr * sqrt(1 - b2^t) / (1 - b1^t).

All are lazy: a row moves only in steps that use it. sgd, adagrad and adam are torch.optim's SGD, Adagrad and
SparseAdam. Lazy Adam is not dense Adam: dense Adam decays the moments of every row in every step and moves rows that
no sample used, by momentum alone; here an unused row keeps weight and moments as they are, while bias correction
counts every step.
"""

import math

import torch

from nestrec.embedding.layout import RowLayout
from nestrec.embedding.table import RowOptimizerConfig
from nestrec.ops.rows import update as ops


def update_rows(
    rows: torch.Tensor,
    grad: torch.Tensor,
    layout: RowLayout,
    optimizer: RowOptimizerConfig,
    *,
    step: int,
    learning_rate: float,
    places: torch.Tensor | None = None,
) -> None:
    """One step on (n, num_words) rows, in place; `grad` is (n, dim) in the state's type.

    places: the row of each gradient, negative for gradients to be dropped; none: row i for gradient i.
    """
    weight, *states = (layout.view(rows, column.name) for column in layout.columns)
    ops.update_rows(weight, states, grad, rule_of(optimizer, step, learning_rate), places)


def rule_of(optimizer: RowOptimizerConfig, step: int, learning_rate: float) -> ops.RowRule:
    """The numbers of one step."""
    if optimizer.kind.endswith("adam"):
        learning_rate = adam_learning_rate(optimizer, step, learning_rate)
    return ops.RowRule(
        kind=optimizer.kind, learning_rate=learning_rate, eps=optimizer.eps, decay1=1 - optimizer.beta1,
        decay2=1 - optimizer.beta2, inverse_scale=1 / optimizer.moment_scale,
    )  # fmt: skip


def adam_learning_rate(optimizer: RowOptimizerConfig, step: int, learning_rate: float) -> float:
    """Learning rate with Adam's bias corrections of a global step."""
    return learning_rate * math.sqrt(1 - optimizer.beta2**step) / (1 - optimizer.beta1**step)
