"""HSTU attention over jagged sequences.

    out[i] = sum_{j <= i} SiLU(q[i] . k[j] + bias[i, j]) / normaliser * v[j]        within each sequence

No softmax; the normaliser is a constant of the recipe. `hstu_attention_reference` is the definition, one sequence at a
time; `hstu_attention` computes the same on padded blocks.

Legend: T tokens of all sequences, H heads, D head dimension, B sequences, N longest length.
"""

import itertools

import torch
from torch.nn.functional import silu

from nestrec.ops.padding import from_blocks, padded_slots, to_blocks

LARGE_PAIRS = 1 << 20
"""Below so many pairs of tokens, padding costs less than a loop over sequences."""
LONG = 512
"""From this length on, one sequence alone keeps a core busy."""


def hstu_attention_reference(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    offsets: torch.Tensor,
    *,
    normaliser: float,
    bias_BNN: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition: a loop over sequences."""
    outputs = []
    for b, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        n = end - start
        scores_HNN = torch.einsum("ihd,jhd->hij", q_THD[start:end], k_THD[start:end])
        if bias_BNN is not None:
            scores_HNN = scores_HNN + bias_BNN[b if bias_BNN.shape[0] > 1 else 0, :n, :n]
        weights_HNN = silu(scores_HNN).tril() / normaliser
        outputs.append(torch.einsum("hij,jhd->ihd", weights_HNN, v_THD[start:end]))
    return torch.cat(outputs) if outputs else torch.zeros_like(v_THD)


def hstu_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    offsets: torch.Tensor,
    *,
    max_length: int,
    normaliser: float,
    bias_BNN: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same on padded blocks of `max_length` (the longest sequence of the batch).

    bias_BNN: (B, N, N) or (1, N, N), shared by the heads. Padding stands behind each sequence, where no causal query
    looks, so it needs no mask of its own. On a CPU, sequences that are long or differ much are taken one at a
    time: large blocks leave the caches, and padding would cost more than the loop.
    """
    if not q_THD.is_cuda and _better_one_by_one(offsets, max_length):
        return hstu_attention_reference(q_THD, k_THD, v_THD, offsets, normaliser=normaliser, bias_BNN=bias_BNN)
    slot_T = padded_slots(offsets, q_THD.shape[0], max_length)
    q, k, v = (to_blocks(x, slot_T, offsets.numel() - 1, max_length) for x in (q_THD, k_THD, v_THD))
    scores_BHNN = q @ k.transpose(2, 3)
    if bias_BNN is not None:
        scores_BHNN = scores_BHNN + bias_BNN[:, None]
    weights_BHNN = silu(scores_BHNN).tril() / normaliser
    return from_blocks(weights_BHNN @ v, slot_T)


def _better_one_by_one(offsets: torch.Tensor, max_length: int) -> bool:
    """Whether blocks are large, and sequences are long or less than half of the blocks' pairs belong to them."""
    padded = (offsets.numel() - 1) * max_length**2
    is_large = padded > LARGE_PAIRS
    return is_large and (max_length >= LONG or padded > 2 * int(offsets.diff().square().sum()))
