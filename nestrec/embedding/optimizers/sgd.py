"""sgd: w -= lr * g."""

from collections.abc import Sequence
from typing import Any

from numba import njit
from numpy.typing import NDArray

from nestrec.embedding.optimizers.built_in import built_in
from nestrec.embedding.row_optimizer import RowStep
from nestrec.ops.rows.update import RowRule


def _rule(step: RowStep) -> RowRule:
    return RowRule(kind="sgd", learning_rate=step.learning_rate)


def _host_loop(rows: NDArray[Any], grad: NDArray[Any], columns: Sequence[int], step: RowStep) -> None:
    _sgd(rows, grad, rows.dtype.type(step.learning_rate))


@njit(cache=True, nogil=True, error_model="numpy")
def _sgd(rows, grad, lr):  # type: ignore[no-untyped-def]
    for i in range(len(rows)):
        for j in range(grad.shape[1]):
            rows[i, j] -= lr * grad[i, j]


SGD = built_in((), _rule, _host_loop)
