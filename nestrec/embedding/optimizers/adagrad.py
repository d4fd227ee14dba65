"""The row optimizers `adagrad` and `rowwise_adagrad`.

    adagrad          s += g^2;          w -= lr * g / (sqrt(s) + eps)
    rowwise_adagrad  s += mean(g^2);    w -= lr * g / (sqrt(s / c) + eps)

c is `moment_scale`. The mean of squares of a row is a pairwise sum, as in nestrec.ops.embedding.row_update, so that
host loops and kernels are bitwise identical.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.embedding.optimizers.sgd import built_in
from nestrec.embedding.row_optimizer import RowOptimizerConfig, RowStep, StateColumn
from nestrec.ops.embedding.row_update import RowRule


@njit(cache=True, nogil=True, error_model="numpy")
def mean_of_squares(grad, scratch):  # type: ignore[no-untyped-def]
    """Return the mean of squares of a gradient; `scratch` has its length and the dtype of the sum."""
    width = len(grad)
    for j in range(width):
        scratch[j] = grad[j] * grad[j]
    while width > 1:
        half = (width + 1) // 2
        for j in range(width - half):
            scratch[j] += scratch[half + j]
        width = half
    return scratch[0] * scratch.dtype.type(1 / len(grad))


def _first_sum(options: RowOptimizerConfig) -> float:
    return options.initial_accumulator_value


def _rule(step: RowStep, *, kind: str) -> RowRule:
    options = step.options
    return RowRule(kind=kind, learning_rate=step.learning_rate, eps=options.eps, inverse_scale=1 / options.moment_scale)


def _host_loop(
    rows: NDArray[Any], grad: NDArray[Any], columns: Sequence[int], step: RowStep, *, is_row_wise: bool
) -> None:
    real = rows.dtype.type
    options = step.options
    scale = real(1 / options.moment_scale)
    _adagrad(rows, grad, columns[0], real(step.learning_rate), real(options.eps), scale, is_row_wise)


@njit(cache=True, nogil=True, error_model="numpy")
def _adagrad(rows, grad, sum_at, lr, eps, inverse_scale, is_row_wise):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    dim = grad.shape[1]
    scratch = np.empty(dim, rows.dtype)
    for i in range(len(rows)):
        if is_row_wise:
            rows[i, sum_at] += mean_of_squares(grad[i], scratch)
            root = np.sqrt(rows[i, sum_at] * inverse_scale) + eps
            for j in range(dim):
                rows[i, j] -= lr * (grad[i, j] / root)
        else:
            for j in range(dim):
                rows[i, sum_at + j] += grad[i, j] * grad[i, j]
                rows[i, j] -= lr * (grad[i, j] / (np.sqrt(rows[i, sum_at + j]) + eps))


ADAGRAD = built_in(
    (StateColumn("state_sum", is_row_wise=False, initial=_first_sum),),
    partial(_rule, kind="adagrad"),
    partial(_host_loop, is_row_wise=False),
    reads=("eps", "initial_accumulator_value"),
)
ROWWISE_ADAGRAD = built_in(
    (StateColumn("state_sum", is_row_wise=True, initial=_first_sum),),
    partial(_rule, kind="rowwise_adagrad"),
    partial(_host_loop, is_row_wise=True),
    reads=("eps", "initial_accumulator_value", "moment_scale"),
)
