"""The row optimizer `sgd` (w -= lr * g), and a helper that builds the specs of all built-in row optimizers.

The formula and the kernel of a built-in row optimizer are the operator `update_rows`; they differ only in the rule of
a step.
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
    """Build the spec of a built-in row optimizer.

    Args:
        state: State columns of a row.
        rule: Function that returns the rule of the operator `update_rows` for a step.
        host_loop: Host loop of a step.
        reads: Fields of `RowOptimizerConfig` that the row optimizer uses.
    """

    def formula(states: Sequence[torch.Tensor], grad: torch.Tensor, step: RowStep) -> torch.Tensor:
        return ops.compute_change(states, grad, rule(step))

    def kernel(
        weight: torch.Tensor,
        states: Sequence[torch.Tensor],
        grad: torch.Tensor,
        indices: torch.Tensor | None,
        step: RowStep,
    ) -> None:
        ops.update_rows(weight, states, grad, rule(step), indices, draw_P=step.draws)

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
