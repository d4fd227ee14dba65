"""Row optimisers whose formula and kernel are the operator `update_rows`, told apart by the rule of a step."""

from collections.abc import Callable, Iterable, Sequence

import torch

from nestrec.embedding.row_optimizer import HostLoop, RowOptimizer, RowStep, StateColumn
from nestrec.ops.rows import update as ops

Rule = Callable[[RowStep], ops.RowRule]


def built_in(
    state: tuple[StateColumn, ...], rule: Rule, host_loop: HostLoop, *, reads: Iterable[str] = ()
) -> RowOptimizer:
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

    return RowOptimizer(
        state=state, formula=formula, host_loop=host_loop, kernel=kernel, kernel_rounds=True, reads=frozenset(reads)
    )
