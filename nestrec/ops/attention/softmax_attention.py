"""Causal softmax attention over jagged sequences, as SASRec uses it.

    out[i] = sum_{j <= i} softmax_j(q[i] . k[j] / sqrt(D)) * v[j]        within each sequence

Legend: T tokens of all sequences, H heads, D head dimension, B sequences, N longest length.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from nestrec.ops.padding import from_blocks, padded_places, to_blocks


def softmax_attention_reference(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """The definition: a loop over sequences."""
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
    """The same on padded blocks; padding stands behind each sequence, where no causal query looks."""
    place_T = padded_places(offsets, q_THD.shape[0], max_length)
    q, k, v = (to_blocks(x, place_T, offsets.numel() - 1, max_length) for x in (q_THD, k_THD, v_THD))
    return from_blocks(scaled_dot_product_attention(q, k, v, is_causal=True), place_T)
