"""Triton kernels of the tiled cross-entropy: one program per token reads the token's row of the tile once.

Legend: S tokens, J items of a tile.
"""

import torch
import triton
import triton.language as tl

# ruff: noqa: PLR0917
# mypy: disable-error-code="no-untyped-def"


_BLOCK = 2048


@triton.jit
def _add_tile(logit, target, highest, summed, first, J, stride, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    high, total = tl.load(highest + s), tl.load(summed + s)
    for start in range(0, J, BLOCK):
        j = start + tl.arange(0, BLOCK)
        logits = tl.load(logit + s * stride + j, mask=j < J, other=float("-inf")).to(WIDE)
        higher = tl.maximum(high, tl.max(logits, axis=0))
        total = total * tl.exp(high - higher) + tl.sum(tl.exp(logits - higher), axis=0)
        high = higher
    tl.store(highest + s, high)
    tl.store(summed + s, total)
    target_column = tl.load(target + s)
    if (target_column >= 0) & (target_column < J):
        tl.store(first + s, tl.load(logit + s * stride + target_column).to(WIDE))


@triton.jit
def _to_slopes(logit, target, total, upstream, J, stride, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lse, scale, target_column = tl.load(total + s), tl.load(upstream + s).to(WIDE), tl.load(target + s)
    logits = tl.load(logit + s * stride + j, mask=j < J, other=float("-inf")).to(WIDE)
    slopes = (tl.exp(logits - lse) - tl.where(j == target_column, 1.0, 0.0)) * scale
    tl.store(logit + s * stride + j, slopes, mask=j < J)


def add_tile_kernel(
    logit_SJ: torch.Tensor,
    target_S: torch.Tensor,
    highest_S: torch.Tensor,
    summed_S: torch.Tensor,
    first_S: torch.Tensor,
) -> None:
    """Update the running maximum, sum of exponentials and target logit of each token in place."""
    num_tokens, num_items = logit_SJ.shape
    _add_tile[(num_tokens,)](
        logit_SJ,
        target_S.contiguous(),
        highest_S,
        summed_S,
        first_S,
        num_items,
        logit_SJ.stride(0),
        BLOCK=_BLOCK,
        WIDE=_TYPES[highest_S.dtype],
        num_warps=8,
    )


def to_slopes_kernel(
    logit_SJ: torch.Tensor, target_S: torch.Tensor, total_S: torch.Tensor, upstream_S: torch.Tensor
) -> None:
    """Replace logits by slopes (the gradients of the loss with respect to the logits) in place."""
    num_tokens, num_items = logit_SJ.shape
    _to_slopes[(num_tokens, triton.cdiv(num_items, _BLOCK))](
        logit_SJ,
        target_S.contiguous(),
        total_S.contiguous(),
        upstream_S.contiguous(),
        num_items,
        logit_SJ.stride(0),
        BLOCK=_BLOCK,
        WIDE=_TYPES[total_S.dtype],
        num_warps=8,
    )


_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
