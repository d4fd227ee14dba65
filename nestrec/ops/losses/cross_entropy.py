"""Cross-entropy over the full catalog with less memory: in place on a CPU, or in tiles that are recomputed in backward.

`in_place_cross_entropy` (CPU) stores the logits once and replaces them by their gradients in place:

    forward    per tile of tokens: logits = queries x rows; the maximum and the sum of exponentials of each token
    backward   per tile of tokens: logits -> (softmax - is target) * upstream in place; two products with them

The reference implementation stores the logits, their log-softmax and two gradients, each of size tokens x items. Here
only the logits are stored, and a tile is small enough to stay in the CPU cache between two steps.

`tiled_cross_entropy` never stores more logits than one tile:

    forward    per tile: logits = queries x rows; a running maximum and sum of exponentials of each token
    backward   per tile: logits again, slopes = (softmax - is target) * upstream; two products with them

The products are matrix products of torch. Between them is one pass over the tile: a Triton kernel on CUDA, torch
operations elsewhere. Tiles are visited and their results are added in a fixed order, so runs are bitwise reproducible.

Legend: T tokens, I items, D channels; S x J is a tile.
"""

from collections.abc import Iterator
from typing import Any

import torch

from nestrec.ops.kernel_op import kernel_op, runs_triton
from nestrec.ops.losses.item_losses import at_least_float32, full_cross_entropy

TILE_ELEMENTS = 1 << 21
"""Number of logits per tile of `in_place_cross_entropy`; a tile has at least 16 tokens."""


def in_place_cross_entropy(  # language: allow place-name place-for-index
    query_TD: torch.Tensor,
    row_ID: torch.Tensor,
    target_T: torch.Tensor,
) -> torch.Tensor:
    """Return the (T,) losses of `full_cross_entropy`, its reference implementation; faster and smaller on a CPU.

    Uses `full_cross_entropy` itself on CUDA and for 16-bit queries. Backward can run only once.
    """
    if query_TD.is_cuda or query_TD.dtype not in (torch.float32, torch.float64):
        return full_cross_entropy(query_TD, row_ID, target_T)
    return _InPlaceCrossEntropy.apply(query_TD, row_ID, target_T, max(16, TILE_ELEMENTS // max(1, len(row_ID))))  # type: ignore[no-any-return]


class _InPlaceCrossEntropy(torch.autograd.Function):  # language: allow place-name place-for-index
    @staticmethod
    def forward(
        ctx: Any, query_TD: torch.Tensor, row_ID: torch.Tensor, target_T: torch.Tensor, tile_tokens: int
    ) -> torch.Tensor:
        total_T, loss_T = query_TD.new_empty(len(query_TD)), query_TD.new_empty(len(query_TD))
        logits = []
        for tokens in _token_tiles(len(query_TD), tile_tokens):
            logit_SI = query_TD[tokens] @ row_ID.T
            highest_S = logit_SI.amax(1)
            total_T[tokens] = (logit_SI - highest_S[:, None]).exp_().sum(1).log_().add_(highest_S)
            loss_T[tokens] = total_T[tokens] - logit_SI.gather(1, target_T[tokens, None])[:, 0]
            logits.append(logit_SI)
        ctx.save_for_backward(query_TD, row_ID, target_T, total_T)
        ctx.logits = logits
        ctx.tile_tokens = tile_tokens
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_TD, row_ID, target_T, total_T = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None
        assert logits is not None, "backward can run only once: it overwrites the logits"
        grad_query_TD = torch.empty_like(query_TD)
        grad_row_ID = torch.zeros_like(row_ID)
        for tokens, slope_SI in zip(_token_tiles(len(query_TD), ctx.tile_tokens), logits, strict=True):
            upstream_S1 = grads[0][tokens, None]
            slope_SI.sub_(total_T[tokens, None]).exp_().mul_(upstream_S1)
            slope_SI.scatter_add_(1, target_T[tokens, None], -upstream_S1)
            grad_query_TD[tokens] = slope_SI @ row_ID
            grad_row_ID.addmm_(slope_SI.T, query_TD[tokens])
        return grad_query_TD, grad_row_ID, None, None


def _token_tiles(num_tokens: int, tile_tokens: int) -> list[slice]:
    return [slice(first, min(first + tile_tokens, num_tokens)) for first in range(0, num_tokens, tile_tokens)]


TILE_TOKENS, TILE_ITEMS = 4096, 8192


def tiled_cross_entropy(
    query_TD: torch.Tensor,
    row_ID: torch.Tensor,
    target_T: torch.Tensor,
    *,
    tile_tokens: int = TILE_TOKENS,
    tile_items: int = TILE_ITEMS,
) -> torch.Tensor:
    """Return the (T,) losses of `full_cross_entropy` (its reference implementation), one tile of logits at a time.

    Args:
        query_TD: Query of each token.
        row_ID: Rows of all items; converted to the dtype of the queries.
        target_T: Row index of the target item of each token.
        tile_tokens: Number of tokens per tile.
        tile_items: Number of items per tile.
    """
    return _TiledCrossEntropy.apply(query_TD, row_ID.to(query_TD.dtype), target_T, tile_tokens, tile_items)  # type: ignore[no-any-return]


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        query_TD: torch.Tensor,
        row_ID: torch.Tensor,
        target_T: torch.Tensor,
        tile_tokens: int,
        tile_items: int,
    ) -> torch.Tensor:
        num_tokens = len(query_TD)
        wide = torch.promote_types(query_TD.dtype, torch.float32)
        highest_T = torch.full((num_tokens,), -torch.inf, dtype=wide, device=query_TD.device)
        summed_T, first_T = torch.zeros_like(highest_T), torch.zeros_like(highest_T)
        for tokens, items in _tiles(num_tokens, len(row_ID), tile_tokens, tile_items):
            logit_SJ = query_TD[tokens] @ row_ID[items].T
            running = highest_T[tokens], summed_T[tokens], first_T[tokens]
            add_tile(logit_SJ, target_T[tokens] - items.start, *running)
        total_T = highest_T + summed_T.log()
        ctx.save_for_backward(query_TD, row_ID, target_T, total_T)
        ctx.tile = tile_tokens, tile_items
        return total_T - first_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_TD, row_ID, target_T, total_T = ctx.saved_tensors
        grad_query_TD = torch.zeros(query_TD.shape, dtype=total_T.dtype, device=query_TD.device)
        grad_row_ID = torch.zeros(row_ID.shape, dtype=total_T.dtype, device=query_TD.device)
        for tokens, items in _tiles(len(query_TD), len(row_ID), *ctx.tile):
            slope_SJ = query_TD[tokens] @ row_ID[items].T
            to_slopes(slope_SJ, target_T[tokens] - items.start, total_T[tokens], grads[0][tokens])
            grad_query_TD[tokens] += slope_SJ @ row_ID[items]
            grad_row_ID[items] += slope_SJ.T @ query_TD[tokens]
        return grad_query_TD, grad_row_ID, None, None, None


def add_tile(
    logit_SJ: torch.Tensor,
    target_S: torch.Tensor,
    highest_S: torch.Tensor,
    summed_S: torch.Tensor,
    first_S: torch.Tensor,
) -> None:
    """Update the running maximum, sum of exponentials and target logit of each token with a tile, in place."""
    if runs_triton(logit_SJ):
        _add_tile_on_device(logit_SJ, target_S, highest_S, summed_S, first_S)
        return
    logit_SJ = at_least_float32(logit_SJ)
    higher_S = torch.maximum(highest_S, logit_SJ.amax(1))
    summed_S.copy_(summed_S * (highest_S - higher_S).exp() + (logit_SJ - higher_S[:, None]).exp().sum(1))
    highest_S.copy_(higher_S)
    is_in_tile, index_S = _in_tile(target_S, logit_SJ.shape[1])
    first_S.add_(torch.where(is_in_tile, logit_SJ.gather(1, index_S[:, None])[:, 0], 0.0))


def to_slopes(logit_SJ: torch.Tensor, target_S: torch.Tensor, total_S: torch.Tensor, upstream_S: torch.Tensor) -> None:
    """Replace logits by the gradients of the loss with respect to them, in place."""
    if runs_triton(logit_SJ):
        _to_slopes_on_device(logit_SJ, target_S, total_S, upstream_S)
        return
    softmax_SJ = (at_least_float32(logit_SJ) - total_S[:, None]).exp()
    is_in_tile, index_S = _in_tile(target_S, logit_SJ.shape[1])
    softmax_SJ.scatter_add_(1, index_S[:, None], -is_in_tile[:, None].to(softmax_SJ.dtype))
    logit_SJ.copy_(softmax_SJ * upstream_S[:, None])


def _fake(*arguments: torch.Tensor) -> None:
    """Return nothing: these operators only write to arguments."""


@kernel_op("cross_entropy_tile", fake=_fake, mutates=("highest", "summed", "first"))
def _add_tile_on_device(
    logit: torch.Tensor, target: torch.Tensor, highest: torch.Tensor, summed: torch.Tensor, first: torch.Tensor
) -> None:
    from nestrec.ops.losses.cross_entropy_kernels import add_tile_kernel

    add_tile_kernel(logit, target, highest, summed, first)


@kernel_op("cross_entropy_slopes", fake=_fake, mutates=("logit",))
def _to_slopes_on_device(
    logit: torch.Tensor, target: torch.Tensor, total: torch.Tensor, upstream: torch.Tensor
) -> None:
    from nestrec.ops.losses.cross_entropy_kernels import to_slopes_kernel

    to_slopes_kernel(logit, target, total, upstream)


def _in_tile(target_S: torch.Tensor, num_items: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each target is in the tile, and its column clamped to the tile."""
    return (target_S >= 0) & (target_S < num_items), target_S.clamp(0, num_items - 1)


def _tiles(num_tokens: int, num_items: int, tile_tokens: int, tile_items: int) -> Iterator[tuple[slice, slice]]:
    for token in range(0, num_tokens, tile_tokens):
        for item in range(0, num_items, tile_items):
            yield slice(token, min(token + tile_tokens, num_tokens)), slice(item, min(item + tile_items, num_items))
