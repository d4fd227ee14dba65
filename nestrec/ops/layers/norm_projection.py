"""Residual sum, norm, projection and SiLU: the way into a layer.

    total      = x + delta                       delta: what the layer before has added; none before the first
    z          = norm(total) W                   one product for all parts
    gate       = z[:, :first width]              handed on before its SiLU, which gated_output applies
    parts      = silu(z[:, rest])                say values, queries, keys: views of one packed matrix

Kept for the backward pass: total, z, and the statistics of the norm; norm(total) and the parts are kept too unless
`recompute`. The gradients of the parts meet in one packed dz, written once.

Legend: T tokens, D model width, Z width of the projection.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import layer_norm, rms_norm, silu

from nestrec.ops.kernel_op import compute_type, runs_kernels
from nestrec.ops.layers.activation_rows import silu_columns, silu_columns_backward
from nestrec.ops.layers.fp8 import product, takes_fp8
from nestrec.ops.layers.norm_rows import add_norm_rows, norm_rows, norm_rows_again, norm_rows_backward

NormKind = Literal["layer", "rms"]
NO_DROPOUT = (None, 0, 0, 1.0)


@dataclass(slots=True)
class PackedGradient:
    """Where gated_output leaves the gradient of the gate, so that the rest of dz can be written beside it."""

    width: int
    buffer: torch.Tensor | None = None

    def gate_columns(self, gate: torch.Tensor) -> torch.Tensor:
        """Fresh memory for the gradient of `gate`, inside a buffer as wide as the whole projection."""
        self.buffer = gate.new_empty(gate.shape[0], self.width)
        return self.buffer[:, : gate.shape[1]]

    def take(self, grad_gate: torch.Tensor) -> torch.Tensor:
        """The buffer that begins with `grad_gate`: the same memory if it is the one made above, else a copy."""
        buffer, self.buffer = self.buffer, None
        if buffer is None or buffer.data_ptr() != grad_gate.data_ptr() or grad_gate.stride(0) != self.width:
            buffer = grad_gate.new_empty(grad_gate.shape[0], self.width)
            buffer[:, : grad_gate.shape[1]] = grad_gate
        return buffer


class Parts:
    """The parts of a projection, made again from z in the backward pass, once for all who saved them."""

    def __init__(self) -> None:
        self.z: torch.Tensor | None = None
        self.first = 0
        self._made: torch.Tensor | None = None

    def again(self) -> torch.Tensor:
        if self._made is None:
            assert self.z is not None
            self._made = silu_columns(self.z, self.first)
        return self._made

    def drop(self) -> None:
        self._made = None


@dataclass(frozen=True, slots=True)
class Projection:
    """What a layer goes on with."""

    total: torch.Tensor
    """(T, D) x + delta"""
    gate: torch.Tensor
    """(T, first width), before its SiLU"""
    parts: tuple[torch.Tensor, ...]
    """after their SiLU, one for each further width; strided views"""
    packed: PackedGradient | None = None
    forgotten: Parts | None = None
    """where the parts are not to be kept"""


def without_keeping(projected: Projection) -> contextlib.AbstractContextManager[Any]:
    """Inside the block, whatever saves a view of the parts for its backward pass saves how to make it again."""
    source = projected.forgotten
    if source is None:
        return contextlib.nullcontext()
    memory = projected.parts[0].untyped_storage().data_ptr()

    def pack(x: torch.Tensor) -> Any:
        is_ours = x.untyped_storage().data_ptr() == memory
        return (x.shape, x.stride(), x.storage_offset()) if is_ours else x

    def unpack(kept: Any) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else source.again().as_strided(*kept)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def norm_projection_reference(
    x_TD: torch.Tensor,
    delta_TD: torch.Tensor | None,
    weight_DZ: torch.Tensor,
    widths: Sequence[int],
    *,
    norm: NormKind,
    eps: float,
) -> Projection:
    """The definition."""
    total = x_TD if delta_TD is None else x_TD + delta_TD
    gate, *parts = (normed(total, norm, eps) @ weight_DZ).split(list(widths), dim=1)
    return Projection(total, gate, tuple(silu(part) for part in parts))


def norm_projection(
    x_TD: torch.Tensor,
    delta_TD: torch.Tensor | None,
    weight_DZ: torch.Tensor,
    widths: Sequence[int],
    *,
    norm: NormKind,
    eps: float,
    recompute: bool = False,
) -> Projection:
    """The same by kernels, where there are any."""
    if not runs_kernels(x_TD):
        return norm_projection_reference(x_TD, delta_TD, weight_DZ, widths, norm=norm, eps=eps)
    is_eager = not torch.compiler.is_compiling()
    packed = PackedGradient(sum(widths)) if is_eager else None
    forgotten = Parts() if recompute and is_eager else None
    fp8 = takes_fp8(x_TD)
    options = _Options(tuple(widths), norm == "layer", eps, recompute, compute_type(x_TD), fp8, packed, forgotten)
    delta = None if delta_TD is None else delta_TD.contiguous()
    total, gate, *parts = _NormProjection.apply(x_TD.contiguous(), delta, weight_DZ, options)
    return Projection(total, gate, tuple(parts), packed, forgotten)


def normed(x: torch.Tensor, norm: NormKind, eps: float) -> torch.Tensor:
    """Norm of each row, without parameters."""
    return layer_norm(x, x.shape[1:], eps=eps) if norm == "layer" else rms_norm(x, x.shape[1:], eps=eps)


def weight_gradient(a_TM: torch.Tensor, b_TN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(M, N) sum over tokens of a and b, rounded once to the weight's own type."""
    if a_TM.is_cuda and a_TM.dtype != torch.float32 and dtype == torch.float32:
        return torch.mm(a_TM.T, b_TN, out_dtype=dtype)
    return (a_TM.T @ b_TN).to(dtype)


@dataclass(frozen=True, slots=True)
class _Options:
    widths: tuple[int, ...]
    centred: bool
    eps: float
    recompute: bool
    dtype: torch.dtype
    fp8: bool
    packed: PackedGradient | None
    forgotten: Parts | None


class _NormProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, options: _Options
    ) -> tuple[torch.Tensor, ...]:
        cast = weight.to(options.dtype)
        if delta is None:
            total = x.view_as(x)
            rows, mean, rstd = norm_rows(x, options.dtype, options.centred, options.eps, *NO_DROPOUT)
        else:
            total, rows, mean, rstd = add_norm_rows(x, delta, options.dtype, options.centred, options.eps, *NO_DROPOUT)
        z = product(rows, cast, fp8=options.fp8)
        first = options.widths[0]
        parts = silu_columns(z, first)
        if options.forgotten is not None:
            options.forgotten.z, options.forgotten.first = z, first
        ctx.options, ctx.weight_type = options, weight.dtype
        ctx.save_for_backward(total, mean, rstd, cast, z, None if options.recompute else rows)
        return total, z[:, :first], *parts.split(list(options.widths[1:]), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, mean, rstd, cast, z, rows = ctx.saved_tensors
        options: _Options = ctx.options
        grad_total, grad_gate, *grad_parts = grads
        if options.forgotten is not None:
            options.forgotten.drop()
        packed = options.packed or PackedGradient(sum(options.widths))
        grad_z = packed.take(grad_gate.to(z.dtype))
        first = options.widths[0]
        for grad in grad_parts:
            silu_columns_backward(_side_by_side(grad), z, grad_z, first)
            first += grad.shape[1]
        if rows is None:
            rows = norm_rows_again(total, mean, rstd, options.dtype, options.centred, *NO_DROPOUT)
        grad_weight = weight_gradient(rows, grad_z, ctx.weight_type)
        grad_rows = product(grad_z, cast.T, fp8=options.fp8)
        grad_x = norm_rows_backward(grad_rows, grad_total.contiguous(), total, mean, rstd, options.centred, *NO_DROPOUT)
        return grad_x, grad_x if ctx.needs_input_grad[1] else None, grad_weight, None


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
