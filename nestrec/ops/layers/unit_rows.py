"""Rows scaled to one length.

    y = factor * x / max(|x|, eps)

Legend: T rows, D channels.
"""

from typing import Any

import torch
from torch.nn.functional import normalize

from nestrec.ops.kernel_op import compute_type, runs_kernels
from nestrec.ops.layers.input_rows import scale_rows, scale_rows_backward


def unit_rows_reference(x_TD: torch.Tensor, factor: float, eps: float) -> torch.Tensor:
    """The definition."""
    return normalize(x_TD, dim=1, eps=eps) * factor


def unit_rows(x_TD: torch.Tensor, factor: float, eps: float) -> torch.Tensor:
    """The same by kernels, where there are any; under autocast the result has autocast's type."""
    if not runs_kernels(x_TD):
        return unit_rows_reference(x_TD, factor, eps)
    return _UnitRows.apply(x_TD.contiguous(), compute_type(x_TD), factor, eps)  # type: ignore[no-any-return]


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype, factor: float, eps: float) -> torch.Tensor:
        out, inverse = scale_rows(x, dtype, factor, eps)
        ctx.factor, ctx.eps = factor, eps
        ctx.save_for_backward(x, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, inverse = ctx.saved_tensors
        grad_x = scale_rows_backward(grads[0].contiguous(), x, inverse, ctx.factor, ctx.eps)
        return grad_x, None, None, None
