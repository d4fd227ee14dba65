"""Cross-entropy over the whole catalogue on a CPU: logits are kept once, and become their own derivatives in place.

    forward    for some tokens at a time: logits = queries x rows; the maximum and the sum of exponentials of each token
    backward   for the same tokens: logits to (softmax - is target) * upstream, where they lie; two products with them

The definition writes the logits, their logarithmic softmax and two derivatives of it, each of tokens x items; here the
first is all there is, and the tokens are so few that it is still in the cache when the next step reads it.

Legend: T tokens, I items, D channels; S tokens of a tile.
"""

from typing import Any

import torch

from nestrec.ops.losses.softmax import full_cross_entropy

TILE_ELEMENTS = 1 << 21
"""Logits of a tile, of 16 tokens at least."""


def kept_cross_entropy(query_TD: torch.Tensor, row_ID: torch.Tensor, target_T: torch.Tensor) -> torch.Tensor:
    """(T,) losses: `full_cross_entropy` (its definition) in less time and memory on a CPU; that itself elsewhere."""
    if query_TD.is_cuda or query_TD.dtype not in (torch.float32, torch.float64):
        return full_cross_entropy(query_TD, row_ID, target_T)
    return _Kept.apply(query_TD, row_ID, target_T, max(16, TILE_ELEMENTS // max(1, len(row_ID))))  # type: ignore[no-any-return]


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_TD: torch.Tensor, row_ID: torch.Tensor, target_T: torch.Tensor, tile_tokens: int
    ) -> torch.Tensor:
        total_T, loss_T = query_TD.new_empty(len(query_TD)), query_TD.new_empty(len(query_TD))
        logits = []
        for tokens in _tiles(len(query_TD), tile_tokens):
            logit_SI = query_TD[tokens] @ row_ID.T
            highest_S = logit_SI.amax(1)
            total_T[tokens] = (logit_SI - highest_S[:, None]).exp_().sum(1).log_().add_(highest_S)
            loss_T[tokens] = total_T[tokens] - logit_SI.gather(1, target_T[tokens, None])[:, 0]
            logits.append(logit_SI)
        ctx.save_for_backward(query_TD, row_ID, target_T, total_T)
        ctx.logits, ctx.tile_tokens = logits, tile_tokens
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_TD, row_ID, target_T, total_T = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None
        assert logits is not None, "the logits are gone: a backward pass runs once"
        grad_query_TD, grad_row_ID = torch.empty_like(query_TD), torch.zeros_like(row_ID)
        for tokens, slope_SI in zip(_tiles(len(query_TD), ctx.tile_tokens), logits, strict=True):
            upstream_S1 = grads[0][tokens, None]
            slope_SI.sub_(total_T[tokens, None]).exp_().mul_(upstream_S1)
            slope_SI.scatter_add_(1, target_T[tokens, None], -upstream_S1)
            grad_query_TD[tokens] = slope_SI @ row_ID
            grad_row_ID.addmm_(slope_SI.T, query_TD[tokens])
        return grad_query_TD, grad_row_ID, None, None


def _tiles(num_tokens: int, tile_tokens: int) -> list[slice]:
    return [slice(first, min(first + tile_tokens, num_tokens)) for first in range(0, num_tokens, tile_tokens)]
