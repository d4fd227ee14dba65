"""Inputs of encoders in training and serving: jagged sequence layout, KV cache types, uncached forward pass.

- `SequenceInfo` describes a batch of sequences to an encoder: offsets, positions, times.
- `NewTokenSegment`, `KVCacheSpec`, `PagedKVCache` and `CachedForward` define incremental inference: a backbone computes
  new tokens (prefill of new history, and candidates) against the KV cache of a prefix.
- `uncached_forward` is the reference implementation: it runs full forward passes of any encoder. A candidate follows
  the history and does not see the other candidates, so a sequence with C candidates is computed C times, each time with
  one of them at its end.

Legend: T new tokens of all sequences, D model width, H heads, P prefix tokens, S new history tokens, K = P + S.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from nestrec.ops.context_parallel.ring_sum import ContextParallelGroup

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
PrefixReader = Callable[[int, int], KeysAndValues]
"""Function from (layer, sequence) to the cached keys and values of the prefix, each (H, P, head_dim)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokenSegment:
    """New tokens of one sequence: history tokens after the cached prefix, then candidates.

    Every candidate has the position after the last history token.
    """

    prefix_length: int
    """Number of tokens whose keys and values are cached."""
    num_history: int
    """Number of new history tokens."""
    num_candidates: int
    """Number of candidates."""
    time_K: torch.Tensor
    """Event times of the prefix and the new history, float64 seconds."""
    query_time_S: torch.Tensor
    """Query times of the new history tokens, float64 seconds."""
    candidate_time_s: float = 0.0
    """Time at which the candidates would be shown, in seconds."""
    cut: int = 0
    """Position in the full history of the first token that the layers after the truncation compute."""

    @property
    def num_tokens(self) -> int:
        return self.num_history + self.num_candidates

    @property
    def length(self) -> int:
        return self.prefix_length + self.num_history

    @property
    def num_cut(self) -> int:
        """Number of new history tokens before the cut."""
        return min(max(0, self.cut - self.prefix_length), self.num_history)

    def after_cut(self) -> "NewTokenSegment":
        """Return the remaining tokens after the truncation, as a segment whose history starts at the cut."""
        return replace(
            self,
            prefix_length=max(0, self.prefix_length - self.cut),
            num_history=self.num_history - self.num_cut,
            time_K=self.time_K[self.cut :],
            query_time_S=self.query_time_S[self.num_cut :],
            cut=0,
        )


def new_positions(segments: Sequence[NewTokenSegment], device: torch.device) -> torch.Tensor:
    """Return the (T,) positions of new tokens; every candidate has the position of the next event."""
    positions = list[torch.Tensor]()
    for segment in segments:
        history = torch.arange(segment.prefix_length, segment.length, device=device)
        positions += [history, history.new_full((segment.num_candidates,), segment.length)]
    return torch.cat(positions)


class KVCacheSpec(Protocol):
    """Layout of the KV cache: number of layers and heads, and the size of a key and of a value per head."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKVCache:
    """KV cache memory of all layers, in pages (paged KV cache)."""

    pool: torch.Tensor
    """Keys and values, (L, 2, H, slots, head_dim)."""
    scales: torch.Tensor | None
    """Exponents of power-of-two scales, (L, 2, H, slots) uint8, if the pool is float8_e4m3fn; otherwise None."""
    times: torch.Tensor | None
    """Event times of the cached tokens, (slots,) float64 seconds, if the model reads them; otherwise None."""
    page_tokens: int
    """Number of tokens per page."""


Forward = Callable[
    [Any, torch.Tensor, Sequence[NewTokenSegment], PrefixReader], tuple[torch.Tensor, list[KeysAndValues]]
]
"""Function from (model, (T, D) vectors of the new tokens, segments, prefix reader) to the (T, D) states of the new
tokens and, per layer, their keys and values, each (T, H, head_dim)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedForward:
    """Incremental forward pass of a backbone: computes new tokens against the KV cache of their prefix.

    The results are equal to those of a full forward pass, up to rounding.

    Example:
        >>> GRU_CACHED = CachedForward(
        ...     cache_spec=lambda cfg: cfg,  # a config with num_layers, num_heads and head_dim
        ...     forward=forward_new_tokens,  # (model, x_TD, segments, prefix) -> (states_TD, [(keys, values), ...])
        ... )
    """

    cache_spec: Callable[[Any], KVCacheSpec]
    """Function that returns the layout of the KV cache for a config. A config that has the fields `num_layers`,
    `num_heads` and `head_dim` can be returned unchanged."""
    forward: Forward
    """Forward pass over the new tokens."""
    max_attended: Callable[[Any], Sequence[int]] = lambda cfg: ()
    """Function that returns the maximum number of keys that a token attends to in each layer; an empty sequence if
    every layer uses full attention."""
    has_cache: bool = True
    """Whether prefixes are cached; if False, every request computes the full sequence."""
    paged: "Callable[[Any, PagedKVCache], Any] | str | None" = None
    """Function from (model, paged KV cache) to a `PagedEncoder`, which computes full batches on a GPU, or its
    `module:attribute`. None: the model computes sequence by sequence on a GPU, too."""


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """Jagged layout of a batch of sequences, and the positions, random keys and times of its tokens.

    T tokens, B sequences. All tensors are on the device of the token vectors.

    Example:
        Two sequences of 3 and 2 tokens:

        >>> info = SequenceInfo(
        ...     offsets=torch.tensor([0, 3, 5]),
        ...     max_length=3,
        ...     position_T=torch.tensor([0, 1, 2, 0, 1]),
        ...     token_key_T=torch.arange(5),
        ... )
    """

    offsets: torch.Tensor
    """Offsets of the sequences, (B + 1,) int64: sequence b has the tokens `offsets[b]` to `offsets[b + 1] - 1`."""
    max_length: int
    """Length of the longest sequence of the batch, known on the host."""
    position_T: torch.Tensor
    """Position of each token in its sequence, from 0, int64."""
    token_key_T: torch.Tensor
    """Keys of the counter-based generator for dropout, int64: hashes of (run seed, epoch, sample id, position)."""
    time_T: torch.Tensor | None = None
    """Event time of each token, float64 seconds."""
    query_time_T: torch.Tensor | None = None
    """Query time of each token, float64 seconds: the time of the event that it predicts, or its own time."""
    num_targets_B: torch.Tensor | None = None
    """Number of last tokens of each sequence that are candidates, which do not attend to each other, int64."""
    cut_B: torch.Tensor | None = None
    """First token of each sequence that layers after the truncation compute, int64. None: follows from the length."""
    buckets: torch.Tensor | None = None
    """Time buckets of all pairs of tokens, computed once for all layers (`ops.attention.hstu_op`)."""
    context: ContextParallelGroup | None = None
    """Context-parallel group if this rank has only a part of each sequence. The other fields then describe the tokens
    of this part, except `max_length`, which is that of the full sequences; attention exchanges keys and values with the
    other ranks."""


def uncached_forward(
    model: nn.Module, x_TD: torch.Tensor, segments: Sequence[NewTokenSegment], prefix: PrefixReader
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    """Return the (T, D) states of the new tokens and an empty list, because nothing is cached. Prefixes must be empty.

    Reference implementation of cached forward passes: it runs the full forward pass of any encoder.
    """
    assert all(segment.prefix_length == 0 for segment in segments)
    first = 0
    indices = list[torch.Tensor]()
    counts = list[tuple[int, int, int]]()
    for segment in segments:
        history = torch.arange(first, first + segment.num_history)
        last = first + segment.num_history
        ends = [torch.tensor([last + c]) for c in range(segment.num_candidates)] or [history.new_empty(0)]
        counts.append((len(indices), segment.num_history, segment.num_candidates))
        indices += [torch.cat([history, end]) for end in ends]
        first += segment.num_tokens
    states = torch.split(
        model(x_TD[torch.cat(indices)], _info(indices, segments, x_TD.device)), [len(index) for index in indices]
    )
    new_states = []
    for number, num_history, num_candidates in counts:
        new_states.append(states[number][:num_history])
        new_states += [states[number + c][num_history:] for c in range(num_candidates)]
    return torch.cat(new_states), []


@dataclass(frozen=True, slots=True)
class _NoCacheSpec:
    num_layers: int = 0
    num_heads: int = 1
    head_dim: int = 1


UNCACHED = CachedForward(cache_spec=lambda cfg: _NoCacheSpec(), forward=uncached_forward, has_cache=False)
"""Forward pass for backbones that do not define one against a KV cache."""


def _info(indices: Sequence[torch.Tensor], segments: Sequence[NewTokenSegment], device: torch.device) -> SequenceInfo:
    lengths = torch.tensor([len(index) for index in indices])
    times, query_times = list[torch.Tensor](), list[torch.Tensor]()
    for segment in segments:
        num_candidates = segment.num_candidates
        shown = segment.time_K.new_full((min(num_candidates, 1),), segment.candidate_time_s)
        times += [torch.cat([segment.time_K, shown])] * max(num_candidates, 1)
        query_times += [torch.cat([segment.query_time_S, shown])] * max(num_candidates, 1)
    position = torch.cat([torch.arange(length) for length in lengths.tolist()]).to(device)
    cuts = torch.tensor([segment.cut for segment in segments for _ in range(max(segment.num_candidates, 1))])
    return SequenceInfo(
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device),
        max_length=int(lengths.max()),
        position_T=position,
        token_key_T=torch.zeros_like(position),
        time_T=torch.cat(times),
        query_time_T=torch.cat(query_times),
        cut_B=cuts.to(device),
    )
