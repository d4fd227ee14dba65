"""HSTU for serving on a GPU: the new tokens of a whole batch in one pass over pages, without a loop over sequences.

The definition is `cached_forward`. Everything that differs between batches of one size lies in tensors, so the pass can
be captured as a CUDA graph. Models with relative biases, or whose layers do not all see alike, take `cached_forward`.

Of the last layer, histories need keys and values only: queries, gates and outputs are those of the candidates.

Legend: T rows of the batch (histories of all sequences first, then all candidates), C candidates, D model width.
"""

from dataclasses import dataclass

import torch

from nestrec.models.hstu import HSTU, NORM_EPS, HSTULayer
from nestrec.ops.attention.paged import Workspace, paged_attention, store_in_pages
from nestrec.ops.layers.dropout import Dropout
from nestrec.ops.layers.gated_output import gated_output
from nestrec.ops.layers.norm_projection import norm_projection


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Where the rows of a batch stand, on the device, all int32."""

    slot_T: torch.Tensor
    """of the pool, where keys and values are kept; negative where they are not"""
    blocks: torch.Tensor
    """(blocks, FIELDS) of `write_blocks`"""
    last_blocks: torch.Tensor
    """those of the candidates"""
    pages: torch.Tensor
    """page numbers of all sequences"""
    row_C: torch.Tensor
    """of the candidates"""


class PagedHSTU:
    """A model over the pages of a pool, with the weights of its last layer in the order in which they are used."""

    def __init__(self, model: HSTU, pool: torch.Tensor, page_tokens: int):
        """pool: (L, 2, H, slots, D), read and written."""
        self._pool, self._page_tokens = pool, page_tokens
        self._workspace = Workspace.make(model.cfg.num_heads, model.cfg.head_dim, pool.device)
        self._layers = [layer for layer in model.layers if isinstance(layer, HSTULayer)]
        self._last_vk, self._last_uq = self._last_weights()

    def _last_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        gate, value, query, key = self._layers[-1].uvqk.detach().chunk(4, dim=1)
        return torch.cat([value, key], dim=1), torch.cat([gate, query], dim=1)

    def weights_changed(self) -> None:
        """Those of the model have other values; what was captured reads them where they were."""
        for held, fresh in zip((self._last_vk, self._last_uq), self._last_weights(), strict=True):
            held.copy_(fresh)

    def forward(self, x_TD: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """(C, D) states of the candidates."""
        state: tuple[torch.Tensor, torch.Tensor | None] = (x_TD, None)
        for number, layer in enumerate(self._layers[:-1]):
            state = self._layer(layer, state, batch, self._pool[number])
        return self._last_layer(self._layers[-1], state, batch, self._pool[len(self._layers) - 1])

    def _layer(
        self, layer: HSTULayer, state: tuple[torch.Tensor, torch.Tensor | None], batch: PagedBatch, pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `HSTULayer.forward`: state and what it returns are (x, what is still to be added to it)."""
        width = layer.cfg.num_heads * layer.cfg.head_dim
        projected = norm_projection(*state, layer.uvqk, (width,) * 4, norm="layer", eps=NORM_EPS)
        v, q, k = projected.parts
        store_in_pages(k, v, pool, batch.slot_T)
        attended = paged_attention(
            q,
            k,
            v,
            pool,
            batch.blocks,
            batch.pages,
            workspace=self._workspace,
            page_tokens=self._page_tokens,
            normaliser=layer.normaliser,
            rules=layer.rules,
        )
        return projected.total, _gated(layer, attended, projected.gate)

    def _last_layer(
        self, layer: HSTULayer, state: tuple[torch.Tensor, torch.Tensor | None], batch: PagedBatch, pool: torch.Tensor
    ) -> torch.Tensor:
        width = layer.cfg.num_heads * layer.cfg.head_dim
        kept = norm_projection(*state, self._last_vk, (0, width, width), norm="layer", eps=NORM_EPS)
        v, k = kept.parts
        store_in_pages(k, v, pool, batch.slot_T)
        x_CD = kept.total.index_select(0, batch.row_C)
        if not len(x_CD):
            return x_CD
        asking = norm_projection(x_CD, None, self._last_uq, (width, width), norm="layer", eps=NORM_EPS)
        attended = paged_attention(
            asking.parts[0],
            k,
            v,
            pool,
            batch.last_blocks,
            batch.pages,
            workspace=self._workspace,
            page_tokens=self._page_tokens,
            normaliser=layer.normaliser,
            are_candidates=True,
            rules=layer.rules,
        )
        return x_CD + _gated(layer, attended, asking.gate)


def _gated(layer: HSTULayer, attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    none = Dropout(gate, 0, 0.0)
    return gated_output((attended,), gate, layer.output.weight, layer.output.bias, none, norm="layer", eps=NORM_EPS)
