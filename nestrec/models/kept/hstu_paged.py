"""HSTU over pages (paged.py). The definition is `nestrec.models.kept.hstu_cached`.

Legend: T rows of the batch, C candidates, D model width.
"""

import torch

from nestrec.models.hstu import HSTU, NORM_EPS, HSTULayer
from nestrec.models.kept.paged import PagedBatch, Pages, PairSource, seen_by_layers
from nestrec.models.segments import KeptPages
from nestrec.ops.layers.dropout import Dropout
from nestrec.ops.layers.gated_output import gated_output
from nestrec.ops.layers.norm_projection import norm_projection

_State = tuple[torch.Tensor, torch.Tensor | None]
"""(x, what is still to be added to it), as `HSTULayer.forward` has it"""


class PagedHSTU:
    """A model over the pages of a pool, with the weights of its last layer in the order in which they are used."""

    def __init__(self, model: HSTU, kept: KeptPages):
        cfg = model.cfg
        self._layers = [layer for layer in model.layers if isinstance(layer, HSTULayer)]
        self._width = cfg.num_heads * cfg.head_dim
        self._has_bias = cfg.position_bias or cfg.time_bias
        self._num_buckets = cfg.num_time_buckets if cfg.time_bias and cfg.time_encoding == "buckets" else None
        self.pages = Pages(kept, seen=seen_by_layers(cfg.attention, cfg.num_layers), max_length=len(model.position))
        if self._layers:
            self._last_vk, self._last_uq = self._last_weights()

    def _last_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        gate, value, query, key = self._layers[-1].uvqk.detach().chunk(4, dim=1)
        return torch.cat([value, key], dim=1), torch.cat([gate, query], dim=1)

    def weights_changed(self) -> None:
        """Those of the model have other values; what was captured reads them where they were."""
        if self._layers:
            for held, fresh in zip((self._last_vk, self._last_uq), self._last_weights(), strict=True):
                held.copy_(fresh)

    def forward(self, x_TD: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """(C, D) states of the candidates."""
        if not self._layers:
            return x_TD.index_select(0, batch.row_C)
        self.pages.store_times(batch)
        sources = self.pages.sources(batch, self._num_buckets, x_TD.dtype) if self._has_bias else []
        state: _State = (x_TD, None)
        for number in range(len(self._layers) - 1):
            state = self._layer(number, state, batch, sources)
        return self._last_layer(len(self._layers) - 1, state, batch, sources)

    def _layer(self, number: int, state: _State, batch: PagedBatch, sources: list[PairSource]) -> _State:
        layer = self._layers[number]
        projected = norm_projection(*state, layer.uvqk, (self._width,) * 4, norm="layer", eps=NORM_EPS)
        v, q, k = projected.parts
        self.pages.store(number, k, v, batch)
        attended = self.pages.attention(
            number, q, k, v, batch, scale=1.0 / layer.normaliser, biases=self._biases(layer, number, sources)
        )
        return projected.total, _gated(layer, attended, projected.gate)

    def _last_layer(self, number: int, state: _State, batch: PagedBatch, sources: list[PairSource]) -> torch.Tensor:
        layer, width = self._layers[number], self._width
        kept = norm_projection(*state, self._last_vk, (0, width, width), norm="layer", eps=NORM_EPS)
        v, k = kept.parts
        self.pages.store(number, k, v, batch)
        x_CD = kept.total.index_select(0, batch.row_C)
        if not len(x_CD):
            return x_CD
        asking = norm_projection(x_CD, None, self._last_uq, (width, width), norm="layer", eps=NORM_EPS)
        attended = self.pages.attention(
            number,
            asking.parts[0],
            k,
            v,
            batch,
            scale=1.0 / layer.normaliser,
            biases=self._biases(layer, number, sources),
            is_last=True,
        )
        return x_CD + _gated(layer, attended, asking.gate)

    @staticmethod
    def _biases(layer: HSTULayer, number: int, sources: list[PairSource]) -> torch.Tensor | None:
        return sources[number].of(layer) if sources else None


def _gated(layer: HSTULayer, attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    none = Dropout(gate, 0, 0.0)
    return gated_output((attended,), gate, layer.output.weight, layer.output.bias, none, norm="layer", eps=NORM_EPS)
