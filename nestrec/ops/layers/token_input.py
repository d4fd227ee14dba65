"""The input of an encoder: scaled item vectors plus learned positions, with dropout.

    x[t] = dropout(factor * vector[t] + table[position[t]])

The gradient of a position is a sum over the sequences that reach it, the longest first: no atomics.

Legend: T tokens, D model width, N positions of the table, B sequences.
"""

# ruff: noqa: PLR0917 - operators of torch take their arguments by position

from dataclasses import dataclass
from typing import Any

import torch

from nestrec.ops.kernel_op import compute_type, runs_kernels
from nestrec.ops.layers.dropout import Dropout
from nestrec.ops.layers.input_rows import embed_rows, embed_rows_backward, position_gradient


def token_input_reference(
    vector_TD: torch.Tensor, table_ND: torch.Tensor, position_T: torch.Tensor, *, factor: float, drop: Dropout
) -> torch.Tensor:
    """The definition."""
    return drop(vector_TD * factor + table_ND[position_T])


def token_input(
    vector_TD: torch.Tensor,
    table_ND: torch.Tensor,
    position_T: torch.Tensor,
    offsets: torch.Tensor,
    *,
    factor: float,
    drop: Dropout,
) -> torch.Tensor:
    """The same by kernels, where there are any; there `position_T` must count from 0 in each sequence of `offsets`.

    Under autocast the result has autocast's type: it is the residual stream of the encoder.
    """
    if not runs_kernels(vector_TD):
        return token_input_reference(vector_TD, table_ND, position_T, factor=factor, drop=drop)
    options = _Options(factor, compute_type(vector_TD), drop)
    return _TokenInput.apply(vector_TD.contiguous(), table_ND, position_T, offsets, options)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Options:
    factor: float
    dtype: torch.dtype
    drop: Dropout


class _TokenInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        vector: torch.Tensor,
        table: torch.Tensor,
        position: torch.Tensor,
        offsets: torch.Tensor,
        options: _Options,
    ) -> torch.Tensor:
        ctx.options, ctx.types, ctx.table_rows = options, (vector.dtype, table.dtype), len(table)
        ctx.save_for_backward(offsets)
        return embed_rows(
            vector, table.contiguous(), position, options.dtype, options.factor, *options.drop.arguments()
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        options: _Options = ctx.options
        drop, grad = options.drop.arguments(), grads[0].contiguous()
        grad_vector = embed_rows_backward(grad, ctx.types[0], options.factor, *drop)
        grad_table = position_gradient(grad, offsets, ctx.table_rows, *drop).to(ctx.types[1])
        return grad_vector, grad_table, None, None, None
