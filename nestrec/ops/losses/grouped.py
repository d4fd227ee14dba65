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

from nestrec.ops.losses.candidates import FALSE_NEGATIVE_LOGIT
from nestrec.ops.losses.softmax import SampledKind
from nestrec.ops.rows.gather import deal_rows, gather_rows
from nestrec.ops.rows.stored import TableRows


def grouped_loss(
    query_TD: torch.Tensor,
    row_UD: TableRows,
    positive_T: torch.Tensor,
    token_GS: torch.Tensor,
    kind: SampledKind,
    *,
    bias_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """(G, S) losses, 0 where a group has no token.

    positive_T: places of the targets among the rows. token_GS: the groups, each token once, -1 behind a group's last.
    bias_T: added to the logit of a token's target where it is a negative (log-Q correction).
    """
    flat = token_GS.clamp(min=0).flatten()
    place_GS = positive_T.index_select(0, flat).view(token_GS.shape)
    bias_GS = None if bias_T is None else bias_T.index_select(0, flat).view(token_GS.shape)
    q_GSD, p_GSD = deal_rows(query_TD, token_GS), gather_rows(row_UD, place_GS)
    return _GroupedLoss.apply(  # type: ignore[no-any-return]
        q_GSD, p_GSD.to(q_GSD.dtype), place_GS, token_GS >= 0, bias_GS, kind
    )


class _GroupedLoss(torch.autograd.Function):
    """Of vectors dealt to groups. Slopes are written down, not derived operator by operator: half the passes."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        q_GSD: torch.Tensor,
        p_GSD: torch.Tensor,
        place_GS: torch.Tensor,
        is_there_GS: torch.Tensor,
        bias_GS: torch.Tensor | None,
        kind: SampledKind,
    ) -> torch.Tensor:
        logit_GSS = _products(q_GSD, p_GSD)
        own_GS = logit_GSS.diagonal(dim1=1, dim2=2)
        positive_GS = own_GS.clone()
        if bias_GS is not None:
            logit_GSS += bias_GS[:, None]
        logit_GSS.masked_fill_(place_GS[:, None, :] == place_GS[:, :, None], FALSE_NEGATIVE_LOGIT)
        own_GS.copy_(positive_GS)
        logit_GSS.masked_fill_(~is_there_GS[:, None, :], -torch.inf)
        if kind == "sampled_softmax":
            total_GS = torch.logsumexp(logit_GSS, dim=2)
            loss_GS = total_GS - positive_GS
            # Of a token that is not there all slopes are 0, whatever its row of logits holds.
            total_GS.masked_fill_(~is_there_GS, torch.inf)
        else:
            total_GS = positive_GS
            plus_GSS = softplus(logit_GSS)
            plus_GSS.diagonal(dim1=1, dim2=2).copy_(softplus(-positive_GS))
            loss_GS = plus_GSS.sum(2)
        ctx.save_for_backward(q_GSD, p_GSD, logit_GSS, total_GS, is_there_GS)
        ctx.kind = kind
        return loss_GS.masked_fill_(~is_there_GS, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_GSD, p_GSD, logit_GSS, total_GS, is_there_GS = ctx.saved_tensors
        slope_GSS = (logit_GSS - total_GS[:, :, None]).exp_() if ctx.kind == "sampled_softmax" else logit_GSS.sigmoid()
        slope_GSS.diagonal(dim1=1, dim2=2).sub_(1.0)
        slope_GSS *= grads[0].masked_fill(~is_there_GS, 0.0)[:, :, None]
        slope_GSS = slope_GSS.to(q_GSD.dtype)
        return slope_GSS @ p_GSD, slope_GSS.mT @ q_GSD, None, None, None, None


def _products(q_GSD: torch.Tensor, p_GSD: torch.Tensor) -> torch.Tensor:
    """Products in the type of the vectors, summed and kept in float32 at least: logits of 20 want more than 8 bits."""
    if q_GSD.is_cuda and q_GSD.dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", enabled=False):
            return torch.bmm(q_GSD, p_GSD.mT, out_dtype=torch.float32)
    wide = torch.promote_types(q_GSD.dtype, torch.float32)
    return q_GSD.to(wide) @ p_GSD.to(wide).mT
