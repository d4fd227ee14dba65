"""HSTU attention over jagged sequences.

    out[i] = sum_{j seen by i} SiLU(q[i] . k[j] + bias[i, j]) / normaliser * v[j]        within each sequence

No softmax; the normaliser is a constant of the recipe. Plain causality sees j <= i; attention_mask.py defines the
rest. `hstu_attention_reference` is the definition, one sequence at a time; `hstu_attention_padded` computes the same
on one padded block, `hstu_attention_by_length` on several, of sequences that are about as long; `hstu_attention` takes
the kernels where there is a GPU, and blocks otherwise.

Legend: T tokens of all sequences, H heads, D head dimension, B sequences, N longest length.
"""

import itertools
from dataclasses import replace

import torch
from torch.nn.functional import silu

from nestrec.base.errors import UserError
from nestrec.jagged import offsets_of
from nestrec.ops.attention.attention_inputs import AttentionInputs
from nestrec.ops.attention.hstu_op import has_kernel, hstu_attention_kernel
from nestrec.ops.attention.mask_and_bias import PLAIN, AttentionMask, RelativeBias, rules_of_sequences, seen_weights
from nestrec.ops.kernel_op import runs_triton
from nestrec.ops.padding import from_blocks, padded_places, to_blocks

BLOCK_PAIRS = 1 << 16
"""Pairs of tokens in a block on a CPU: what is between two of its steps stays in the cache of a core."""
NO_BIAS = RelativeBias()


def hstu_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    offsets: torch.Tensor,
    *,
    max_length: int,
    normaliser: float,
    bias: RelativeBias = NO_BIAS,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """(T, H, D) attention of every token.

    offsets: (B + 1,) int64 bounds of the sequences, from 0 to T. max_length: the longest sequence of the batch or
    more, known on the host. Outputs and gradients are the same bits on every run, on every device.
    """
    _check(q_THD, k_THD, v_THD, offsets)
    _check_table(bias, max_length)
    inputs = AttentionInputs(offsets, max_length, normaliser, bias, rules)
    if runs_triton(q_THD) and has_kernel(q_THD, inputs):
        return hstu_attention_kernel(
            q_THD, k_THD, v_THD, offsets, max_length=max_length, normaliser=normaliser, bias=bias, rules=rules
        )
    if not q_THD.is_cuda and (offsets.numel() - 1) * max_length**2 > BLOCK_PAIRS:
        return hstu_attention_by_length(q_THD, k_THD, v_THD, offsets, normaliser=normaliser, bias=bias, rules=rules)
    return hstu_attention_padded(
        q_THD, k_THD, v_THD, offsets, max_length=max_length, normaliser=normaliser, bias=bias, rules=rules
    )


def hstu_attention_reference(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    offsets: torch.Tensor,
    *,
    normaliser: float,
    bias: RelativeBias = NO_BIAS,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """The definition: a loop over sequences."""
    outputs = []
    for b, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        scores_HNN = torch.einsum("ihd,jhd->hij", q_THD[start:end], k_THD[start:end])
        own_offsets = offsets[b : b + 2] - start
        own_rules = rules_of_sequences(rules, slice(b, b + 1))
        if not bias.is_empty:
            dense = _of_tokens(bias, slice(start, end)).dense(own_offsets, end - start, own_rules)
            scores_HNN = scores_HNN + dense.to(scores_HNN.dtype)
        weights_HNN = seen_weights(silu(scores_HNN), own_offsets, own_rules) / normaliser
        outputs.append(torch.einsum("hij,jhd->ihd", weights_HNN, v_THD[start:end]))
    return torch.cat(outputs) if outputs else torch.zeros_like(v_THD)


def hstu_attention_padded(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    offsets: torch.Tensor,
    *,
    max_length: int,
    normaliser: float,
    bias: RelativeBias = NO_BIAS,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """The same on padded blocks of `max_length`.

    Padding stands behind each sequence, where no token of it looks, so it needs no mask of its own.
    """
    place_T = padded_places(offsets, q_THD.shape[0], max_length)
    q, k, v = (to_blocks(x, place_T, offsets.numel() - 1, max_length) for x in (q_THD, k_THD, v_THD))
    scores_BHNN = q @ k.transpose(2, 3)
    if not bias.is_empty:
        scores_BHNN = scores_BHNN + bias.dense(offsets, max_length, rules).to(scores_BHNN.dtype)[:, None]
    weights_BHNN = seen_weights(silu(scores_BHNN), offsets, rules) / normaliser
    return from_blocks(weights_BHNN @ v, place_T)


def hstu_attention_by_length(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    offsets: torch.Tensor,
    *,
    normaliser: float,
    bias: RelativeBias = NO_BIAS,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """The same on blocks of at most `BLOCK_PAIRS`, each padded to its own longest sequence; on a CPU."""
    order_B = offsets.diff().argsort(stable=True)
    lengths_B = offsets.diff()[order_B]
    sorted_offsets = offsets_of(lengths_B)
    token_T = torch.arange(len(q_THD)) - (sorted_offsets[:-1] - offsets[order_B]).repeat_interleave(lengths_B)
    bounds = _block_bounds(lengths_B.tolist())
    tokens = sorted_offsets[bounds].tolist()
    blocks = [stop - start for start, stop in itertools.pairwise(tokens)]
    parts = [x_THD.index_select(0, token_T).split(blocks) for x_THD in (q_THD, k_THD, v_THD)]
    outputs = []
    for q, k, v, (first, end), start, stop in zip(
        *parts, itertools.pairwise(bounds), tokens[:-1], tokens[1:], strict=True
    ):
        outputs.append(
            hstu_attention_padded(
                q,
                k,
                v,
                sorted_offsets[first : end + 1] - start,
                max_length=int(lengths_B[end - 1]),
                normaliser=normaliser,
                bias=_of_tokens(bias, token_T[start:stop]),
                rules=rules_of_sequences(rules, order_B[first:end]),
            )
        )
    return torch.cat(outputs).index_select(0, token_T.argsort())


def _block_bounds(ascending_lengths: list[int]) -> list[int]:
    """Where blocks begin, and the end of the last: as many sequences as there is room for, at least one."""
    bounds = [0]
    for b, length in enumerate(ascending_lengths):
        if b > bounds[-1] and (b + 1 - bounds[-1]) * length**2 > BLOCK_PAIRS:
            bounds.append(b)
    return [*bounds, len(ascending_lengths)]


def _of_tokens(bias: RelativeBias, tokens: slice | torch.Tensor) -> RelativeBias:
    return replace(
        bias,
        time_T=None if bias.time_T is None else bias.time_T[tokens],
        query_time_T=None if bias.query_time_T is None else bias.query_time_T[tokens],
    )


def _check(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, offsets: torch.Tensor) -> None:
    shapes = [tuple(x.shape) for x in (q_THD, k_THD, v_THD)]
    if q_THD.dim() != 3 or len(set(shapes)) > 1:
        raise UserError(
            "queries, keys and values have one shape, (tokens, heads, head dimension)", option="q, k, v", value=shapes
        )
    if len({x.dtype for x in (q_THD, k_THD, v_THD)}) > 1:
        raise UserError(
            "queries, keys and values have one dtype", option="q, k, v", value=[x.dtype for x in (q_THD, k_THD, v_THD)]
        )
    if offsets.dim() != 1 or offsets.numel() < 1 or offsets.dtype != torch.int64:
        raise UserError(
            "offsets are int64 bounds, one more than sequences", option="offsets", value=(offsets.shape, offsets.dtype)
        )


def _check_table(bias: RelativeBias, max_length: int) -> None:
    table = bias.position_table
    if table is not None and table.numel() < 2 * max_length - 1:
        raise UserError(
            f"the table has no value for distances of sequences of {max_length} tokens",
            option="position_table",
            value=table.numel(),
            remedy=f"give at least {2 * max_length - 1} values",
        )
