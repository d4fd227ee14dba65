"""Losses over candidate items: candidates and sampled softmax.

The items that a token chooses between: its positive, then its negatives, as places among rows.

Legend: T tokens, R negatives drawn for a token, K - 1 other tokens whose negatives it meets too (logit sharing),
N = 1 + K R candidates of a token.

Losses over items, as one number a token: sampled softmax, full cross-entropy and binary cross-entropy.

    sampled softmax   -log( e^{s_0} / sum_n e^{s_n} ),  s = dot products of a query with its candidates
    full              -log softmax over every item of the catalogue
    bce               -log sigmoid(s_0) - sum_{n>0} log(1 - sigmoid(s_n))

Candidate 0 is the positive. The caller sums over tokens and divides by the weight of the global batch. These are the
definitions (`plain`), which keep every vector and every logit; nestrec.ops.losses.sampled names the others.

Legend: T tokens, N candidates of a token, U rows, D channels.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import cross_entropy, softplus

FALSE_NEGATIVE_LOGIT = -5e4
"""Logit of a negative that is the positive, as in the published recipe: it counts for nothing."""


@dataclass(frozen=True, slots=True)
class LossCandidates:
    """What is compared with the queries. Column 0 is the positive."""

    index_TN: torch.Tensor
    """int32 places among rows"""
    bias_TN: torch.Tensor | None = None
    """added to the logits: log-Q correction; none is zero"""

    def __len__(self) -> int:
        return len(self.index_TN)

    def part(self, start: int, stop: int) -> "LossCandidates":
        """Those of the tokens from `start` to `stop`."""
        return LossCandidates(self.index_TN[start:stop], None if self.bias_TN is None else self.bias_TN[start:stop])


def make_candidates(
    positive_T: torch.Tensor,
    negative_TR: torch.Tensor,
    *,
    bias_TR: torch.Tensor | None = None,
    shared_TK: torch.Tensor | None = None,
) -> LossCandidates:
    """Positive and own negatives of each token; with `shared_TK` also the negatives of those other tokens."""
    index_TN = torch.cat([positive_T[:, None], _with_shared(negative_TR, shared_TK)], dim=1)
    if bias_TR is None:
        return LossCandidates(index_TN)
    bias_TC = _with_shared(bias_TR, shared_TK)
    return LossCandidates(index_TN, torch.cat([bias_TC.new_zeros(len(bias_TC), 1), bias_TC], dim=1))


def masked_logits(logit_SN: torch.Tensor, candidates: LossCandidates) -> torch.Tensor:
    """Logits with their bias, where false negatives count for nothing. Differentiable."""
    index_SN = candidates.index_TN
    is_false = index_SN == index_SN[:, :1]
    is_false[:, 0] = False
    if candidates.bias_TN is not None:
        logit_SN = logit_SN + candidates.bias_TN
    return logit_SN.masked_fill(is_false, FALSE_NEGATIVE_LOGIT)


def _with_shared(value_TR: torch.Tensor, shared_TK: torch.Tensor | None) -> torch.Tensor:
    if shared_TK is None or not shared_TK.shape[1]:
        return value_TR
    of_others = value_TR.index_select(0, shared_TK.reshape(-1))
    return torch.cat([value_TR, of_others.view(len(value_TR), shared_TK.shape[1] * value_TR.shape[1])], dim=1)


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
