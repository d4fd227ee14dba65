"""SASRec over pages (paged.py). The definition is `nestrec.models.kept.sasrec_cached`.

Legend: T rows of the batch, C candidates, D model width.
"""

import torch

from nestrec.models.kept.paged import PagedBatch, Pages
from nestrec.models.sasrec import SASRec, SASRecLayer
from nestrec.models.segments import KeptPages
from nestrec.ops.attention.paged.blocks import Seen


class PagedSASRec:
    """A model over the pages of a pool."""

    def __init__(self, model: SASRec, kept: KeptPages):
        cfg = model.cfg
        self._layers = [layer for layer in model.layers if isinstance(layer, SASRecLayer)]
        self._final_norm, self._scale = model.final_norm, (cfg.dim // cfg.num_heads) ** -0.5
        self.pages = Pages(kept, seen=[Seen()] * cfg.num_layers, max_length=cfg.max_length)

    def weights_changed(self) -> None:
        """Nothing was copied of them."""

    def forward(self, x_TD: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """(C, D) states of the candidates."""
        for number, layer in enumerate(self._layers):
            is_last = number == len(self._layers) - 1
            k, v = layer.key(x_TD), layer.value(x_TD)
            self.pages.store(number, k, v, batch)
            x_TD = x_TD.index_select(0, batch.row_C) if is_last else x_TD
            if not len(x_TD):
                return x_TD
            normed = layer.query_norm(x_TD)
            attended = self.pages.attention(
                number, layer.query(normed), k, v, batch, scale=self._scale, weights="softmax", is_last=is_last
            )
            x_TD = layer.behind_attention(normed, attended)
        found_CD: torch.Tensor = self._final_norm(x_TD if self._layers else x_TD.index_select(0, batch.row_C))
        return found_CD
