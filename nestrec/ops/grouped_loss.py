"""Sampled losses whose negatives are the targets of a small group of tokens: one matrix product for each group.

    logit[t, s] = q[t] . row[target of s]                  t, s tokens of one group
    loss[t]     = that of candidates: own target first, then the targets of the group's other tokens

Every token meets as many negatives as with any other sampler, but a group reads its vectors once for all its tokens:
where each token has R of its own, R + 1 times as many bytes are gathered.

Legend: T tokens, G groups, S tokens of a group, U rows, D channels.
"""

from typing import Any

import torch
from torch.nn.functional import softplus

from nestrec.ops.candidates import FALSE_NEGATIVE_LOGIT
from nestrec.ops.gather_rows import gather_rows
from nestrec.ops.softmax_losses import SampledKind


def grouped_loss(
    query_TD: torch.Tensor, row_UD: torch.Tensor, positive_T: torch.Tensor, token_GS: torch.Tensor, kind: SampledKind,
    *, bias_T: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """(G, S) losses, 0 where a group has no token.

    positive_T: places of the targets among the rows. token_GS: the groups, each token once, -1 behind a group's last.
    bias_T: added to the logit of a token's target where it is a negative (log-Q correction).
    """
    flat = token_GS.clamp(min=0).flatten()
    place_GS = positive_T.index_select(0, flat).view(token_GS.shape)
    q_GSD, p_GSD = gather_rows(query_TD, flat), gather_rows(row_UD, place_GS.flatten())
    shape = (*token_GS.shape, query_TD.shape[1])
    logit_GSS: torch.Tensor = _GroupLogits.apply(q_GSD.view(shape), p_GSD.to(q_GSD.dtype).view(shape))
    own = torch.eye(token_GS.shape[1], dtype=torch.bool, device=flat.device)
    if bias_T is not None:
        logit_GSS = logit_GSS + bias_T.index_select(0, flat).view(token_GS.shape)[:, None].masked_fill(own, 0.0)
    is_false = (place_GS[:, None, :] == place_GS[:, :, None]) & ~own
    logit_GSS = logit_GSS.masked_fill(is_false, FALSE_NEGATIVE_LOGIT)
    is_there_GS = token_GS >= 0
    logit_GSS = logit_GSS.masked_fill(~is_there_GS[:, None, :], -torch.inf)
    positive_GS = logit_GSS.diagonal(dim1=1, dim2=2).masked_fill(~is_there_GS, 0.0)
    if kind == "sampled_softmax":
        total_GS = torch.logsumexp(logit_GSS.masked_fill(~is_there_GS[:, :, None], 0.0), dim=2)
        loss_GS = total_GS - positive_GS
    else:
        loss_GS = softplus(-positive_GS) + softplus(logit_GSS.masked_fill(own, -torch.inf)).sum(2)
    return loss_GS.masked_fill(~is_there_GS, 0.0)


class _GroupLogits(torch.autograd.Function):
    """Products in the type of the vectors, summed and kept in float32 at least: logits of 20 want more than 8 bits."""

    @staticmethod
    def forward(ctx: Any, q_GSD: torch.Tensor, p_GSD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q_GSD, p_GSD)
        if q_GSD.is_cuda and q_GSD.dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cuda", enabled=False):
                return torch.bmm(q_GSD, p_GSD.mT, out_dtype=torch.float32)
        wide = torch.promote_types(q_GSD.dtype, torch.float32)
        return q_GSD.to(wide) @ p_GSD.to(wide).mT

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q_GSD, p_GSD = ctx.saved_tensors
        slope_GSS = grads[0].to(q_GSD.dtype)
        return slope_GSS @ p_GSD, slope_GSS.mT @ q_GSD
