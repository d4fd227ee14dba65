"""Candidates and reference implementations of item losses: sampled softmax, full and binary cross-entropy.

The candidates of a token are its positive item, then its negatives, as indices of embedding rows. All losses return one
value per token:

    sampled softmax   -log( e^{s_0} / sum_n e^{s_n} ),  s = dot products of a query with its candidates
    full              -log softmax over every item of the catalog
    bce               -log sigmoid(s_0) - sum_{n>0} log(1 - sigmoid(s_n))

Candidate 0 is the positive. The caller sums over tokens and divides by the weight of the global batch. The losses of
this module are the reference implementations (variant `plain`): they store every candidate vector and every logit.
`nestrec.ops.losses.sampled_losses` has the variants that need less memory.

Legend: T tokens, R negatives drawn for a token, K - 1 other tokens whose negatives a token shares (logit sharing),
N = 1 + K R candidates of a token, U rows, D channels.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import cross_entropy, softplus

FALSE_NEGATIVE_LOGIT = -5e4
"""Logit of a false negative (a negative equal to the positive), as in the published recipe; its probability is 0."""


@dataclass(frozen=True, slots=True)
class LossCandidates:
    """Candidate items of each token; column 0 is the positive."""

    index_TN: torch.Tensor
    """(T, N) int32 row indices of the candidates."""
    bias_TN: torch.Tensor | None = None
    """(T, N) values added to the logits (log-Q correction); None means zeros."""

    def __len__(self) -> int:
        return len(self.index_TN)

    def slice_tokens(self, start: int, stop: int) -> "LossCandidates":
        """Return the candidates of the tokens in [start, stop)."""
        return LossCandidates(self.index_TN[start:stop], None if self.bias_TN is None else self.bias_TN[start:stop])


def make_candidates(
    positive_T: torch.Tensor,
    negative_TR: torch.Tensor,
    *,
    bias_TR: torch.Tensor | None = None,
    shared_TK: torch.Tensor | None = None,
) -> LossCandidates:
    """Build the candidates of each token: its positive, its negatives and, with logit sharing, those of other tokens.

    Args:
        positive_T: Row index of the positive item of each token.
        negative_TR: Row indices of the negatives drawn for each token.
        bias_TR: Logit bias of each negative (log-Q correction); the positives get 0.
        shared_TK: Other tokens whose negatives each token uses too.
    """
    index_TN = torch.cat([positive_T[:, None], _append_shared(negative_TR, shared_TK)], dim=1)
    if bias_TR is None:
        return LossCandidates(index_TN)
    bias_TC = _append_shared(bias_TR, shared_TK)
    return LossCandidates(index_TN, torch.cat([bias_TC.new_zeros(len(bias_TC), 1), bias_TC], dim=1))


def masked_logits(logit_SN: torch.Tensor, candidates: LossCandidates) -> torch.Tensor:
    """Add the bias to the logits and mask false negatives. Differentiable."""
    index_SN = candidates.index_TN
    is_false = index_SN == index_SN[:, :1]
    is_false[:, 0] = False
    if candidates.bias_TN is not None:
        logit_SN = logit_SN + candidates.bias_TN
    return logit_SN.masked_fill(is_false, FALSE_NEGATIVE_LOGIT)


def _append_shared(value_TR: torch.Tensor, shared_TK: torch.Tensor | None) -> torch.Tensor:
    if shared_TK is None or not shared_TK.shape[1]:
        return value_TR
    shared_values = value_TR.index_select(0, shared_TK.reshape(-1))
    return torch.cat([value_TR, shared_values.view(len(value_TR), shared_TK.shape[1] * value_TR.shape[1])], dim=1)


SampledKind = Literal["sampled_softmax", "bce"]


def plain_sampled_loss(
    query_TD: torch.Tensor, row_UD: torch.Tensor, candidates: LossCandidates, kind: SampledKind
) -> torch.Tensor:
    """Return the (T,) losses; reference implementation that stores the vectors of all candidates until backward."""
    logit_TN = masked_logits(_dot_products(query_TD, row_UD, candidates.index_TN), candidates)
    return loss_of_logits(at_least_float32(logit_TN), kind)[0]


def loss_of_logits(logit_TN: torch.Tensor, kind: SampledKind) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (T,) losses and the (T,) log-sum-exp that `slopes` needs (zeros for `bce`)."""
    if kind == "sampled_softmax":
        total_T = torch.logsumexp(logit_TN, dim=1)
        return total_T - logit_TN[:, 0], total_T
    return softplus(-logit_TN[:, 0]) + softplus(logit_TN[:, 1:]).sum(1), logit_TN.new_zeros(len(logit_TN))


def slopes(logit_TN: torch.Tensor, total_T: torch.Tensor, kind: SampledKind) -> torch.Tensor:
    """Return the (T, N) gradients of each token's loss with respect to its logits; exactly 0 for false negatives."""
    if kind == "sampled_softmax":
        slope_TN = torch.exp(logit_TN - total_T[:, None])
    else:
        slope_TN = torch.sigmoid(logit_TN)
    slope_TN[:, 0] -= 1.0
    return slope_TN


def full_cross_entropy(query_TD: torch.Tensor, row_UD: torch.Tensor, positive_T: torch.Tensor) -> torch.Tensor:
    """Return the (T,) cross-entropy losses over the full catalog; reference implementation.

    Args:
        query_TD: Query of each token.
        row_UD: Rows of all items.
        positive_T: Row index of the positive item of each token.
    """
    return cross_entropy(at_least_float32(query_TD @ row_UD.T), positive_T, reduction="none")


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Convert bfloat16 and float16 tensors to float32; return others unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _dot_products(query_TD: torch.Tensor, row_UD: torch.Tensor, index_TN: torch.Tensor) -> torch.Tensor:
    if row_UD.shape[0] <= index_TN.shape[1] * 64:
        # With few rows, one matrix product with all of them moves far fewer bytes than gathering N vectors per token.
        return (query_TD @ row_UD.T).gather(1, index_TN.long())
    return torch.einsum("td,tnd->tn", query_TD, row_UD[index_TN])
