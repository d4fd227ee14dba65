"""Backbones over pages, on a GPU: the new tokens of a whole batch in one pass, without a loop over sequences.

The definition of each is its cached forward. Everything that differs between batches of one size lies in tensors, so a
pass can be captured as a CUDA graph. Of the last layer, histories need keys and values only: queries, gates and outputs
are those of the rows that are asked for.

Legend: T rows of the batch (histories of all sequences first, then all candidates), C candidates, D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nestrec.models.reach import AttentionReach
from nestrec.models.segments import KeptPages
from nestrec.ops.attention.paged.attention import KeptLayer, Weights, Workspace, paged_attention, store_in_pages
from nestrec.ops.attention.paged.bias import PairPlan, PairTimes, find_buckets, store_times, write_biases
from nestrec.ops.attention.paged.blocks import Seen, most_tiles


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


class Learned(Protocol):
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
        self._plan, self._times, self._memory = plan, times, memory
        self._buckets: torch.Tensor | None = None
        if num_buckets is not None and times is not None:
            self._buckets = find_buckets(plan, times, num_buckets)

    def of(self, layer: Learned, *, by_distance: bool = True, by_time: bool = True) -> torch.Tensor:
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


class Pages:
    """The pages of all layers, and how their attention is computed."""

    def __init__(self, kept: KeptPages, *, seen: Sequence[Seen], max_length: int):
        """seen: of each layer."""
        self._kept, self._of_layer, self._max_length = kept, list(seen), max_length
        _, _, num_heads, _, dim = kept.pool.shape
        self._workspace = Workspace.make(num_heads, dim, kept.pool.device)
        self.seen = tuple(dict.fromkeys(seen)) or (Seen(),)
        self.last_seen = self._of_layer[-1] if seen else Seen()

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

    def _plan(self, blocks: torch.Tensor, pages: torch.Tensor, seen: Seen) -> PairPlan:
        num_tiles = most_tiles(len(blocks), self._max_length)
        return PairPlan(blocks=blocks, pages=pages, page_tokens=self._kept.page_tokens, num_tiles=num_tiles, seen=seen)

    def _layer(self, layer: int) -> KeptLayer:
        return KeptLayer(self._kept.pool[layer], None if self._kept.scales is None else self._kept.scales[layer])


def seen_by_layers(reach: AttentionReach, num_layers: int) -> list[Seen]:
    """What the blocks of each layer see."""
    rules = [reach.rules(layer) for layer in range(num_layers)]
    return [Seen(r.max_attention_length or 0, r.num_context, reach.cuts(n)) for n, r in enumerate(rules)]
