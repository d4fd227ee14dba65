"""The row optimizer `sgd`, and the list of built-in optimizers.

sgd: w -= lr * g.

Row optimisers whose formula and kernel are the operator `update_rows`, told apart by the rule of a step.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.embedding.row_optimizer import HostLoop, RowOptimizerSpec, RowStep, StateColumn
from nestrec.ops.embedding import row_update as ops
from nestrec.ops.embedding.row_update import RowRule

Rule = Callable[[RowStep], ops.RowRule]


def built_in(
    state: tuple[StateColumn, ...], rule: Rule, host_loop: HostLoop, *, reads: Iterable[str] = ()
) -> RowOptimizerSpec:
    """A member of ours. rule: which of the operator's kinds it is, with the numbers of a step."""

    def formula(states: Sequence[torch.Tensor], grad: torch.Tensor, step: RowStep) -> torch.Tensor:
        return ops.change_of(states, grad, rule(step))

    def kernel(
        weight: torch.Tensor,
        states: Sequence[torch.Tensor],
        grad: torch.Tensor,
        places: torch.Tensor | None,
        step: RowStep,
    ) -> None:
        ops.update_rows(weight, states, grad, rule(step), places, draw_P=step.draws)

    return RowOptimizerSpec(
        state=state, formula=formula, host_loop=host_loop, kernel=kernel, kernel_rounds=True, reads=frozenset(reads)
    )


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
