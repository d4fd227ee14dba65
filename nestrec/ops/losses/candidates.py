"""The items that a token chooses between: its positive, then its negatives, as places among rows.

Legend: T tokens, R negatives drawn for a token, K - 1 other tokens whose negatives it meets too (logit sharing),
N = 1 + K R candidates of a token.
"""

from dataclasses import dataclass

import torch

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
