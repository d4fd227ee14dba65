"""Sampled losses that gather rows inside the kernel and keep nothing but one number a token.

    forward    loss_t, and log-sum-exp_t for the backward pass
    backward   logits again, slopes (T, N); d query = slopes x rows, d rows by nestrec.ops.sum_outer

On CUDA by Triton; elsewhere by short segments, which the processor's cache holds.

Legend: T tokens, N candidates of a token, U rows, D channels.
"""

from typing import Any

import torch

from nestrec.ops.candidates import Candidates
from nestrec.ops.segmented_loss import segmented_loss
from nestrec.ops.softmax_losses import SampledKind
from nestrec.ops.sum_outer import sum_outer

_CACHED_TOKENS = 16
"""Segment of a CPU."""


def fused_loss(query_TD: torch.Tensor, row_UD: torch.Tensor, candidates: Candidates, kind: SampledKind) -> torch.Tensor:
    """(T,) losses."""
    if row_UD.device.type != "cuda":
        return segmented_loss(query_TD, row_UD, candidates, kind, segment_tokens=_CACHED_TOKENS)
    bias_TN = None if candidates.bias_TN is None else candidates.bias_TN.contiguous()
    index_TN = candidates.index_TN.contiguous()
    return _Fused.apply(query_TD.contiguous(), row_UD.contiguous(), index_TN, bias_TN, kind)  # type: ignore[no-any-return]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, query_TD: torch.Tensor, row_UD: torch.Tensor, index_TN: torch.Tensor, bias_TN: torch.Tensor | None,
        kind: SampledKind,
    ) -> torch.Tensor:  # fmt: skip
        from nestrec.ops.sampled_loss_kernels import forward_kernel

        loss_T, total_T = forward_kernel(query_TD, row_UD, index_TN, bias_TN, kind)
        ctx.save_for_backward(query_TD, row_UD, index_TN, total_T, *([] if bias_TN is None else [bias_TN]))
        ctx.kind = kind
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from nestrec.ops.sampled_loss_kernels import backward_kernel

        query_TD, row_UD, index_TN, total_T, *bias = ctx.saved_tensors
        grad_query_TD, slope_TN = backward_kernel(
            query_TD, row_UD, index_TN, bias[0] if bias else None, total_T, grads[0].contiguous(), ctx.kind
        )
        return grad_query_TD, sum_outer(slope_TN, query_TD, index_TN, len(row_UD)), None, None, None
