"""Batched forward passes of HSTU, FuXi and SASRec over a paged KV cache, on a GPU.

The new tokens of a batch are computed in one pass, without a loop over sequences. The reference implementations are in
`nestrec.models.cached.cached_forwards`. All values that differ between batches of one size are in tensors, so a pass
can be captured as a CUDA graph. In the last layer, history tokens need keys and values only: queries, gates and outputs
are computed for the candidates.

Legend: T rows of the batch (histories of all sequences first, then all candidates), C candidates, D model width.
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
from nestrec.ops.attention.paged.paged_bias import PairPlan, PairTimes, compute_buckets, store_times, write_biases
from nestrec.ops.attention.paged.query_blocks import VisibleRange, max_tiles
from nestrec.ops.layers.fused_layers import Dropout, feed_forward, gated_output, norm_projection


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Layout of a batch of new tokens over the paged KV cache. All tensors are on the device; indices are int32."""

    slot_T: torch.Tensor
    """Slot of the pool in which the keys and values of a row are cached; negative if they are not cached."""
    blocks: Sequence[torch.Tensor]
    """Query blocks, (blocks, FIELDS) as written by `write_blocks`, for each of the encoder's `visible_ranges`."""
    last_blocks: torch.Tensor
    """Query blocks of the candidates, for the last layer."""
    pages: torch.Tensor
    """Page numbers of all sequences (block table)."""
    row_C: torch.Tensor
    """Row of each candidate."""
    time_T: torch.Tensor | None = None
    """Event time of each row, float64 seconds, if the model reads times."""
    query_time_T: torch.Tensor | None = None
    """Query time of each row, float64 seconds, if the model reads times."""


class LearnedBiases(Protocol):
    """Protocol of layers with learned position and time biases; each of them can be None."""

    @property
    def position_table(self) -> torch.Tensor | None: ...
    @property
    def time_table(self) -> torch.Tensor | None: ...
    @property
    def time_function(self) -> torch.Tensor | None: ...


class PairSource:
    """Computes the attention biases of the token pairs of some blocks, for one layer at a time in the same memory.

    Args:
        plan: Tiles of pairs.
        times: Event and query times; None if the model does not read times.
        num_buckets: Number of time buckets; None if the model does not have tables of time buckets.
        memory: Buffer for the biases, at least as large as the plan requires.
    """

    def __init__(self, plan: PairPlan, times: PairTimes | None, num_buckets: int | None, memory: torch.Tensor):
        self._plan = plan
        self._times = times
        self._memory = memory
        self._buckets: torch.Tensor | None = None
        if num_buckets is not None and times is not None:
            self._buckets = compute_buckets(plan, times, num_buckets)

    def compute(self, layer: LearnedBiases, *, by_distance: bool = True, by_time: bool = True) -> torch.Tensor:
        """Return the sum of the selected biases of a layer; valid until the next call."""
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
    """Paged KV cache of all layers, and attention over it.

    Args:
        cache: Memory of the cache.
        layer_ranges: Visible range of each layer.
        max_length: Maximum sequence length, in tokens.
    """

    def __init__(self, cache: PagedKVCache, *, layer_ranges: Sequence[VisibleRange], max_length: int):
        self._cache = cache
        self._layer_ranges = list(layer_ranges)
        self._max_length = max_length
        _, _, num_heads, _, dim = cache.pool.shape
        self._workspace = Workspace.create(num_heads, dim, cache.pool.device)
        self.visible_ranges = tuple(dict.fromkeys(layer_ranges)) or (VisibleRange(),)
        self.last_visible_range = self._layer_ranges[-1] if layer_ranges else VisibleRange()

    def store_times(self, batch: PagedBatch) -> None:
        """Store the event times of new tokens in the slots of their keys and values, if the model reads times."""
        if self._cache.times is not None and batch.time_T is not None:
            store_times(batch.time_T, batch.slot_T, self._cache.times)

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
        """Return the attention output: (T, H * D), or (C, H * D) in the last layer."""
        visible_range = self._layer_ranges[layer]
        return paged_attention(
            q_TW,
            k_TW,
            v_TW,
            self._layer(layer),
            batch.last_blocks if is_last else batch.blocks[self.visible_ranges.index(visible_range)],
            batch.pages,
            workspace=self._workspace,
            page_tokens=self._cache.page_tokens,
            scale=scale,
            weights=weights,
            biases=biases,
            num_queries=len(batch.row_C) if is_last else None,
            visible_range=visible_range,
        )

    def sources(self, batch: PagedBatch, num_buckets: int | None, dtype: torch.dtype) -> "list[PairSource]":
        """Return the bias source of each layer; the last layer computes the candidates only."""
        times = None
        if self._cache.times is not None and batch.time_T is not None and batch.query_time_T is not None:
            times = PairTimes(slots=self._cache.times, time_T=batch.time_T, query_time_T=batch.query_time_T)
        tables = dict(zip(self.visible_ranges, batch.blocks, strict=True))
        plans = {
            visible: self._plan(tables[visible], batch.pages, visible)
            for visible in dict.fromkeys(self._layer_ranges[:-1])
        }
        last = self._plan(batch.last_blocks, batch.pages, self.last_visible_range)
        memory = max((*plans.values(), last), key=lambda plan: plan.num_tiles).allocate_tiles(dtype)
        sources = {visible: PairSource(plan, times, num_buckets, memory) for visible, plan in plans.items()}
        return [
            *(sources[visible] for visible in self._layer_ranges[:-1]),
            PairSource(last, times, num_buckets, memory),
        ]

    def _plan(self, blocks: torch.Tensor, pages: torch.Tensor, visible_range: VisibleRange) -> PairPlan:
        num_tiles = max_tiles(len(blocks), self._max_length)
        return PairPlan(
            blocks=blocks,
            pages=pages,
            page_tokens=self._cache.page_tokens,
            num_tiles=num_tiles,
            visible_range=visible_range,
        )

    def _layer(self, layer: int) -> PagedLayerKV:
        return PagedLayerKV(self._cache.pool[layer], None if self._cache.scales is None else self._cache.scales[layer])


def visible_ranges_of(attention: AttentionSpanConfig, num_layers: int) -> list[VisibleRange]:
    """Return the range of tokens that is visible in each layer."""
    rules = [attention.rules(layer) for layer in range(num_layers)]
    return [
        VisibleRange(r.max_attention_length or 0, r.num_context, attention.truncates(n)) for n, r in enumerate(rules)
    ]


class PagedFuXi:
    """FuXi over a paged KV cache. It has a copy of the last block's weights, split by where they are used."""

    def __init__(self, model: FuXi, cache: PagedKVCache):
        cfg = model.cfg
        self._blocks = [block for block in model.layers if isinstance(block, FuXiBlock)]
        self._width = cfg.num_heads * cfg.head_dim
        self._has_time = cfg.time_channel
        self._num_buckets = cfg.num_time_buckets if cfg.time_channel and cfg.time_encoding == "buckets" else None
        self.pages = PagedLayers(
            cache, layer_ranges=visible_ranges_of(cfg.attention, cfg.num_layers), max_length=len(model.position)
        )
        if self._blocks:
            self._last_vk, self._last_uq = self._last_weights()

    def _last_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        gate, value, query, key = self._blocks[-1].uvqk.detach().split(self._blocks[-1].widths, dim=1)
        return torch.cat([value, key], dim=1), torch.cat([gate, query], dim=1)

    def refresh_weights(self) -> None:
        """Copy the model's new weights in place; captured CUDA graphs read the same memory."""
        if self._blocks:
            for stored, fresh in zip((self._last_vk, self._last_uq), self._last_weights(), strict=True):
                stored.copy_(fresh)

    def forward(self, x_TD: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Return the (C, D) states of the candidates."""
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
            state = _after_attention(block, projected.total, channels, projected.gate)
        return self._last_block(len(self._blocks) - 1, state, batch, sources[-1])

    def _last_block(
        self, number: int, state: tuple[torch.Tensor, torch.Tensor | None], batch: PagedBatch, source: PairSource
    ) -> torch.Tensor:
        block = self._blocks[number]
        width = self._width
        key_value = norm_projection(*state, self._last_vk, (0, width, width), norm="rms", eps=FUXI_NORM_EPS)
        v, k = key_value.parts
        self.pages.store(number, k, v, batch)
        x_CD = key_value.total.index_select(0, batch.row_C)
        if not len(x_CD):
            return x_CD
        query_gate = norm_projection(x_CD, None, self._last_uq, (block.widths[0], width), norm="rms", eps=FUXI_NORM_EPS)
        channels = self._channels(number, query_gate.parts[0], k, v, batch, source, is_last=True)
        total, added = _after_attention(block, x_CD, channels, query_gate.gate)
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
        """Return the semantic and positional channels, and the temporal channel if the model has one."""
        block = self._blocks[number]
        pages = self.pages
        channels = [pages.attention(number, q, k, v, batch, scale=1.0 / block.normalizer, is_last=is_last)]
        for by_time in (False, True) if self._has_time else (False,):
            biases = source.compute(block, by_distance=not by_time, by_time=by_time)
            channel = pages.attention(
                number, None, k, v, batch, scale=1.0, weights="channel", biases=biases, is_last=is_last
            )
            channels.append(channel)
        return channels


def _after_attention(
    block: FuXiBlock, x: torch.Tensor, channels: list[torch.Tensor], gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run both feed-forward stages; return x plus the first stage, and the addend of the second stage."""
    no_dropout = Dropout(gate, 0, 0.0)
    weight = block.output.weight
    bias = block.output.bias
    first = gated_output(tuple(channels), gate, weight, bias, no_dropout, norm="rms", eps=FUXI_NORM_EPS)
    return feed_forward(x, first, block.up, block.down, no_dropout, eps=FUXI_NORM_EPS)


_State = tuple[torch.Tensor, torch.Tensor | None]
"""(residual stream, addend that the next layer adds to it), as returned by `HSTULayer.forward`."""


class PagedHSTU:
    """HSTU over a paged KV cache. It has a copy of the last layer's weights, split by where they are used."""

    def __init__(self, model: HSTU, cache: PagedKVCache):
        cfg = model.cfg
        self._layers = [layer for layer in model.layers if isinstance(layer, HSTULayer)]
        self._width = cfg.num_heads * cfg.head_dim
        self._has_bias = cfg.position_bias or cfg.time_bias
        self._num_buckets = cfg.num_time_buckets if cfg.time_bias and cfg.time_encoding == "buckets" else None
        self.pages = PagedLayers(
            cache, layer_ranges=visible_ranges_of(cfg.attention, cfg.num_layers), max_length=len(model.position)
        )
        if self._layers:
            self._last_vk, self._last_uq = self._last_weights()

    def _last_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        gate, value, query, key = self._layers[-1].uvqk.detach().chunk(4, dim=1)
        return torch.cat([value, key], dim=1), torch.cat([gate, query], dim=1)

    def refresh_weights(self) -> None:
        """Copy the model's new weights in place; captured CUDA graphs read the same memory."""
        if self._layers:
            for stored, fresh in zip((self._last_vk, self._last_uq), self._last_weights(), strict=True):
                stored.copy_(fresh)

    def forward(self, x_TD: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Return the (C, D) states of the candidates."""
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
            number, q, k, v, batch, scale=1.0 / layer.normalizer, biases=self._biases(layer, number, sources)
        )
        return projected.total, _apply_gate(layer, attended, projected.gate)

    def _last_layer(self, number: int, state: _State, batch: PagedBatch, sources: list[PairSource]) -> torch.Tensor:
        layer = self._layers[number]
        width = self._width
        key_value = norm_projection(*state, self._last_vk, (0, width, width), norm="layer", eps=NORM_EPS)
        v, k = key_value.parts
        self.pages.store(number, k, v, batch)
        x_CD = key_value.total.index_select(0, batch.row_C)
        if not len(x_CD):
            return x_CD
        query_gate = norm_projection(x_CD, None, self._last_uq, (width, width), norm="layer", eps=NORM_EPS)
        attended = self.pages.attention(
            number,
            query_gate.parts[0],
            k,
            v,
            batch,
            scale=1.0 / layer.normalizer,
            biases=self._biases(layer, number, sources),
            is_last=True,
        )
        return x_CD + _apply_gate(layer, attended, query_gate.gate)

    @staticmethod
    def _biases(layer: HSTULayer, number: int, sources: list[PairSource]) -> torch.Tensor | None:
        return sources[number].compute(layer) if sources else None


def _apply_gate(layer: HSTULayer, attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    no_dropout = Dropout(gate, 0, 0.0)
    return gated_output(
        (attended,), gate, layer.output.weight, layer.output.bias, no_dropout, norm="layer", eps=NORM_EPS
    )


class PagedSASRec:
    """SASRec over a paged KV cache."""

    def __init__(self, model: SASRec, cache: PagedKVCache):
        cfg = model.cfg
        self._layers = [layer for layer in model.layers if isinstance(layer, SASRecLayer)]
        self._final_norm = model.final_norm
        self._scale = (cfg.dim // cfg.num_heads) ** -0.5
        self.pages = PagedLayers(cache, layer_ranges=[VisibleRange()] * cfg.num_layers, max_length=cfg.max_length)

    def refresh_weights(self) -> None:
        """Do nothing: no weights were copied."""

    def forward(self, x_TD: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Return the (C, D) states of the candidates."""
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
            x_TD = layer.after_attention(normed, attended)
        state_CD: torch.Tensor = self._final_norm(x_TD if self._layers else x_TD.index_select(0, batch.row_C))
        return state_CD
