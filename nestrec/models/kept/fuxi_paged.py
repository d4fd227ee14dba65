"""FuXi over pages (paged.py). The definition is `nestrec.models.kept.fuxi_cached`.

Legend: T rows of the batch, C candidates, D model width.
"""

import torch

from nestrec.models.fuxi import NORM_EPS, FuXi, FuXiBlock
from nestrec.models.kept.paged import PagedBatch, Pages, PairSource, seen_by_layers
from nestrec.models.segments import KeptPages
from nestrec.ops.layers.dropout import Dropout
from nestrec.ops.layers.feed_forward import feed_forward
from nestrec.ops.layers.gated_output import gated_output
from nestrec.ops.layers.norm_projection import norm_projection


class PagedFuXi:
    """A model over the pages of a pool, with the weights of its last block in the order in which they are used."""

    def __init__(self, model: FuXi, kept: KeptPages):
        cfg = model.cfg
        self._blocks = [block for block in model.layers if isinstance(block, FuXiBlock)]
        self._width, self._has_time = cfg.num_heads * cfg.head_dim, cfg.time_channel
        self._num_buckets = cfg.num_time_buckets if cfg.time_channel and cfg.time_encoding == "buckets" else None
        self.pages = Pages(kept, seen=seen_by_layers(cfg.attention, cfg.num_layers), max_length=len(model.position))
        if self._blocks:
            self._last_vk, self._last_uq = self._last_weights()

    def _last_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        gate, value, query, key = self._blocks[-1].uvqk.detach().split(self._blocks[-1].widths, dim=1)
        return torch.cat([value, key], dim=1), torch.cat([gate, query], dim=1)

    def weights_changed(self) -> None:
        """Those of the model have other values; what was captured reads them where they were."""
        if self._blocks:
            for held, fresh in zip((self._last_vk, self._last_uq), self._last_weights(), strict=True):
                held.copy_(fresh)

    def forward(self, x_TD: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """(C, D) states of the candidates."""
        if not self._blocks:
            return x_TD.index_select(0, batch.row_C)
        self.pages.store_times(batch)
        sources = self.pages.sources(batch, self._num_buckets, x_TD.dtype)
        state: tuple[torch.Tensor, torch.Tensor | None] = (x_TD, None)
        for number, block in enumerate(self._blocks[:-1]):
            projected = norm_projection(*state, block.uvqk, block.widths, norm="rms", eps=NORM_EPS)
            v, q, k = projected.parts
            self.pages.store(number, k, v, batch)
            channels = self._channels(number, q, k, v, batch, sources[number])
            state = _behind_attention(block, projected.total, channels, projected.gate)
        return self._last_block(len(self._blocks) - 1, state, batch, sources[-1])

    def _last_block(
        self, number: int, state: tuple[torch.Tensor, torch.Tensor | None], batch: PagedBatch, source: PairSource
    ) -> torch.Tensor:
        block, width = self._blocks[number], self._width
        kept = norm_projection(*state, self._last_vk, (0, width, width), norm="rms", eps=NORM_EPS)
        v, k = kept.parts
        self.pages.store(number, k, v, batch)
        x_CD = kept.total.index_select(0, batch.row_C)
        if not len(x_CD):
            return x_CD
        asking = norm_projection(x_CD, None, self._last_uq, (block.widths[0], width), norm="rms", eps=NORM_EPS)
        channels = self._channels(number, asking.parts[0], k, v, batch, source, is_last=True)
        total, added = _behind_attention(block, x_CD, channels, asking.gate)
        return total + added

    def _channels(  # noqa: PLR0917
        self,
        number: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: PagedBatch,
        source: PairSource,
        is_last: bool = False,
    ) -> list[torch.Tensor]:
        """Semantic, positional, and temporal where there is time."""
        block, pages = self._blocks[number], self.pages
        found = [pages.attention(number, q, k, v, batch, scale=1.0 / block.normaliser, is_last=is_last)]
        for by_time in (False, True) if self._has_time else (False,):
            biases = source.of(block, by_distance=not by_time, by_time=by_time)
            channel = pages.attention(
                number, None, k, v, batch, scale=1.0, weights="channel", biases=biases, is_last=is_last
            )
            found.append(channel)
        return found


def _behind_attention(
    block: FuXiBlock, x: torch.Tensor, channels: list[torch.Tensor], gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both stages: (x and the first one, what the second one adds)."""
    none = Dropout(gate, 0, 0.0)
    weight, bias = block.output.weight, block.output.bias
    first = gated_output(tuple(channels), gate, weight, bias, none, norm="rms", eps=NORM_EPS)
    return feed_forward(x, first, block.up, block.down, none, eps=NORM_EPS)
