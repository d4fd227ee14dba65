"""Fused layers: dropout, feed-forward, gated output and norm with projection.

Dropout whose mask is a pure function of (token key, site, channel), so that a sample may run anywhere.

    y[t, c] = x[t, c] / (1 - p)   where   u24(key[t], site, c) >= p * 2**24,   else 0

Legend: T tokens, D channels.

Residual sum, norm, projection and SiLU: the way into a layer.

    total      = x + delta                       delta: what the layer before has added; none before the first
    z          = norm(total) W                   one product for all parts
    gate       = z[:, :first width]              handed on before its SiLU, which gated_output applies
    parts      = silu(z[:, rest])                say values, queries, keys: views of one packed matrix

Kept for the backward pass: total, z, and the statistics of the norm; norm(total) and the parts are kept too unless
`recompute`. The gradients of the parts meet in one packed dz, written once.

Legend: T tokens, D model width, Z width of the projection.

Residual sum, RMS norm, dropout and gated feed-forward: the second stage of a FuXi block.

    total = x + delta
    a, b  = dropout(rms(total)) W1                 one product for both
    new   = (silu(a) * b) W2                       added to the residual by whoever comes next

Kept for the backward pass: total, [a, b] and the norm's statistics; the norm and silu(a) * b too unless `recompute`.

Legend: T tokens, D model width, F hidden width.

Norm, gate, dropout and output projection: the way out of a layer.

    gated = dropout(silu(gate) * norm(attended))       one norm over all parts of `attended`, side by side
    delta = gated W^T + b                               added to the residual by the next layer's norm_projection

`gate` comes before its SiLU (see norm_projection). Kept for the backward pass: attended, gate, the norm's statistics,
and `gated` unless `recompute`.

Legend: T tokens, D model width, U width of the gate.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import layer_norm, linear, rms_norm, silu

from nestrec.base.random import mix64, uniform24
from nestrec.ops.kernel_op import compute_type, runs_kernels
from nestrec.ops.layers.fp8 import fp8_product, product, takes_fp8
from nestrec.ops.layers.row_ops import (
    add_norm_rows,
    gate_rows,
    gate_rows_backward,
    like,
    norm_rows,
    norm_rows_again,
    norm_rows_backward,
    silu_columns,
    silu_columns_backward,
    swiglu,
    swiglu_backward,
)


@dataclass(frozen=True, slots=True)
class Dropout:
    """One dropout of a forward pass, as the kernels take it."""

    key_T: torch.Tensor
    """int64 keys of the tokens"""
    site: int
    """tells apart the dropouts of one forward pass"""
    probability: float

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return dropout(x_TD, self.key_T, self.site, self.probability)

    def arguments(self) -> tuple[torch.Tensor | None, int, int, float]:
        """(key or none, site key, threshold, scale) of the row kernels."""
        if self.probability == 0.0:
            return None, 0, 0, 1.0
        key = mix64(self.site)
        site = key - (1 << 64) if key >> 63 else key
        return self.key_T, site, _threshold(self.probability), 1.0 / (1.0 - self.probability)


def keep_mask(key_T: torch.Tensor, site: int, num_channels: int, probability: float) -> torch.Tensor:
    """(T, D) bool: True where a value is kept."""
    return uniform24(key_T, site, num_channels) >= _threshold(probability)


def dropout(x_TD: torch.Tensor, key_T: torch.Tensor, site: int, probability: float) -> torch.Tensor:
    """Dropout with the mask of `keep_mask`; `site` tells apart the dropouts of one forward pass."""
    if probability == 0.0:
        return x_TD
    keep = keep_mask(key_T, site, x_TD.shape[1], probability)
    return torch.where(keep, x_TD * (1.0 / (1.0 - probability)), 0.0)


def _threshold(probability: float) -> int:
    return round(probability * (1 << 24))


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


class RecomputedProjection:
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
    forgotten: RecomputedProjection | None = None
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
    forgotten = RecomputedProjection() if recompute and is_eager else None
    fp8 = takes_fp8(x_TD)
    options = _NormProjectionOptions(
        tuple(widths), norm == "layer", eps, recompute, compute_type(x_TD), fp8, packed, forgotten
    )
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
class _NormProjectionOptions:
    widths: tuple[int, ...]
    centred: bool
    eps: float
    recompute: bool
    dtype: torch.dtype
    fp8: bool
    packed: PackedGradient | None
    forgotten: RecomputedProjection | None


class _NormProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, options: _NormProjectionOptions
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
            options.forgotten.z = z
            options.forgotten.first = first
        ctx.options = options
        ctx.weight_type = weight.dtype
        ctx.save_for_backward(total, mean, rstd, cast, z, None if options.recompute else rows)
        return total, z[:, :first], *parts.split(list(options.widths[1:]), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, mean, rstd, cast, z, rows = ctx.saved_tensors
        options: _NormProjectionOptions = ctx.options
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


# ruff: noqa: PLR0917 - operators of torch take their arguments by position


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
    options = _FeedForwardOptions(eps, recompute, compute_type(x_TD), takes_fp8(x_TD), drop)
    total, new = _FeedForward.apply(x_TD.contiguous(), delta_TD.contiguous(), up_D2F, down_FD, options)
    return total, new


@dataclass(frozen=True, slots=True)
class _FeedForwardOptions:
    eps: float
    recompute: bool
    dtype: torch.dtype
    fp8: bool
    drop: Dropout


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        delta: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        options: _FeedForwardOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        up_cast = up.to(options.dtype)
        down_cast = down.to(options.dtype)
        total, rows, mean, rstd = add_norm_rows(x, delta, options.dtype, False, options.eps, *options.drop.arguments())
        z = product(rows, up_cast, fp8=options.fp8)
        hidden = swiglu(z)
        ctx.options = options
        ctx.types = (up.dtype, down.dtype)
        kept = (None, None) if options.recompute else (rows, hidden)
        ctx.save_for_backward(total, mean, rstd, up_cast, down_cast, z, *kept)
        return total, product(hidden, down_cast, fp8=options.fp8)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, mean, rstd, up, down, z, rows, hidden = ctx.saved_tensors
        options: _FeedForwardOptions = ctx.options
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
    options = _GatedOutputOptions(
        norm == "layer", eps, recompute, compute_type(gate_TU), takes_fp8(gate_TU), drop, packed
    )
    return _GatedOutput.apply(gate_TU, weight_DU, bias_D, options, *attended)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _GatedOutputOptions:
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
        ctx: Any,
        gate: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        options: _GatedOutputOptions,
        *parts: torch.Tensor,
    ) -> torch.Tensor:
        gated, mean, rstd = gate_rows(list(parts), gate, options.centred, options.eps, *options.drop.arguments())
        cast = weight.to(options.dtype)
        ctx.options = options
        ctx.types = (weight.dtype, bias.dtype)
        ctx.save_for_backward(gate, mean, rstd, cast, None if options.recompute else gated, *parts)
        if options.fp8:
            return fp8_product(gated.to(options.dtype), cast.T, bias.to(options.dtype))
        return linear(gated.to(options.dtype), cast, bias.to(options.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, mean, rstd, cast, gated, *parts = ctx.saved_tensors
        options: _GatedOutputOptions = ctx.options
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
