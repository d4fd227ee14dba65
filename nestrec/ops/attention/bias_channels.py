"""Attention whose weights are learned values of the distance or the time between tokens: FuXi's further channels.

    positional[i] = sum_{j seen by i} position[j - i + centre] * v[j]
    temporal[i]   = sum_{j seen by i} time[bucket(query_time[i] - time[j])] * v[j]          within each sequence
                    or b(query_time[i] - time[j]) of time_function.py in place of the value of the bucket

Plain causality sees j <= i; mask.py defines the rest, of which kernels know windows and prefixes that do not look
ahead. Weights are shared by the heads, so the values are taken as plain rows.

Legend: T tokens, W channels of all heads, B sequences, N longest length.
"""

# ruff: noqa: PLR0917 - operators of torch take their arguments by position

import itertools
from dataclasses import replace
from typing import Any

import torch

from nestrec.ops.attention.bias_products import (
    BLOCK,
    bias_function_gradient,
    bias_position_gradient,
    bias_product,
    bias_time_gradient,
)
from nestrec.ops.attention.mask import PLAIN, AttentionRules, rules_of_sequences, seen_weights
from nestrec.ops.attention.relative_bias import RelativeBias
from nestrec.ops.kernel_op import runs_kernels
from nestrec.ops.padding import padded_places


def bias_attention_reference(
    v_TW: torch.Tensor, offsets: torch.Tensor, bias: RelativeBias, rules: AttentionRules = PLAIN
) -> list[torch.Tensor]:
    """The definition: (positional, and temporal where the bias has a time), a loop over sequences."""
    found = []
    for channel in _channels(bias):
        outputs = []
        for b, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
            own = channel if not channel.has_time else _of_tokens(channel, slice(start, end))
            own_rules, own_offsets = rules_of_sequences(rules, slice(b, b + 1)), offsets[b : b + 2] - start
            weights_NN = seen_weights(own.dense(own_offsets, end - start, own_rules), own_offsets, own_rules)[0]
            outputs.append(weights_NN.to(v_TW.dtype) @ v_TW[start:end])
        found.append(torch.cat(outputs) if outputs else torch.zeros_like(v_TW))
    return found


def bias_attention_padded(
    v_TW: torch.Tensor, offsets: torch.Tensor, bias: RelativeBias, *, max_length: int, rules: AttentionRules = PLAIN
) -> list[torch.Tensor]:
    """The same on padded blocks."""
    return [_channel_padded(v_TW, offsets, channel, max_length, rules) for channel in _channels(bias)]


def _channel_padded(
    v_TW: torch.Tensor, offsets: torch.Tensor, channel: RelativeBias, max_length: int, rules: AttentionRules = PLAIN
) -> torch.Tensor:
    place_T, shape = padded_places(offsets, len(v_TW), max_length), (offsets.numel() - 1, max_length, v_TW.shape[1])
    flat = v_TW.new_zeros(shape[0] * shape[1], shape[2]).index_copy(0, place_T, v_TW)
    weights_BNN = seen_weights(channel.dense(offsets, max_length, rules), offsets, rules).to(v_TW.dtype)
    return (weights_BNN @ flat.view(shape)).flatten(0, 1).index_select(0, place_T)


def bias_attention(
    v_TW: torch.Tensor, offsets: torch.Tensor, bias: RelativeBias, *, max_length: int, rules: AttentionRules = PLAIN
) -> list[torch.Tensor]:
    """(positional, and temporal where the bias has a time), by kernels where there are any.

    bias: has a position table. max_length: the longest sequence of the batch or more, known on the host.
    """
    assert bias.position_table is not None
    if not runs_kernels(v_TW) or rules.is_square or rules.num_targets_B is not None:
        return bias_attention_padded(v_TW, offsets, bias, max_length=max_length, rules=rules)
    found = _BiasAttention.apply(
        v_TW,
        bias.position_table,
        bias.time_table,
        bias.time_function,
        offsets,
        bias.time_T,
        bias.query_time_T,
        bias.buckets,
        (max_length, rules.max_attention_length or 0, rules.num_context),
    )
    return list(found)


def _channels(bias: RelativeBias) -> list[RelativeBias]:
    by_position = RelativeBias(position_table=bias.position_table)
    return [by_position] if not bias.has_time else [by_position, replace(bias, position_table=None)]


def _of_tokens(bias: RelativeBias, tokens: slice) -> RelativeBias:
    assert bias.time_T is not None
    assert bias.query_time_T is not None
    return replace(bias, time_T=bias.time_T[tokens], query_time_T=bias.query_time_T[tokens])


class _BiasAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        v: torch.Tensor,
        position: torch.Tensor,
        time_table: torch.Tensor | None,
        time_function: torch.Tensor | None,
        offsets: torch.Tensor,
        time: torch.Tensor | None,
        query_time: torch.Tensor | None,
        buckets: torch.Tensor | None,
        sizes: tuple[int, int, int],
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(v, position, time_table, time_function, offsets, time, query_time, buckets)
        ctx.sizes = sizes
        shared = (position, time_table, time_function, offsets, time, query_time, buckets, *sizes, False)
        by_position = bias_product(v, None, *shared)
        has_time = time_table is not None or time_function is not None
        return (by_position, bias_product(None, v, *shared)) if has_time else (by_position,)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        v, position, time_table, time_function, offsets, time, query_time, buckets = ctx.saved_tensors
        sizes: tuple[int, int, int] = ctx.sizes
        max_length, seen = sizes[0], sizes[1:]
        by_position, *by_time = [grad.to(v.dtype).contiguous() for grad in grads]
        own_time = by_time[0] if by_time else None
        grad_v = bias_product(
            by_position,
            own_time,
            position,
            time_table,
            time_function,
            offsets,
            time,
            query_time,
            buckets,
            max_length,
            *seen,
            True,
        )
        grad_position = _position_gradient(by_position, v, position, offsets, sizes)
        grad_time, grad_function = None, None
        if own_time is not None and time_function is not None:
            grad_function = bias_function_gradient(own_time, v, time_function, offsets, time, query_time, *seen)
        elif own_time is not None:
            shared = (own_time, v, offsets, time, query_time, buckets)
            found = bias_time_gradient(*shared, max_length, *seen, len(time_table))
            grad_time = found.to(time_table.dtype)
        return grad_v, grad_position, grad_time, grad_function, None, None, None, None, None


def _position_gradient(
    grad: torch.Tensor, v: torch.Tensor, table: torch.Tensor, offsets: torch.Tensor, sizes: tuple[int, int, int]
) -> torch.Tensor:
    """Diagonals of tiles to places of the table: that of distance d is centre - d."""
    by_distance = bias_position_gradient(grad, v, offsets, *sizes)
    num_blocks = len(by_distance)
    upper = torch.zeros(num_blocks + 1, BLOCK, dtype=torch.float32, device=grad.device)
    # Slot BLOCK + e of block k is the distance k * BLOCK + e, for e from -BLOCK to BLOCK - 1.
    upper[:num_blocks] += by_distance[:, BLOCK:]
    upper[: num_blocks - 1] += by_distance[1:, :BLOCK]
    centre = (len(table) - 1) // 2
    count = min(upper.numel(), centre + 1)
    found = torch.zeros(len(table), dtype=torch.float32, device=grad.device)
    found[centre - count + 1 : centre + 1] = upper.flatten()[:count].flip(0)
    return found.to(table.dtype)
