"""Fused transformer layers: dropout, norm with projection, gated feed-forward, and gated output projection.

Layers with `recompute` save fewer activations and recompute them in backward (activation checkpointing).

`Dropout`: the mask is a pure function of (token key, site, channel), so it does not depend on the rank or the batch in
which a sample is computed.

    y[t, c] = x[t, c] / (1 - p)   if   u24(key[t], site, c) >= p * 2**24,   else 0

`norm_projection`: residual sum, norm, projection and SiLU at the input of a layer.

    total      = x + delta                       delta: output of the previous layer; None for the first layer
    z          = norm(total) W                   one matrix product for all parts
    gate       = z[:, :first width]              returned before its SiLU, which gated_output applies
    parts      = silu(z[:, rest])                for example values, queries, keys: views of one contiguous matrix

Saved for backward: total, z, and the statistics of the norm; also norm(total) and the parts unless `recompute`. The
gradients of the parts are written directly into one contiguous dz.

`feed_forward`: residual sum, RMS norm, dropout and SwiGLU feed-forward, the second stage of a FuXi block.

    total = x + delta
    a, b  = dropout(rms(total)) W1                 one matrix product for both
    new   = (silu(a) * b) W2                       added to the residual by the next layer

Saved for backward: total, [a, b] and the statistics of the norm; also the norm and silu(a) * b unless `recompute`.

`gated_output`: norm, gate, dropout and output projection at the output of a layer.

    gated = dropout(silu(gate) * norm(attended))       one norm over all concatenated parts of `attended`
    delta = gated W^T + b                               added to the residual by the next layer's norm_projection

`gate` is the value before its SiLU (see `norm_projection`). Saved for backward: attended, gate, the statistics of the
norm; also `gated` unless `recompute`.

Legend: T tokens, D model width (channels), Z width of the projection, F hidden width, U width of the gate.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import layer_norm, linear, rms_norm, silu

from nestrec.base.random import mix64, uniform24
from nestrec.ops.kernel_op import compute_type, runs_kernels
from nestrec.ops.layers.fp8 import fp8_matmul, matmul, uses_fp8
from nestrec.ops.layers.row_ops import (
    add_norm_rows,
    gate_rows,
    gate_rows_backward,
    like,
    norm_rows,
    norm_rows_backward,
    recompute_norm_rows,
    silu_columns,
    silu_columns_backward,
    swiglu,
    swiglu_backward,
)


@dataclass(frozen=True, slots=True)
class Dropout:
    """Deterministic dropout at one site of a forward pass."""

    key_T: torch.Tensor
    """(T,) int64 random key of each token."""
    site: int
    """Number that distinguishes the dropouts of one forward pass."""
    probability: float
    """Probability that a value is set to 0."""

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return dropout(x_TD, self.key_T, self.site, self.probability)

    def arguments(self) -> tuple[torch.Tensor | None, int, int, float]:
        """Return the arguments of the row kernels: (key or None, site key, threshold, scale)."""
        if self.probability == 0.0:
            return None, 0, 0, 1.0
        key = mix64(self.site)
        site = key - (1 << 64) if key >> 63 else key
        return self.key_T, site, _threshold(self.probability), 1.0 / (1.0 - self.probability)


def keep_mask(key_T: torch.Tensor, site: int, num_channels: int, probability: float) -> torch.Tensor:
    """Return the (T, D) bool dropout mask: True where a value is kept."""
    return uniform24(key_T, site, num_channels) >= _threshold(probability)


def dropout(x_TD: torch.Tensor, key_T: torch.Tensor, site: int, probability: float) -> torch.Tensor:
    """Apply dropout with the mask of `keep_mask`; `site` distinguishes the dropouts of one forward pass."""
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
    """Buffer for the gradient of a full projection, shared by `gated_output` and `norm_projection`.

    `gated_output` writes the gradient of the gate to its first columns and `norm_projection` the rest, without a copy.
    """

    width: int
    """Width of the projection."""
    buffer: torch.Tensor | None = None
    """(T, width) buffer, between the two backward passes; otherwise None."""

    def gate_columns(self, gate: torch.Tensor) -> torch.Tensor:
        """Allocate the buffer and return its first columns for the gradient of `gate`."""
        self.buffer = gate.new_empty(gate.shape[0], self.width)
        return self.buffer[:, : gate.shape[1]]

    def take(self, grad_gate: torch.Tensor) -> torch.Tensor:
        """Return a buffer that starts with `grad_gate`: the allocated one if `grad_gate` is part of it, else a copy."""
        buffer, self.buffer = self.buffer, None
        if buffer is None or buffer.data_ptr() != grad_gate.data_ptr() or grad_gate.stride(0) != self.width:
            buffer = grad_gate.new_empty(grad_gate.shape[0], self.width)
            buffer[:, : grad_gate.shape[1]] = grad_gate
        return buffer


class RecomputedProjection:
    """Parts of a projection that are recomputed from z in backward, once for all operators that saved them."""

    def __init__(self) -> None:
        self.z: torch.Tensor | None = None
        self.first = 0
        self._parts: torch.Tensor | None = None

    def recompute(self) -> torch.Tensor:
        if self._parts is None:
            assert self.z is not None
            self._parts = silu_columns(self.z, self.first)
        return self._parts

    def release(self) -> None:
        self._parts = None


@dataclass(frozen=True, slots=True)
class Projection:
    """Result of `norm_projection`."""

    total: torch.Tensor
    """(T, D) residual sum x + delta."""
    gate: torch.Tensor
    """(T, first width) gate before its SiLU."""
    parts: tuple[torch.Tensor, ...]
    """Parts after their SiLU, one per further width, as strided views."""
    packed: PackedGradient | None = None
    """Gradient buffer to pass to `gated_output`; None under torch.compile and in the reference implementation."""
    recomputed: RecomputedProjection | None = None
    """Source for recomputing the parts in backward; None if the parts are saved."""


def recompute_saved_parts(projected: Projection) -> contextlib.AbstractContextManager[Any]:
    """Make operators within the context save a recipe for recomputing views of the parts, instead of the views."""
    source = projected.recomputed
    if source is None:
        return contextlib.nullcontext()
    memory = projected.parts[0].untyped_storage().data_ptr()

    def pack(x: torch.Tensor) -> Any:
        is_part = x.untyped_storage().data_ptr() == memory
        return (x.shape, x.stride(), x.storage_offset()) if is_part else x

    def unpack(saved: Any) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else source.recompute().as_strided(*saved)

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
    """Reference implementation of `norm_projection`."""
    total = x_TD if delta_TD is None else x_TD + delta_TD
    gate, *parts = (apply_norm(total, norm, eps) @ weight_DZ).split(list(widths), dim=1)
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
    """Compute the residual sum, norm, projection and SiLU at the input of a layer.

    Uses Triton kernels if they are available, otherwise the reference implementation.

    Args:
        x_TD: Residual stream.
        delta_TD: Output of the previous layer; None for the first layer.
        weight_DZ: Projection weights.
        widths: Widths of the gate and of the parts; they sum to Z.
        norm: Layer norm or RMS norm, without parameters.
        eps: Epsilon of the norm.
        recompute: Recompute the norm and the parts in backward instead of saving them.
    """
    if not runs_kernels(x_TD):
        return norm_projection_reference(x_TD, delta_TD, weight_DZ, widths, norm=norm, eps=eps)
    is_eager = not torch.compiler.is_compiling()
    packed = PackedGradient(sum(widths)) if is_eager else None
    forgotten = RecomputedProjection() if recompute and is_eager else None
    fp8 = uses_fp8(x_TD)
    options = _NormProjectionOptions(
        tuple(widths), norm == "layer", eps, recompute, compute_type(x_TD), fp8, packed, forgotten
    )
    delta = None if delta_TD is None else delta_TD.contiguous()
    total, gate, *parts = _NormProjection.apply(x_TD.contiguous(), delta, weight_DZ, options)
    return Projection(total, gate, tuple(parts), packed, forgotten)


def apply_norm(x: torch.Tensor, norm: NormKind, eps: float) -> torch.Tensor:
    """Normalize each row (layer norm or RMS norm without parameters)."""
    return layer_norm(x, x.shape[1:], eps=eps) if norm == "layer" else rms_norm(x, x.shape[1:], eps=eps)


def weight_gradient(a_TM: torch.Tensor, b_TN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the (M, N) weight gradient a^T b, rounded once to the dtype of the weight."""
    if a_TM.is_cuda and a_TM.dtype != torch.float32 and dtype == torch.float32:
        return torch.mm(a_TM.T, b_TN, out_dtype=dtype)
    return (a_TM.T @ b_TN).to(dtype)


@dataclass(frozen=True, slots=True)
class _NormProjectionOptions:
    widths: tuple[int, ...]
    centered: bool
    eps: float
    recompute: bool
    dtype: torch.dtype
    fp8: bool
    packed: PackedGradient | None
    recomputed: RecomputedProjection | None


class _NormProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, options: _NormProjectionOptions
    ) -> tuple[torch.Tensor, ...]:
        cast = weight.to(options.dtype)
        if delta is None:
            total = x.view_as(x)
            rows, mean, rstd = norm_rows(x, options.dtype, options.centered, options.eps, *NO_DROPOUT)
        else:
            total, rows, mean, rstd = add_norm_rows(x, delta, options.dtype, options.centered, options.eps, *NO_DROPOUT)
        z = matmul(rows, cast, fp8=options.fp8)
        first = options.widths[0]
        parts = silu_columns(z, first)
        if options.recomputed is not None:
            options.recomputed.z = z
            options.recomputed.first = first
        ctx.options = options
        ctx.weight_type = weight.dtype
        ctx.save_for_backward(total, mean, rstd, cast, z, None if options.recompute else rows)
        return total, z[:, :first], *parts.split(list(options.widths[1:]), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, mean, rstd, cast, z, rows = ctx.saved_tensors
        options: _NormProjectionOptions = ctx.options
        grad_total, grad_gate, *grad_parts = grads
        if options.recomputed is not None:
            options.recomputed.release()
        packed = options.packed or PackedGradient(sum(options.widths))
        grad_z = packed.take(grad_gate.to(z.dtype))
        first = options.widths[0]
        for grad in grad_parts:
            silu_columns_backward(_with_contiguous_rows(grad), z, grad_z, first)
            first += grad.shape[1]
        if rows is None:
            rows = recompute_norm_rows(total, mean, rstd, options.dtype, options.centered, *NO_DROPOUT)
        grad_weight = weight_gradient(rows, grad_z, ctx.weight_type)
        grad_rows = matmul(grad_z, cast.T, fp8=options.fp8)
        grad_x = norm_rows_backward(
            grad_rows, grad_total.contiguous(), total, mean, rstd, options.centered, *NO_DROPOUT
        )
        return grad_x, grad_x if ctx.needs_input_grad[1] else None, grad_weight, None


def _with_contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


# ruff: noqa: PLR0917 - torch operators have positional arguments


def feed_forward_reference(
    x_TD: torch.Tensor,
    delta_TD: torch.Tensor,
    up_D2F: torch.Tensor,
    down_FD: torch.Tensor,
    drop: Dropout,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference implementation of `feed_forward`."""
    total = x_TD + delta_TD
    a, b = (drop(apply_norm(total, "rms", eps)) @ up_D2F).chunk(2, dim=1)
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
    """Compute the residual sum, RMS norm, dropout and SwiGLU feed-forward of a layer.

    Uses Triton kernels if they are available, otherwise the reference implementation.

    Args:
        x_TD: Residual stream.
        delta_TD: Output of the previous stage.
        up_D2F: Weights of both input projections.
        down_FD: Weights of the output projection.
        drop: Dropout after the norm.
        eps: Epsilon of the norm.
        recompute: Recompute the norm and the hidden activations in backward instead of saving them.

    Returns:
        (T, D) residual sum, and (T, D) delta to add to it.
    """
    if not runs_kernels(x_TD):
        return feed_forward_reference(x_TD, delta_TD, up_D2F, down_FD, drop, eps=eps)
    options = _FeedForwardOptions(eps, recompute, compute_type(x_TD), uses_fp8(x_TD), drop)
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
        z = matmul(rows, up_cast, fp8=options.fp8)
        hidden = swiglu(z)
        ctx.options = options
        ctx.types = (up.dtype, down.dtype)
        saved = (None, None) if options.recompute else (rows, hidden)
        ctx.save_for_backward(total, mean, rstd, up_cast, down_cast, z, *saved)
        return total, matmul(hidden, down_cast, fp8=options.fp8)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, mean, rstd, up, down, z, rows, hidden = ctx.saved_tensors
        options: _FeedForwardOptions = ctx.options
        grad_total, grad_new = grads[0].contiguous(), grads[1].to(options.dtype).contiguous()
        grads_and_hidden = swiglu_backward(matmul(grad_new, down.T, fp8=options.fp8), z, hidden is None)
        grad_z, hidden = grads_and_hidden[0], grads_and_hidden[1] if hidden is None else hidden
        grad_down = weight_gradient(hidden, grad_new, ctx.types[1])
        drop = options.drop.arguments()
        if rows is None:
            rows = recompute_norm_rows(total, mean, rstd, options.dtype, False, *drop)
        grad_up = weight_gradient(rows, grad_z, ctx.types[0])
        grad_x = norm_rows_backward(matmul(grad_z, up.T, fp8=options.fp8), grad_total, total, mean, rstd, False, *drop)
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
    """Reference implementation of `gated_output`; any number of parts whose total width is that of the gate."""
    concatenated = attended[0] if len(attended) == 1 else torch.cat(list(attended), dim=1)
    return linear(drop(silu(gate_TU) * apply_norm(concatenated, norm, eps)), weight_DU, bias_D)


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
    """Compute the norm, gate, dropout and output projection of a layer.

    Uses Triton kernels if they are available, otherwise the reference implementation.

    Args:
        attended: One to three attention outputs of equal width, together as wide as the gate.
        gate_TU: Gate before its SiLU, from `norm_projection`.
        weight_DU: Weights of the output projection.
        bias_D: Bias of the output projection.
        drop: Dropout after the gate.
        norm: Layer norm or RMS norm, without parameters.
        eps: Epsilon of the norm.
        recompute: Recompute the gated rows in backward instead of saving them.
        packed: Gradient buffer of the projection that computed the gate (`Projection.packed`); without it the gradient
            of the gate is copied once more.

    Returns:
        (T, D) delta to add to the residual stream.
    """
    if not runs_kernels(gate_TU):
        return gated_output_reference(attended, gate_TU, weight_DU, bias_D, drop, norm=norm, eps=eps)
    options = _GatedOutputOptions(
        norm == "layer", eps, recompute, compute_type(gate_TU), uses_fp8(gate_TU), drop, packed
    )
    return _GatedOutput.apply(gate_TU, weight_DU, bias_D, options, *attended)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _GatedOutputOptions:
    centered: bool
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
        gated, mean, rstd = gate_rows(list(parts), gate, options.centered, options.eps, *options.drop.arguments())
        cast = weight.to(options.dtype)
        ctx.options = options
        ctx.types = (weight.dtype, bias.dtype)
        ctx.save_for_backward(gate, mean, rstd, cast, None if options.recompute else gated, *parts)
        if options.fp8:
            return fp8_matmul(gated.to(options.dtype), cast.T, bias.to(options.dtype))
        return linear(gated.to(options.dtype), cast, bias.to(options.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, mean, rstd, cast, gated, *parts = ctx.saved_tensors
        options: _GatedOutputOptions = ctx.options
        grad = grads[0].to(options.dtype).contiguous()
        packed = options.packed
        grad_gate = gate.new_empty(gate.shape) if packed is None else packed.gate_columns(gate)
        grad_parts = [like(part) for part in parts]
        recomputed = None if gated is not None else like(gate)
        gate_rows_backward(
            matmul(grad, cast, fp8=options.fp8),
            parts,
            gate,
            mean,
            rstd,
            grad_gate,
            grad_parts,
            recomputed,
            options.centered,
            *options.drop.arguments(),
        )
        gated = recomputed if recomputed is not None else gated
        grad_weight = weight_gradient(grad, gated.to(options.dtype), ctx.types[0])
        grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.types[1])
        return grad_gate, grad_weight, grad_bias, None, *grad_parts
