"""Rows scaled to one length.

    y = factor * x / max(|x|, eps)

Legend: T rows, D channels.
"""

from typing import Any

import torch
from torch.nn.functional import normalize

from nestrec.ops.kernel_op import compute_type, runs_kernels
from nestrec.ops.layers.input_rows import scale_rows, scale_rows_backward
from nestrec.ops.rows.stored import StoredRows, TableRows


def unit_rows_reference(x_TD: torch.Tensor, factor: float, eps: float) -> torch.Tensor:
    """The definition."""
    return normalize(x_TD, dim=1, eps=eps) * factor


def unit_rows(x_TD: TableRows, factor: float, eps: float) -> torch.Tensor:
    """The same by kernels, where there are any; under autocast the result has autocast's type."""
    if isinstance(x_TD, StoredRows):
        if not runs_kernels(x_TD.values):
            return unit_rows_reference(x_TD.whole(), factor, eps)
        leaf_TD, stored_TD = x_TD.anchor, x_TD.values.contiguous()
        return _UnitRows.apply(leaf_TD, stored_TD, compute_type(leaf_TD), factor, eps)  # type: ignore[no-any-return]
    if not runs_kernels(x_TD):
        return unit_rows_reference(x_TD, factor, eps)
    return _UnitRows.apply(x_TD.contiguous(), None, compute_type(x_TD), factor, eps)  # type: ignore[no-any-return]


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, x: torch.Tensor, stored: torch.Tensor | None, dtype: torch.dtype, factor: float, eps: float
    ) -> torch.Tensor:
        """stored: the values, where `x` is the anchor of `StoredRows`."""
        read = x if stored is None else stored
        out, inverse = scale_rows(read, dtype, factor, eps)
        ctx.factor, ctx.eps, ctx.dtype = factor, eps, x.dtype
        ctx.save_for_backward(read, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        read, inverse = ctx.saved_tensors
        grad_x = scale_rows_backward(grads[0].contiguous(), read, inverse, ctx.dtype, ctx.factor, ctx.eps)
        return grad_x, None, None, None, None
