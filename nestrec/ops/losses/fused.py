"""Sampled losses that gather rows inside the kernel and keep nothing but one number a token.

    forward    loss_t, and log-sum-exp_t for the backward pass
    backward   logits again, slopes (T, N); d query = slopes x rows, d rows by nestrec.ops.losses.sum_outer

On CUDA by Triton; elsewhere by short segments, which the processor's cache holds.

Legend: T tokens, N candidates of a token, U rows, D channels.
"""

# ruff: noqa: PLR0917 - operators of torch take their arguments by position

from typing import Any

import torch

from nestrec.ops.kernel_op import kernel_op
from nestrec.ops.losses.candidates import LossCandidates
from nestrec.ops.losses.segmented import segmented_loss
from nestrec.ops.losses.softmax import SampledKind
from nestrec.ops.losses.sum_outer import sum_outer
from nestrec.ops.registry import runs_triton
from nestrec.ops.rows.stored import TableRows, leaf_and_values

_CACHED_TOKENS = 16
"""Segment of a CPU."""


def fused_loss(
    query_TD: torch.Tensor, row_UD: TableRows, candidates: LossCandidates, kind: SampledKind
) -> torch.Tensor:
    """(T,) losses."""
    leaf_UD, value_UD = leaf_and_values(row_UD)
    if not runs_triton(value_UD):
        return segmented_loss(query_TD, row_UD, candidates, kind, segment_tokens=_CACHED_TOKENS)
    bias_TN = None if candidates.bias_TN is None else candidates.bias_TN.contiguous()
    return _Fused.apply(  # type: ignore[no-any-return]
        query_TD.contiguous(), leaf_UD, value_UD.detach().contiguous(), candidates.index_TN.contiguous(), bias_TN, kind
    )


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_TD: torch.Tensor,
        leaf_UD: torch.Tensor,
        row_UD: torch.Tensor,
        index_TN: torch.Tensor,
        bias_TN: torch.Tensor | None,
        kind: SampledKind,
    ) -> torch.Tensor:
        loss_T, total_T = fused_forward(query_TD, row_UD, index_TN, bias_TN, kind)
        ctx.save_for_backward(query_TD, row_UD, index_TN, total_T, *([] if bias_TN is None else [bias_TN]))
        ctx.kind = kind
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_TD, row_UD, index_TN, total_T, *bias = ctx.saved_tensors
        grad_query_TD, slope_TN = fused_backward(
            query_TD, row_UD, index_TN, bias[0] if bias else None, total_T, grads[0].contiguous(), ctx.kind
        )
        return grad_query_TD, sum_outer(slope_TN, query_TD, index_TN, len(row_UD)), None, None, None, None


def _fake_forward(
    query: torch.Tensor, row: torch.Tensor, index: torch.Tensor, bias: torch.Tensor | None, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(row.dtype, torch.float32)
    return row.new_empty(len(index), dtype=wide), row.new_empty(len(index), dtype=wide)


@kernel_op("sampled_loss", fake=_fake_forward)
def fused_forward(
    query: torch.Tensor, row: torch.Tensor, index: torch.Tensor, bias: torch.Tensor | None, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T,) losses and (T,) log-sum-exp."""
    from nestrec.ops.losses.sampled_kernels import forward_kernel

    return forward_kernel(query, row, index, bias, kind)


def _fake_backward(
    query: torch.Tensor,
    row: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor | None,
    total: torch.Tensor,
    grad_loss: torch.Tensor,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape, dtype=total.dtype), row.new_empty(index.shape, dtype=total.dtype)


@kernel_op("sampled_loss_backward", fake=_fake_backward)
def fused_backward(
    query: torch.Tensor,
    row: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor | None,
    total: torch.Tensor,
    grad_loss: torch.Tensor,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, D) gradients of the queries and (T, N) of the logits."""
    from nestrec.ops.losses.sampled_kernels import backward_kernel

    return backward_kernel(query, row, index, bias, total, grad_loss, kind)
