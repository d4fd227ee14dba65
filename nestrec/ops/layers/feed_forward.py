"""Residual sum, RMS norm, dropout and gated feed-forward: the second stage of a FuXi block.

    total = x + delta
    a, b  = dropout(rms(total)) W1                 one product for both
    new   = (silu(a) * b) W2                       added to the residual by whoever comes next

Kept for the backward pass: total, [a, b] and the norm's statistics; the norm and silu(a) * b too unless `recompute`.

Legend: T tokens, D model width, F hidden width.
"""

# ruff: noqa: PLR0917 - operators of torch take their arguments by position

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from nestrec.ops.kernel_op import compute_type, runs_kernels
from nestrec.ops.layers.activation_rows import swiglu, swiglu_backward
from nestrec.ops.layers.dropout import Dropout
from nestrec.ops.layers.fp8 import product, takes_fp8
from nestrec.ops.layers.norm_projection import normed, weight_gradient
from nestrec.ops.layers.norm_rows import add_norm_rows, norm_rows_again, norm_rows_backward


def feed_forward_reference(
    x_TD: torch.Tensor,
    delta_TD: torch.Tensor,
    up_D2F: torch.Tensor,
    down_FD: torch.Tensor,
    drop: Dropout,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: (total, new delta)."""
    total = x_TD + delta_TD
    a, b = (drop(normed(total, "rms", eps)) @ up_D2F).chunk(2, dim=1)
    return total, (silu(a) * b) @ down_FD


def feed_forward(
    x_TD: torch.Tensor,
    delta_TD: torch.Tensor,
    up_D2F: torch.Tensor,
    down_FD: torch.Tensor,
    drop: Dropout,
    *,
    eps: float,
    recompute: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by kernels, where there are any."""
    if not runs_kernels(x_TD):
        return feed_forward_reference(x_TD, delta_TD, up_D2F, down_FD, drop, eps=eps)
    options = _Options(eps, recompute, compute_type(x_TD), takes_fp8(x_TD), drop)
    total, new = _FeedForward.apply(x_TD.contiguous(), delta_TD.contiguous(), up_D2F, down_FD, options)
    return total, new


@dataclass(frozen=True, slots=True)
class _Options:
    eps: float
    recompute: bool
    dtype: torch.dtype
    fp8: bool
    drop: Dropout


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, delta: torch.Tensor, up: torch.Tensor, down: torch.Tensor, options: _Options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        up_cast, down_cast = up.to(options.dtype), down.to(options.dtype)
        total, rows, mean, rstd = add_norm_rows(x, delta, options.dtype, False, options.eps, *options.drop.arguments())
        z = product(rows, up_cast, fp8=options.fp8)
        hidden = swiglu(z)
        ctx.options, ctx.types = options, (up.dtype, down.dtype)
        kept = (None, None) if options.recompute else (rows, hidden)
        ctx.save_for_backward(total, mean, rstd, up_cast, down_cast, z, *kept)
        return total, product(hidden, down_cast, fp8=options.fp8)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, mean, rstd, up, down, z, rows, hidden = ctx.saved_tensors
        options: _Options = ctx.options
        grad_total, grad_new = grads[0].contiguous(), grads[1].to(options.dtype).contiguous()
        found = swiglu_backward(product(grad_new, down.T, fp8=options.fp8), z, hidden is None)
        grad_z, hidden = found[0], found[1] if hidden is None else hidden
        grad_down = weight_gradient(hidden, grad_new, ctx.types[1])
        drop = options.drop.arguments()
        if rows is None:
            rows = norm_rows_again(total, mean, rstd, options.dtype, False, *drop)
        grad_up = weight_gradient(rows, grad_z, ctx.types[0])
        grad_x = norm_rows_backward(product(grad_z, up.T, fp8=options.fp8), grad_total, total, mean, rstd, False, *drop)
        return grad_x, grad_x, grad_up, grad_down, None
