"""The row optimizers `adam` and `rowwise_adam`, with lr_t = lr * sqrt(1 - b2^t) / (1 - b1^t) at the global step t.

    adam             m += (1-b1) * (g - m);    v += (1-b2) * (g^2 - v);          w -= lr_t * m / (sqrt(v) + eps)
    rowwise_adam     m as in adam;             v += (1-b2) * (mean(g^2) - v);    w -= lr_t * m / (sqrt(v) + eps)

This is lazy Adam, as in torch.optim.SparseAdam: weight and moments of an unused row stay unchanged, while the bias
correction counts every step. Dense Adam instead decays the moments of every row in every step and changes unused rows
by momentum.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.embedding.optimizers.adagrad import mean_of_squares
from nestrec.embedding.optimizers.sgd import built_in
from nestrec.embedding.row_optimizer import RowStep, StateColumn
from nestrec.ops.embedding.row_update import RowRule


def corrected_rate(step: RowStep) -> float:
    """Return the learning rate with Adam's bias corrections at a global step."""
    options = step.options
    return step.learning_rate * math.sqrt(1 - options.beta2**step.number) / (1 - options.beta1**step.number)


def _rule(step: RowStep, *, kind: str) -> RowRule:
    options = step.options
    return RowRule(
        kind=kind,
        learning_rate=corrected_rate(step),
        eps=options.eps,
        decay1=1 - options.beta1,
        decay2=1 - options.beta2,
    )


def _host_loop(
    rows: NDArray[Any], grad: NDArray[Any], columns: Sequence[int], step: RowStep, *, is_row_wise: bool
) -> None:
    real = rows.dtype.type
    options = step.options
    decays = real(1 - options.beta1), real(1 - options.beta2)
    _adam(rows, grad, columns[0], columns[1], real(corrected_rate(step)), real(options.eps), *decays, is_row_wise)


@njit(cache=True, nogil=True, error_model="numpy")
def _adam(rows, grad, m_at, v_at, lr, eps, decay1, decay2, is_row_wise):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    dim = grad.shape[1]
    scratch = np.empty(dim, rows.dtype)
    for i in range(len(rows)):
        if is_row_wise:
            rows[i, v_at] += decay2 * (mean_of_squares(grad[i], scratch) - rows[i, v_at])
            root = np.sqrt(rows[i, v_at]) + eps
            for j in range(dim):
                rows[i, m_at + j] += decay1 * (grad[i, j] - rows[i, m_at + j])
                rows[i, j] -= lr * (rows[i, m_at + j] / root)
        else:
            for j in range(dim):
                rows[i, m_at + j] += decay1 * (grad[i, j] - rows[i, m_at + j])
                rows[i, v_at + j] += decay2 * (grad[i, j] * grad[i, j] - rows[i, v_at + j])
                rows[i, j] -= lr * (rows[i, m_at + j] / (np.sqrt(rows[i, v_at + j]) + eps))


_MEAN = StateColumn("state_m", is_row_wise=False)

ADAM = built_in(
    (_MEAN, StateColumn("state_v", is_row_wise=False)),
    partial(_rule, kind="adam"),
    partial(_host_loop, is_row_wise=False),
    reads=("eps", "beta1", "beta2"),
)
ROWWISE_ADAM = built_in(
    (_MEAN, StateColumn("state_v", is_row_wise=True)),
    partial(_rule, kind="rowwise_adam"),
    partial(_host_loop, is_row_wise=True),
    reads=("eps", "beta1", "beta2"),
)
