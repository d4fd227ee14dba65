"""HSTU attention of new tokens against the stored keys and values of a prefix.

    history  out[i] = sum_{j <= i} w[i, j] v[j]                             j over prefix and history
    candidate out[c] = sum_{j in prefix, history} w[c, j] v[j] + w[c, c] v[c]      candidates do not see each other
    w[i, j]         = SiLU(q[i] . k[j] + bias[i, j]) / normaliser

`cached_attention_reference` is the definition, with one mask over everything. `cached_attention` walks over blocks of
query rows, leaves out the keys that a block cannot see, and never forms the candidates' square.

Legend: H heads, D head dimension, P prefix tokens, S new history tokens, C candidates, N = S + C new tokens.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import silu

BLOCK_ROWS = 256

BiasRows = Callable[[int, int], torch.Tensor]
"""(first, end) new history tokens to (end - first, P + end) bias, shared by the heads."""


def cached_attention_reference(
    q_HND: torch.Tensor,
    k_HND: torch.Tensor,
    v_HND: torch.Tensor,
    prefix_HPD: tuple[torch.Tensor, torch.Tensor],
    *,
    num_candidates: int,
    normaliser: float,
    bias_NK: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition. bias_NK: (N, P + N), of new tokens against prefix and new tokens."""
    keys, values = (torch.cat(pair, dim=1) for pair in zip(prefix_HPD, (k_HND, v_HND), strict=True))
    num_new, num_prefix = q_HND.shape[1], prefix_HPD[0].shape[1]
    token = torch.arange(num_new, device=q_HND.device)
    is_seen_NN = (token[None] <= token[:, None]) & (
        (token < num_new - num_candidates)[None] | (token[None] == token[:, None])
    )
    seen_NK = torch.cat([is_seen_NN.new_ones(num_new, num_prefix), is_seen_NN], dim=1)
    scores_HNK = q_HND @ keys.transpose(1, 2)
    if bias_NK is not None:
        scores_HNK = scores_HNK + bias_NK
    return (silu(scores_HNK) * seen_NK / normaliser) @ values


def cached_attention(
    q_HND: torch.Tensor,
    k_HND: torch.Tensor,
    v_HND: torch.Tensor,
    prefix_HPD: tuple[torch.Tensor, torch.Tensor],
    *,
    num_candidates: int,
    normaliser: float,
    history_bias: BiasRows | None = None,
    candidate_bias_K: torch.Tensor | None = None,
) -> torch.Tensor:
    """(H, N, D). candidate_bias_K: (P + S + 1,), one for all candidates, since they share position and time; the last
    value is that of a candidate with itself."""
    num_history = q_HND.shape[1] - num_candidates
    num_prefix = prefix_HPD[0].shape[1]
    keys, values = (
        old
        if num_history == 0
        else new[:, :num_history]
        if num_prefix == 0
        else torch.cat([old, new[:, :num_history]], 1)
        for old, new in zip(prefix_HPD, (k_HND, v_HND), strict=True)
    )
    out_HND = torch.empty_like(v_HND, memory_format=torch.contiguous_format)
    for first in range(0, num_history, BLOCK_ROWS):
        end = min(first + BLOCK_ROWS, num_history)
        bias = history_bias(first, end) if history_bias is not None else None
        weights = _weights(q_HND[:, first:end], keys[:, : num_prefix + end], bias)
        weights[:, :, num_prefix + first :].tril_()
        torch.bmm(weights, values[:, : num_prefix + end], out=out_HND[:, first:end])
    for first in range(num_history, q_HND.shape[1], BLOCK_ROWS):
        rows = slice(first, min(first + BLOCK_ROWS, q_HND.shape[1]))
        row_bias = None if candidate_bias_K is None else candidate_bias_K[None, :-1]
        torch.bmm(_weights(q_HND[:, rows], keys, row_bias), values, out=out_HND[:, rows])
        own_HC = (q_HND[:, rows] * k_HND[:, rows]).sum(2)
        own_HC = silu(own_HC if candidate_bias_K is None else own_HC + candidate_bias_K[-1])
        out_HND[:, rows] += own_HC[:, :, None] * v_HND[:, rows]
    return out_HND.div_(normaliser)


def _weights(q_HRD: torch.Tensor, keys_HKD: torch.Tensor, bias_RK: torch.Tensor | None) -> torch.Tensor:
    transposed = keys_HKD.transpose(1, 2)
    scores = torch.bmm(q_HRD, transposed) if bias_RK is None else torch.baddbmm(bias_RK[None], q_HRD, transposed)
    return silu(scores, inplace=True)
