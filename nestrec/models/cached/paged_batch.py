"""Forward passes of HSTU, FuXi and SASRec over a paged KV cache.

FuXi over pages (paged.py). The definition is `nestrec.models.cached.cached_forwards`.

Legend: T rows of the batch, C candidates, D model width.

Backbones over pages, on a GPU: the new tokens of a whole batch in one pass, without a loop over sequences.

The definition of each is its cached forward. Everything that differs between batches of one size lies in tensors, so a
pass can be captured as a CUDA graph. Of the last layer, histories need keys and values only: queries, gates and outputs
are those of the rows that are asked for.

Legend: T rows of the batch (histories of all sequences first, then all candidates), C candidates, D model width.

HSTU over pages (paged.py). The definition is `nestrec.models.cached.cached_forwards`.

Legend: T rows of the batch, C candidates, D model width.

SASRec over pages (paged.py). The definition is `nestrec.models.cached.cached_forwards`.

Legend: T rows of the batch, C candidates, D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nestrec.models.backbone_spec import AttentionSpanConfig
from nestrec.models.fuxi import FUXI_NORM_EPS, FuXi, FuXiBlock
from nestrec.models.hstu import HSTU, NORM_EPS, HSTULayer
from nestrec.models.sasrec import SASRec, SASRecLayer
from nestrec.models.sequence import PagedKVCache
from nestrec.ops.attention.paged.paged_attention import (
    PagedLayerKV,
    Weights,
    Workspace,
    paged_attention,
    store_in_pages,
)
from nestrec.ops.attention.paged.paged_bias import PairPlan, PairTimes, find_buckets, store_times, write_biases
from nestrec.ops.attention.paged.query_blocks import VisibleRange, most_tiles
from nestrec.ops.layers.fused_layers import Dropout, feed_forward, gated_output, norm_projection


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Where the rows of a batch stand, on the device; indices are int32."""

    slot_T: torch.Tensor
    """of the pool, where keys and values are kept; negative where they are not"""
    blocks: Sequence[torch.Tensor]
    """(blocks, FIELDS) of `write_blocks`, for each of the encoder's `seen`"""
    last_blocks: torch.Tensor
    """those of the candidates, as the last layer sees"""
    pages: torch.Tensor
    """page numbers of all sequences"""
    row_C: torch.Tensor
    """of the candidates"""
    time_T: torch.Tensor | None = None
    """float64 seconds, of a model that reads them"""
    query_time_T: torch.Tensor | None = None


class LearnedBiases(Protocol):
    """What a layer has learned of distance and time; each may be absent."""

    @property
    def position_table(self) -> torch.Tensor | None: ...
    @property
    def time_table(self) -> torch.Tensor | None: ...
    @property
    def time_function(self) -> torch.Tensor | None: ...


class PairSource:
    """Biases of the pairs of some blocks, layer by layer in the same memory."""

    def __init__(self, plan: PairPlan, times: PairTimes | None, num_buckets: int | None, memory: torch.Tensor):
        """num_buckets: of tables of time; none where there are no such tables. memory: of the plan or more."""
        self._plan = plan
        self._times = times
        self._memory = memory
        self._buckets: torch.Tensor | None = None
        if num_buckets is not None and times is not None:
            self._buckets = find_buckets(plan, times, num_buckets)

    def of(self, layer: LearnedBiases, *, by_distance: bool = True, by_time: bool = True) -> torch.Tensor:
        """The sum of what is asked for; valid until the next one is."""
        write_biases(
            self._memory,
            self._plan,
            position_table=layer.position_table if by_distance else None,
            time_table=layer.time_table if by_time else None,
            buckets=self._buckets if by_time else None,
            time_function=layer.time_function if by_time else None,
            times=self._times if by_time else None,
        )
        return self._memory


class PagedLayers:
    """The pages of all layers, and how their attention is computed."""

    def __init__(self, kept: PagedKVCache, *, seen: Sequence[VisibleRange], max_length: int):
        """seen: of each layer."""
        self._kept = kept
        self._of_layer = list(seen)
        self._max_length = max_length
        _, _, num_heads, _, dim = kept.pool.shape
        self._workspace = Workspace.make(num_heads, dim, kept.pool.device)
        self.seen = tuple(dict.fromkeys(seen)) or (VisibleRange(),)
        self.last_seen = self._of_layer[-1] if seen else VisibleRange()

    def store_times(self, batch: PagedBatch) -> None:
        """Those of new tokens beside the pages that keep them, where the model reads times."""
        if self._kept.times is not None and batch.time_T is not None:
            store_times(batch.time_T, batch.slot_T, self._kept.times)

    def store(self, layer: int, k_TW: torch.Tensor, v_TW: torch.Tensor, batch: PagedBatch) -> None:
        store_in_pages(k_TW, v_TW, self._layer(layer), batch.slot_T)

    def attention(
        self,
        layer: int,
        q_TW: torch.Tensor | None,
        k_TW: torch.Tensor,
        v_TW: torch.Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        weights: Weights = "silu",
        biases: torch.Tensor | None = None,
        is_last: bool = False,
    ) -> torch.Tensor:
        """(T, H * D), or (C, H * D) of the last layer."""
        seen = self._of_layer[layer]
        return paged_attention(
            q_TW,
            k_TW,
            v_TW,
            self._layer(layer),
            batch.last_blocks if is_last else batch.blocks[self.seen.index(seen)],
            batch.pages,
            workspace=self._workspace,
            page_tokens=self._kept.page_tokens,
            scale=scale,
            weights=weights,
            biases=biases,
            num_asked=len(batch.row_C) if is_last else None,
            seen=seen,
        )

    def sources(self, batch: PagedBatch, num_buckets: int | None, dtype: torch.dtype) -> "list[PairSource]":
        """Of each layer; the last one's are those of the candidates."""
        times = None
        if self._kept.times is not None and batch.time_T is not None and batch.query_time_T is not None:
            times = PairTimes(slots=self._kept.times, time_T=batch.time_T, query_time_T=batch.query_time_T)
        tables = dict(zip(self.seen, batch.blocks, strict=True))
        plans = {seen: self._plan(tables[seen], batch.pages, seen) for seen in dict.fromkeys(self._of_layer[:-1])}
        last = self._plan(batch.last_blocks, batch.pages, self.last_seen)
        memory = max((*plans.values(), last), key=lambda plan: plan.num_tiles).memory(dtype)
        made = {seen: PairSource(plan, times, num_buckets, memory) for seen, plan in plans.items()}
        return [*(made[seen] for seen in self._of_layer[:-1]), PairSource(last, times, num_buckets, memory)]

    def _plan(self, blocks: torch.Tensor, pages: torch.Tensor, seen: VisibleRange) -> PairPlan:
        num_tiles = most_tiles(len(blocks), self._max_length)
        return PairPlan(blocks=blocks, pages=pages, page_tokens=self._kept.page_tokens, num_tiles=num_tiles, seen=seen)

    def _layer(self, layer: int) -> PagedLayerKV:
        return PagedLayerKV(self._kept.pool[layer], None if self._kept.scales is None else self._kept.scales[layer])


def seen_by_layers(reach: AttentionSpanConfig, num_layers: int) -> list[VisibleRange]:
    """What the blocks of each layer see."""
    rules = [reach.rules(layer) for layer in range(num_layers)]
    return [VisibleRange(r.max_attention_length or 0, r.num_context, reach.cuts(n)) for n, r in enumerate(rules)]


class PagedFuXi:
    """A model over the pages of a pool, with the weights of its last block in the order in which they are used."""

    def __init__(self, model: FuXi, kept: PagedKVCache):
        cfg = model.cfg
        self._blocks = [block for block in model.layers if isinstance(block, FuXiBlock)]
        self._width = cfg.num_heads * cfg.head_dim
        self._has_time = cfg.time_channel
        self._num_buckets = cfg.num_time_buckets if cfg.time_channel and cfg.time_encoding == "buckets" else None
        self.pages = PagedLayers(
            kept, seen=seen_by_layers(cfg.attention, cfg.num_layers), max_length=len(model.position)
        )
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
            projected = norm_projection(*state, block.uvqk, block.widths, norm="rms", eps=FUXI_NORM_EPS)
            v, q, k = projected.parts
            self.pages.store(number, k, v, batch)
            channels = self._channels(number, q, k, v, batch, sources[number])
            state = _behind_attention(block, projected.total, channels, projected.gate)
        return self._last_block(len(self._blocks) - 1, state, batch, sources[-1])

    def _last_block(
        self, number: int, state: tuple[torch.Tensor, torch.Tensor | None], batch: PagedBatch, source: PairSource
    ) -> torch.Tensor:
        block = self._blocks[number]
        width = self._width
        kept = norm_projection(*state, self._last_vk, (0, width, width), norm="rms", eps=FUXI_NORM_EPS)
        v, k = kept.parts
        self.pages.store(number, k, v, batch)
        x_CD = kept.total.index_select(0, batch.row_C)
        if not len(x_CD):
            return x_CD
        asking = norm_projection(x_CD, None, self._last_uq, (block.widths[0], width), norm="rms", eps=FUXI_NORM_EPS)
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
        block = self._blocks[number]
        pages = self.pages
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
    weight = block.output.weight
    bias = block.output.bias
    first = gated_output(tuple(channels), gate, weight, bias, none, norm="rms", eps=FUXI_NORM_EPS)
    return feed_forward(x, first, block.up, block.down, none, eps=FUXI_NORM_EPS)


_State = tuple[torch.Tensor, torch.Tensor | None]
"""(x, what is still to be added to it), as `HSTULayer.forward` has it"""


class PagedHSTU:
    """A model over the pages of a pool, with the weights of its last layer in the order in which they are used."""

    def __init__(self, model: HSTU, kept: PagedKVCache):
        cfg = model.cfg
        self._layers = [layer for layer in model.layers if isinstance(layer, HSTULayer)]
        self._width = cfg.num_heads * cfg.head_dim
        self._has_bias = cfg.position_bias or cfg.time_bias
        self._num_buckets = cfg.num_time_buckets if cfg.time_bias and cfg.time_encoding == "buckets" else None
        self.pages = PagedLayers(
            kept, seen=seen_by_layers(cfg.attention, cfg.num_layers), max_length=len(model.position)
        )
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
        layer = self._layers[number]
        width = self._width
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


class PagedSASRec:
    """A model over the pages of a pool."""

    def __init__(self, model: SASRec, kept: PagedKVCache):
        cfg = model.cfg
        self._layers = [layer for layer in model.layers if isinstance(layer, SASRecLayer)]
        self._final_norm = model.final_norm
        self._scale = (cfg.dim // cfg.num_heads) ** -0.5
        self.pages = PagedLayers(kept, seen=[VisibleRange()] * cfg.num_layers, max_length=cfg.max_length)

    def weights_changed(self) -> None:
        """Nothing was copied of them."""

    def forward(self, x_TD: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """(C, D) states of the candidates."""
        for number, layer in enumerate(self._layers):
            is_last = number == len(self._layers) - 1
            k = layer.key(x_TD)
            v = layer.value(x_TD)
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
