"""Losses over items: sampled softmax, full cross-entropy and binary cross-entropy, as sums over tokens.

    sampled softmax   -log( e^{s+} / (e^{s+} + sum_r e^{s-_r}) ),  s = temperature-scaled dot products
    full              -log softmax over every item of the catalogue
    bce               -log sigmoid(s+) - sum_r log(1 - sigmoid(s-_r))

A negative that equals the positive gets the logit -5e4, as in the published recipe. Every function returns the loss of
each token; the caller sums and divides by the weight of the global batch.

Legend: T tokens, R negatives of a token, U rows, D channels.
"""

import torch
from torch.nn.functional import cross_entropy, softplus

FALSE_NEGATIVE_LOGIT = -5e4


def sampled_logits(
    query_TD: torch.Tensor, row_UD: torch.Tensor, positive_T: torch.Tensor, negative_TR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T,) logits of the positives and (T, R) of the negatives; both index into `row_UD`."""
    positive_logit_T = (query_TD * row_UD[positive_T]).sum(1)
    if row_UD.shape[0] <= negative_TR.shape[1] * 64:
        # The rows are few: one matrix product with all of them moves far fewer bytes than gathering R vectors a token.
        negative_logit_TR = (query_TD @ row_UD.T).gather(1, negative_TR)
    else:
        negative_logit_TR = torch.einsum("td,trd->tr", query_TD, row_UD[negative_TR])
    is_positive = negative_TR == positive_T[:, None]
    return positive_logit_T, negative_logit_TR.masked_fill(is_positive, FALSE_NEGATIVE_LOGIT)


def sampled_softmax(positive_logit_T: torch.Tensor, negative_logit_TR: torch.Tensor) -> torch.Tensor:
    logits = _at_least_float32(torch.cat([positive_logit_T[:, None], negative_logit_TR], dim=1))
    return torch.logsumexp(logits, dim=1) - logits[:, 0]


def bce(positive_logit_T: torch.Tensor, negative_logit_TR: torch.Tensor) -> torch.Tensor:
    return softplus(-_at_least_float32(positive_logit_T)) + softplus(_at_least_float32(negative_logit_TR)).sum(1)


def full_cross_entropy(query_TD: torch.Tensor, row_UD: torch.Tensor, positive_T: torch.Tensor) -> torch.Tensor:
    """The rows are those of the whole catalogue."""
    return cross_entropy(_at_least_float32(query_TD @ row_UD.T), positive_T, reduction="none")


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
