"""Causal softmax attention over jagged sequences, the attention of SASRec.

    out[i] = sum_{j <= i} softmax_j(q[i] . k[j] / sqrt(D)) * v[j]        within each sequence

Legend: T tokens of all sequences, H heads, D head dimension, B sequences, N longest length.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from nestrec.ops.padding import from_blocks, padded_indices, to_blocks


def softmax_attention_reference(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Reference implementation of `softmax_attention`: loops over sequences."""
    outputs = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        scores_HNN = torch.einsum("ihd,jhd->hij", q_THD[start:end], k_THD[start:end]) / q_THD.shape[2] ** 0.5
        future = torch.ones(end - start, end - start, dtype=torch.bool, device=q_THD.device).triu(1)
        weights_HNN = scores_HNN.masked_fill(future, -torch.inf).softmax(dim=2)
        outputs.append(torch.einsum("hij,jhd->ihd", weights_HNN, v_THD[start:end]))
    return torch.cat(outputs) if outputs else torch.zeros_like(v_THD)


def softmax_attention(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, offsets: torch.Tensor, *, max_length: int
) -> torch.Tensor:
    """Compute causal softmax attention on one padded block, (T, H, D).

    Padding follows each sequence and causal queries do not attend to later positions, so it needs no mask of its own.

    Args:
        q_THD: Queries, (T, H, D).
        k_THD: Keys, (T, H, D).
        v_THD: Values, (T, H, D).
        offsets: Bounds of the sequences from 0 to T, (B + 1,) int64.
        max_length: Upper bound on the sequence lengths of the batch, known on the host.
    """
    index_T = padded_indices(offsets, q_THD.shape[0], max_length)
    q, k, v = (to_blocks(x, index_T, offsets.numel() - 1, max_length) for x in (q_THD, k_THD, v_THD))
    return from_blocks(scaled_dot_product_attention(q, k, v, is_causal=True), index_T)
