"""Losses over items, as one number a token: sampled softmax, full cross-entropy and binary cross-entropy.

    sampled softmax   -log( e^{s_0} / sum_n e^{s_n} ),  s = dot products of a query with its candidates
    full              -log softmax over every item of the catalogue
    bce               -log sigmoid(s_0) - sum_{n>0} log(1 - sigmoid(s_n))

Candidate 0 is the positive. The caller sums over tokens and divides by the weight of the global batch. These are the
definitions (`plain`), which keep every vector and every logit; nestrec.ops.losses.sampled names the others.

Legend: T tokens, N candidates of a token, U rows, D channels.
"""

from typing import Literal

import torch
from torch.nn.functional import cross_entropy, softplus

from nestrec.ops.losses.candidates import LossCandidates, masked_logits

SampledKind = Literal["sampled_softmax", "bce"]


def plain_sampled_loss(
    query_TD: torch.Tensor, row_UD: torch.Tensor, candidates: LossCandidates, kind: SampledKind
) -> torch.Tensor:
    """(T,) losses; the vectors of all candidates lie in memory until their gradients are there."""
    logit_TN = masked_logits(_dot_products(query_TD, row_UD, candidates.index_TN), candidates)
    return loss_of_logits(at_least_float32(logit_TN), kind)[0]


def loss_of_logits(logit_TN: torch.Tensor, kind: SampledKind) -> tuple[torch.Tensor, torch.Tensor]:
    """(T,) losses and (T,) what `slopes` needs besides the logits."""
    if kind == "sampled_softmax":
        total_T = torch.logsumexp(logit_TN, dim=1)
        return total_T - logit_TN[:, 0], total_T
    return softplus(-logit_TN[:, 0]) + softplus(logit_TN[:, 1:]).sum(1), logit_TN.new_zeros(len(logit_TN))


def slopes(logit_TN: torch.Tensor, total_T: torch.Tensor, kind: SampledKind) -> torch.Tensor:
    """(T, N) derivative of a token's loss by its logits; exactly 0 for false negatives."""
    if kind == "sampled_softmax":
        slope_TN = torch.exp(logit_TN - total_T[:, None])
    else:
        slope_TN = torch.sigmoid(logit_TN)
    slope_TN[:, 0] -= 1.0
    return slope_TN


def full_cross_entropy(query_TD: torch.Tensor, row_UD: torch.Tensor, positive_T: torch.Tensor) -> torch.Tensor:
    """The rows are those of the whole catalogue."""
    return cross_entropy(at_least_float32(query_TD @ row_UD.T), positive_T, reduction="none")


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """16-bit numbers widened."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _dot_products(query_TD: torch.Tensor, row_UD: torch.Tensor, index_TN: torch.Tensor) -> torch.Tensor:
    if row_UD.shape[0] <= index_TN.shape[1] * 64:
        # The rows are few: one matrix product with all of them moves far fewer bytes than gathering N vectors a token.
        return (query_TD @ row_UD.T).gather(1, index_TN.long())
    return torch.einsum("td,tnd->tn", query_TD, row_UD[index_TN])
