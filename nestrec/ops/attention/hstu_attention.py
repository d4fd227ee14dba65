"""HSTU attention over jagged sequences.

    out[i] = sum_{j seen by i} SiLU(q[i] . k[j] + bias[i, j]) / normalizer * v[j]        within each sequence

There is no softmax; the normalizer is a constant of the model. A causal mask sees j <= i; mask_and_bias.py defines
the other masks. `hstu_attention` is the entry point: it runs the Triton kernels on a GPU and padded blocks otherwise.

- `hstu_attention_reference`: reference implementation, one sequence at a time.
- `hstu_attention_padded`: one padded block for the whole batch.
- `hstu_attention_by_length`: several padded blocks of sequences of similar length, for the CPU.

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
from nestrec.ops.attention.mask_and_bias import PLAIN, AttentionMask, RelativeBias, mask_of_sequences, masked_weights
from nestrec.ops.kernel_op import runs_triton
from nestrec.ops.padding import from_blocks, padded_indices, to_blocks

BLOCK_PAIRS = 1 << 16
"""Maximum number of token pairs per block on a CPU, so that intermediate results stay in the cache of a core."""
NO_BIAS = RelativeBias()


def hstu_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    offsets: torch.Tensor,
    *,
    max_length: int,
    normalizer: float,
    bias: RelativeBias = NO_BIAS,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """Compute HSTU attention over jagged sequences.

    Outputs and gradients are deterministic: bitwise identical on every run on the same device.

    Args:
        q_THD: Queries, (T, H, D).
        k_THD: Keys, same shape and dtype as the queries.
        v_THD: Values, same shape and dtype as the queries.
        offsets: Bounds of the sequences from 0 to T, (B + 1,) int64.
        max_length: Upper bound on the sequence lengths of the batch, known on the host.
        normalizer: Constant that divides the sums.
        bias: Relative position and time bias, shared by the heads.
        rules: Attention mask.

    Returns:
        Attention output of every token, (T, H, D).

    Raises:
        UserError: Shapes or dtypes differ, or the position table is too short for `max_length`.
    """
    _check(q_THD, k_THD, v_THD, offsets)
    _check_table(bias, max_length)
    inputs = AttentionInputs(offsets, max_length, normalizer, bias, rules)
    if runs_triton(q_THD) and has_kernel(q_THD, inputs):
        return hstu_attention_kernel(
            q_THD, k_THD, v_THD, offsets, max_length=max_length, normalizer=normalizer, bias=bias, rules=rules
        )
    if not q_THD.is_cuda and (offsets.numel() - 1) * max_length**2 > BLOCK_PAIRS:
        return hstu_attention_by_length(q_THD, k_THD, v_THD, offsets, normalizer=normalizer, bias=bias, rules=rules)
    return hstu_attention_padded(
        q_THD, k_THD, v_THD, offsets, max_length=max_length, normalizer=normalizer, bias=bias, rules=rules
    )


def hstu_attention_reference(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    offsets: torch.Tensor,
    *,
    normalizer: float,
    bias: RelativeBias = NO_BIAS,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """Reference implementation of `hstu_attention`: loops over sequences."""
    outputs = []
    for b, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        scores_HNN = torch.einsum("ihd,jhd->hij", q_THD[start:end], k_THD[start:end])
        own_offsets = offsets[b : b + 2] - start
        own_rules = mask_of_sequences(rules, slice(b, b + 1))
        if not bias.is_empty:
            dense = _of_tokens(bias, slice(start, end)).dense(own_offsets, end - start, own_rules)
            scores_HNN = scores_HNN + dense.to(scores_HNN.dtype)
        weights_HNN = masked_weights(silu(scores_HNN), own_offsets, own_rules) / normalizer
        outputs.append(torch.einsum("hij,jhd->ihd", weights_HNN, v_THD[start:end]))
    return torch.cat(outputs) if outputs else torch.zeros_like(v_THD)


def hstu_attention_padded(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    offsets: torch.Tensor,
    *,
    max_length: int,
    normalizer: float,
    bias: RelativeBias = NO_BIAS,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """Compute `hstu_attention` on one block that pads every sequence to `max_length`.

    Padding follows each sequence and the attention mask hides it from all tokens, so it needs no mask of its own.
    """
    index_T = padded_indices(offsets, q_THD.shape[0], max_length)
    q, k, v = (to_blocks(x, index_T, offsets.numel() - 1, max_length) for x in (q_THD, k_THD, v_THD))
    scores_BHNN = q @ k.transpose(2, 3)
    if not bias.is_empty:
        scores_BHNN = scores_BHNN + bias.dense(offsets, max_length, rules).to(scores_BHNN.dtype)[:, None]
    weights_BHNN = masked_weights(silu(scores_BHNN), offsets, rules) / normalizer
    return from_blocks(weights_BHNN @ v, index_T)


def hstu_attention_by_length(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    offsets: torch.Tensor,
    *,
    normalizer: float,
    bias: RelativeBias = NO_BIAS,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """Compute `hstu_attention` on blocks of up to `BLOCK_PAIRS` pairs, each padded to its longest sequence.

    Sequences are sorted by length, so that padding is short. For the CPU.
    """
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
                normalizer=normalizer,
                bias=_of_tokens(bias, token_T[start:stop]),
                rules=mask_of_sequences(rules, order_B[first:end]),
            )
        )
    return torch.cat(outputs).index_select(0, token_T.argsort())


def _block_bounds(ascending_lengths: list[int]) -> list[int]:
    """Return the bounds of the blocks; each holds as many sequences as `BLOCK_PAIRS` allows, at least one."""
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
            "queries, keys and values must have the same shape (tokens, heads, head dimension)",
            option="q, k, v",
            value=shapes,
        )
    if len({x.dtype for x in (q_THD, k_THD, v_THD)}) > 1:
        raise UserError(
            "queries, keys and values must have the same dtype",
            option="q, k, v",
            value=[x.dtype for x in (q_THD, k_THD, v_THD)],
        )
    if offsets.dim() != 1 or offsets.numel() < 1 or offsets.dtype != torch.int64:
        raise UserError(
            "must be a one-dimensional int64 tensor with one element more than there are sequences",
            option="offsets",
            value=(offsets.shape, offsets.dtype),
        )


def _check_table(bias: RelativeBias, max_length: int) -> None:
    table = bias.position_table
    if table is not None and table.numel() < 2 * max_length - 1:
        raise UserError(
            f"the table has too few values for the distances in sequences of {max_length} tokens",
            option="position_table",
            value=table.numel(),
            remedy=f"pass a table of at least {2 * max_length - 1} values",
        )
