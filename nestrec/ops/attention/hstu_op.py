"""HSTU attention as a PyTorch custom operator with a registered fake kernel and autograd formula.

torch.compile treats the operator as opaque. The Triton kernels are imported on the first call, so that importing this
module does not require Triton.
"""

from collections.abc import Sequence
from typing import Any

import torch

from nestrec.ops.attention.attention_inputs import (
    LARGEST_HEAD,
    OPTIONS_SCHEMA,
    AttentionInputs,
    AttentionOptions,
    attention_options,
)
from nestrec.ops.attention.mask_and_bias import AttentionMask, RelativeBias
from nestrec.ops.kernel_op import compute_type, kernel_op, runs_triton

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def has_kernel(q_THD: torch.Tensor, inputs: AttentionInputs) -> bool:
    """Return whether a kernel supports these inputs; a time function is supported by the Hopper kernels only."""
    if q_THD.dtype not in KERNEL_DTYPES or q_THD.shape[2] > LARGEST_HEAD:
        return False
    if inputs.bias.time_function is None:
        return True
    from nestrec.ops.attention.hstu_passes import supports_time_function

    return supports_time_function(q_THD, inputs)


def batch_buckets(
    x_TD: torch.Tensor, offsets: torch.Tensor, max_length: int, bias: RelativeBias
) -> torch.Tensor | None:
    """Compute the time buckets of all token pairs of a batch once for all layers, for `RelativeBias.buckets`.

    Args:
        x_TD: Token vectors of the model; their device and dtype decide which kernels run.
        offsets: Bounds of the sequences, (B + 1,) int64.
        max_length: Upper bound on the sequence lengths of the batch.
        bias: Bias with a time table and event times.

    Returns:
        The buckets in tiles (see pair_tiles.py), or None if the kernels for these inputs would not read them.
    """
    if bias.time_table is None or bias.time_T is None or bias.query_time_T is None:
        return None
    if not runs_triton(x_TD) or compute_type(x_TD) not in KERNEL_DTYPES[:2]:
        return None
    from nestrec.ops.attention.hstu_passes import reads_buckets

    if not reads_buckets(offsets, len(x_TD), max_length, bias):
        return None
    return _pair_buckets(bias.time_T, bias.query_time_T, offsets, max_length, bias.time_table.numel() - 1)


def hstu_attention_kernel(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    offsets: torch.Tensor,
    *,
    max_length: int,
    normalizer: float,
    bias: RelativeBias,
    rules: AttentionMask,
) -> torch.Tensor:
    """Compute `hstu_attention` with kernels, on a GPU or on any device under Triton's interpreter."""
    options = attention_options(bias, rules)
    return _forward(q_THD, k_THD, v_THD, offsets, *options, max_length, normalizer)


def _buckets_shape(
    time_T: torch.Tensor, query_time_T: torch.Tensor, offsets: torch.Tensor, max_length: int, num_buckets: int
) -> torch.Tensor:
    from nestrec.ops.attention.pair_tiles import SIDE, max_tiles

    tiles = max_tiles(time_T.numel(), offsets.numel() - 1, max_length, is_square=False)
    return torch.empty(tiles, SIDE, SIDE, dtype=torch.uint8, device=time_T.device)


@kernel_op("pair_buckets", fake=_buckets_shape)
def _pair_buckets(
    time_T: torch.Tensor, query_time_T: torch.Tensor, offsets: torch.Tensor, max_length: int, num_buckets: int
) -> torch.Tensor:
    from nestrec.ops.attention.pair_tiles import pair_buckets, plan_tiles

    with torch.cuda.device_of(time_T):
        plan, _ = plan_tiles(offsets, time_T.numel(), max_length, is_square=False)
        return pair_buckets(time_T, query_time_T, offsets, plan, num_buckets)


def _forward_shape(q_THD: torch.Tensor, *_: Any) -> torch.Tensor:
    return q_THD.new_empty(q_THD.shape)


_ARGUMENTS = (
    f"Tensor q_THD, Tensor k_THD, Tensor v_THD, Tensor offsets, {OPTIONS_SCHEMA}, SymInt max_length, float normalizer"
)
"""Arguments of both passes, flattened because PyTorch operators do not accept structs."""
_NUM_VECTORS = 3
_LEARNED = slice(4, 7)
"""Indices of the learned biases (two tables and the time function) among the arguments."""
_NUM_TENSORS = 4 + AttentionOptions._fields.index("num_context")
"""Number of tensor arguments, which come before all others."""


def _unflatten(arguments: Sequence[Any]) -> tuple[list[torch.Tensor], AttentionInputs]:
    """Return queries, keys and values as a list, and all other inputs of a pass."""
    *vectors, offsets = arguments[: _NUM_VECTORS + 1]
    *flat, max_length, normalizer = arguments[_NUM_VECTORS + 1 :]
    options = AttentionOptions(*flat)
    return vectors, AttentionInputs(offsets, max_length, normalizer, options.bias, options.rules)


def _backward_shapes(grad_THD: torch.Tensor, *inputs: Any) -> list[torch.Tensor]:
    differentiable = (*inputs[:_NUM_VECTORS], *inputs[_LEARNED])
    return [grad_THD.new_empty(0) if x is None else x.new_empty(x.shape) for x in differentiable]


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS])
    ctx.constants = inputs[_NUM_TENSORS:]


def _gradients(ctx: Any, grad_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    # Call through the dispatcher: the compiler traces this function after is_compiling() has become false.
    dq, dk, dv, *biases = torch.ops.nestrec.hstu_attention_backward(grad_THD, *ctx.saved_tensors, *ctx.constants)
    learned = ctx.saved_tensors[_LEARNED]
    bias_gradients = (None if bias is None else grad for bias, grad in zip(learned, biases, strict=True))
    num_others = len(ctx.saved_tensors) - _LEARNED.stop + len(ctx.constants)
    return dq, dk, dv, None, *bias_gradients, *(None,) * num_others


@kernel_op("hstu_attention", fake=_forward_shape, gradients=_gradients, save=_save, schema=f"({_ARGUMENTS}) -> Tensor")
def _forward(*arguments: Any) -> torch.Tensor:
    from nestrec.ops.attention.hstu_passes import forward_pass

    (q_THD, k_THD, v_THD), inputs = _unflatten(arguments)
    with torch.cuda.device_of(q_THD):
        return forward_pass(q_THD, k_THD, v_THD, inputs)


@kernel_op("hstu_attention_backward", fake=_backward_shapes, schema=f"(Tensor grad_THD, {_ARGUMENTS}) -> Tensor[]")
def _backward(grad_THD: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    from nestrec.ops.attention.hstu_passes import backward_pass

    (q_THD, k_THD, v_THD), inputs = _unflatten(arguments)
    with torch.cuda.device_of(q_THD):
        gradients = backward_pass(grad_THD, q_THD, k_THD, v_THD, inputs)
    # An operator returns tensors only, so an absent bias gets an empty gradient.
    return [grad_THD.new_empty(0) if x is None else x for x in gradients]
