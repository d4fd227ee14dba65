"""HSTU for serving on a GPU: the new tokens of a whole batch in one pass over pages, without a loop over sequences.

The definition is `cached_forward`. Everything that differs between batches of one size lies in tensors, so the pass can
be captured as a CUDA graph. Models with relative biases take `cached_forward`.

Legend: T rows of the batch (histories of all sequences first, then all candidates), D model width.
"""

from dataclasses import dataclass

import torch

from nestrec.models.hstu import HSTU, NORM_EPS, HSTULayer
from nestrec.ops.dropout import Dropout
from nestrec.ops.gated_output import gated_output
from nestrec.ops.norm_projection import norm_projection
from nestrec.ops.paged_attention import paged_attention, store_in_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Where the rows of a batch stand, on the device, all int32."""

    position_T: torch.Tensor
    """in its sequence; a candidate's is the length of the history"""
    slot_T: torch.Tensor
    """of the pool, where keys and values are kept; negative where they are not"""
    blocks: torch.Tensor
    """(blocks, FIELDS) of `plan_blocks`, filled up with zeros"""
    last_blocks: torch.Tensor
    """those of the candidates, whose states alone are read after the last layer"""
    pages: torch.Tensor
    """page numbers of all sequences"""


def is_pageable(model: HSTU) -> bool:
    """Whether `paged_forward` computes this model."""
    cfg = model.cfg
    has_whole_tiles = cfg.head_dim >= 16 and cfg.head_dim & (cfg.head_dim - 1) == 0
    return has_whole_tiles and not (cfg.position_bias or cfg.time_bias)


def paged_forward(
    model: HSTU, x_TD: torch.Tensor, batch: PagedBatch, pool: torch.Tensor, page_tokens: int
) -> torch.Tensor:
    """(T, D) states, of the candidates only. pool: (L, 2, H, slots, D), read and written."""
    x_TD = x_TD * model.cfg.dim**0.5 + model.position[batch.position_T]
    delta_TD: torch.Tensor | None = None
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, HSTULayer)
        blocks = batch.last_blocks if number == len(model.layers) - 1 else batch.blocks
        x_TD, delta_TD = _layer(layer, (x_TD, delta_TD), batch, blocks, pool[number], page_tokens)
    return x_TD if delta_TD is None else x_TD + delta_TD


def _layer(  # noqa: PLR0917
    layer: HSTULayer, state: tuple[torch.Tensor, torch.Tensor | None], batch: PagedBatch, blocks: torch.Tensor,
    pool: torch.Tensor, page_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `HSTULayer.forward`: state and what it returns are (x, what is still to be added to it)."""
    width = layer.cfg.num_heads * layer.cfg.head_dim
    projected = norm_projection(*state, layer.uvqk, (width,) * 4, norm="layer", eps=NORM_EPS)
    v, q, k = projected.parts
    store_in_pages(k, v, pool, batch.slot_T)
    attended = paged_attention(
        q, k, v, pool, blocks, batch.pages, page_tokens=page_tokens, normaliser=layer.cfg.normaliser
    )
    added = gated_output(
        (attended,), projected.gate, layer.output.weight, layer.output.bias, Dropout(batch.position_T, 0, 0.0),
        norm="layer", eps=NORM_EPS,
    )  # fmt: skip
    return projected.total, added
