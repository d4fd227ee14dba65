"""Norm, gate, dropout and output projection: the way out of a layer.

    gated = dropout(silu(gate) * norm(attended))       one norm over all parts of `attended`, side by side
    delta = gated W^T + b                               added to the residual by the next layer's norm_projection

`gate` comes before its SiLU (see norm_projection). Kept for the backward pass: attended, gate, the norm's statistics,
and `gated` unless `recompute`.

Legend: T tokens, D model width, U width of the gate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, silu

from nestrec.ops.kernel_op import compute_type, runs_kernels
from nestrec.ops.layers.dropout import Dropout
from nestrec.ops.layers.fp8 import fp8_product, product, takes_fp8
from nestrec.ops.layers.gate_rows import gate_rows, gate_rows_backward
from nestrec.ops.layers.norm_projection import NormKind, PackedGradient, normed, weight_gradient
from nestrec.ops.layers.row_tiles import like


def gated_output_reference(
    attended: Sequence[torch.Tensor],
    gate_TU: torch.Tensor,
    weight_DU: torch.Tensor,
    bias_D: torch.Tensor,
    drop: Dropout,
    *,
    norm: NormKind,
    eps: float,
) -> torch.Tensor:
    """The definition. attended: matrices that are side by side as wide as the gate."""
    together = attended[0] if len(attended) == 1 else torch.cat(list(attended), dim=1)
    return linear(drop(silu(gate_TU) * normed(together, norm, eps)), weight_DU, bias_D)


def gated_output(
    attended: Sequence[torch.Tensor],
    gate_TU: torch.Tensor,
    weight_DU: torch.Tensor,
    bias_D: torch.Tensor,
    drop: Dropout,
    *,
    norm: NormKind,
    eps: float,
    recompute: bool = False,
    packed: PackedGradient | None = None,
) -> torch.Tensor:
    """The same by kernels, where there are any; one to three parts of one width.

    packed: that of the projection the gate comes from; without it the gradient of the gate is copied once more.
    """
    if not runs_kernels(gate_TU):
        return gated_output_reference(attended, gate_TU, weight_DU, bias_D, drop, norm=norm, eps=eps)
    options = _Options(norm == "layer", eps, recompute, compute_type(gate_TU), takes_fp8(gate_TU), drop, packed)
    return _GatedOutput.apply(gate_TU, weight_DU, bias_D, options, *attended)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Options:
    centred: bool
    eps: float
    recompute: bool
    dtype: torch.dtype
    fp8: bool
    drop: Dropout
    packed: PackedGradient | None


class _GatedOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, options: _Options, *parts: torch.Tensor
    ) -> torch.Tensor:
        gated, mean, rstd = gate_rows(list(parts), gate, options.centred, options.eps, *options.drop.arguments())
        cast = weight.to(options.dtype)
        ctx.options, ctx.types = options, (weight.dtype, bias.dtype)
        ctx.save_for_backward(gate, mean, rstd, cast, None if options.recompute else gated, *parts)
        if options.fp8:
            return fp8_product(gated.to(options.dtype), cast.T, bias.to(options.dtype))
        return linear(gated.to(options.dtype), cast, bias.to(options.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, mean, rstd, cast, gated, *parts = ctx.saved_tensors
        options: _Options = ctx.options
        grad = grads[0].to(options.dtype).contiguous()
        packed = options.packed
        grad_gate = gate.new_empty(gate.shape) if packed is None else packed.gate_columns(gate)
        grad_parts = [like(part) for part in parts]
        again = None if gated is not None else like(gate)
        gate_rows_backward(
            product(grad, cast, fp8=options.fp8),
            parts,
            gate,
            mean,
            rstd,
            grad_gate,
            grad_parts,
            again,
            options.centred,
            *options.drop.arguments(),
        )
        gated = again if again is not None else gated
        grad_weight = weight_gradient(grad, gated.to(options.dtype), ctx.types[0])
        grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.types[1])
        return grad_gate, grad_weight, grad_bias, None, *grad_parts
