"""What an encoder is given: sequence info, segments of new tokens, the uncached forward.

What an encoder knows of a batch besides its vectors.

New tokens of sequences whose first part has been computed before, as serving asks a backbone for them.

Legend: T new tokens of all sequences, D model width, H heads, P prefix tokens, S new history tokens, K = P + S.

New tokens of sequences without a prefix, by whole passes of any encoder: the slow twin of a cached forward.

Candidates come next after the history, each without the others: a sequence with C candidates is computed C times, each
time with one of them at its end.

Legend: T new tokens of all sequences, D model width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from nestrec.ops.context_parallel.ring_sum import ContextParallelGroup

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
PrefixReader = Callable[[int, int], KeysAndValues]
"""(layer, sequence) to the prefix's keys and values, each (H, P, head_dim)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokenSegment:
    """New tokens of one sequence: history that follows its prefix, then candidates, all of which come next."""

    prefix_length: int
    num_history: int
    num_candidates: int
    time_K: torch.Tensor
    """float64 seconds of the prefix's and the new history's tokens"""
    query_time_S: torch.Tensor
    """float64 seconds at which the new history tokens ask"""
    candidate_time_s: float = 0.0
    """when the candidates would be shown"""
    cut: int = 0
    """of the whole history that these tokens belong to: the first one that layers behind a cut compute"""

    @property
    def num_tokens(self) -> int:
        return self.num_history + self.num_candidates

    @property
    def length(self) -> int:
        return self.prefix_length + self.num_history

    @property
    def num_cut(self) -> int:
        """New history tokens before the cut."""
        return min(max(0, self.cut - self.prefix_length), self.num_history)

    def behind_cut(self) -> "NewTokenSegment":
        """What is left of it, as a segment whose history begins at the cut."""
        return replace(
            self,
            prefix_length=max(0, self.prefix_length - self.cut),
            num_history=self.num_history - self.num_cut,
            time_K=self.time_K[self.cut :],
            query_time_S=self.query_time_S[self.num_cut :],
            cut=0,
        )


def new_positions(segments: Sequence[NewTokenSegment], device: torch.device) -> torch.Tensor:
    """(T,) positions of new tokens; candidates stand where the next event would."""
    found = list[torch.Tensor]()
    for segment in segments:
        own = torch.arange(segment.prefix_length, segment.length, device=device)
        found += [own, own.new_full((segment.num_candidates,), segment.length)]
    return torch.cat(found)


class KVCacheSpec(Protocol):
    """What is kept of a prefix: in each layer a key and a value of each head, for each token."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKVCache:
    """Memory of kept prefixes, of all layers."""

    pool: torch.Tensor
    """(L, 2, H, slots, head_dim)"""
    scales: torch.Tensor | None
    """(L, 2, H, slots) uint8, exponents of powers of two, where the pool is of float8_e4m3fn"""
    times: torch.Tensor | None
    """(slots,) float64 seconds of kept tokens, of a model that reads them"""
    page_tokens: int


Forward = Callable[
    [Any, torch.Tensor, Sequence[NewTokenSegment], PrefixReader], tuple[torch.Tensor, list[KeysAndValues]]
]
"""(model, (T, D) vectors of the new tokens, segments, prefixes) to the (T, D) states of the new tokens and, for each
layer, their keys and values, each (T, H, head_dim)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedForward:
    """How a backbone computes new tokens against what is kept of their prefixes. Its results are those of a pass over
    the whole sequences, up to rounding."""

    kept: Callable[[Any], KVCacheSpec]
    """of a config; a config with these three fields may be handed back as it is"""
    forward: Forward
    """a pass over new tokens"""
    most_seen: Callable[[Any], Sequence[int]] = lambda cfg: ()
    """of a config: keys that a token meets at most in each layer; none: all"""
    keeps: bool = True
    """whether anything is kept of a prefix; otherwise every request is computed whole"""
    paged: "Callable[[Any, PagedKVCache], Any] | str | None" = None
    """(model, pages) to a `PagedEncoder` that computes whole batches on a GPU, or `module:attribute` of it; none: such
    models run there sequence by sequence"""


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """Jagged layout of a batch of sequences, and the keys and times of its tokens.

    T tokens, B sequences. All tensors lie on the device of the vectors.
    """

    offsets: torch.Tensor
    """(B + 1,) int64"""
    max_length: int
    """longest sequence of the batch, known on the host"""
    position_T: torch.Tensor
    """int64, position in its sequence, from 0"""
    token_key_T: torch.Tensor
    """int64 keys of the counter-based generator: (run seed, epoch, sample id, position)"""
    time_T: torch.Tensor | None = None
    """float64 seconds of each event"""
    query_time_T: torch.Tensor | None = None
    """float64 seconds at which each token asks: the time of the event it predicts, or its own"""
    num_targets_B: torch.Tensor | None = None
    """int64; so many last tokens of each sequence are candidates, which do not see each other"""
    cut_B: torch.Tensor | None = None
    """int64 first token of each sequence that layers behind a cut compute; none: as its length has it"""
    buckets: torch.Tensor | None = None
    """time buckets of all pairs of tokens, once layers that read them have been told (ops.attention.hstu_op)"""
    context: ContextParallelGroup | None = None
    """where only a part of each sequence is here: all else is told of the tokens of this part, but for `max_length`,
    which is that of whole sequences, and attention asks the others for theirs"""


def whole_forward(
    model: nn.Module, x_TD: torch.Tensor, segments: Sequence[NewTokenSegment], prefix: PrefixReader
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    """(T, D) states of the new tokens; nothing is kept of them. There may be no prefix."""
    assert all(segment.prefix_length == 0 for segment in segments)
    first = 0
    places = list[torch.Tensor]()
    kept = list[tuple[int, int, int]]()
    for segment in segments:
        history = torch.arange(first, first + segment.num_history)
        last = first + segment.num_history
        ends = [torch.tensor([last + c]) for c in range(segment.num_candidates)] or [history.new_empty(0)]
        kept.append((len(places), segment.num_history, segment.num_candidates))
        places += [torch.cat([history, end]) for end in ends]
        first += segment.num_tokens
    states = torch.split(model(x_TD[torch.cat(places)], _info(places, segments, x_TD.device)), [len(p) for p in places])
    found = []
    for number, num_history, num_candidates in kept:
        found.append(states[number][:num_history])
        found += [states[number + c][num_history:] for c in range(num_candidates)]
    return torch.cat(found), []


@dataclass(frozen=True, slots=True)
class _NoCacheSpec:
    num_layers: int = 0
    num_heads: int = 1
    head_dim: int = 1


WHOLE = CachedForward(kept=lambda cfg: _NoCacheSpec(), forward=whole_forward, keeps=False)
"""of backbones that say of none how they compute against a kept prefix"""


def _info(places: Sequence[torch.Tensor], segments: Sequence[NewTokenSegment], device: torch.device) -> SequenceInfo:
    lengths = torch.tensor([len(p) for p in places])
    times, asked = list[torch.Tensor](), list[torch.Tensor]()
    for segment in segments:
        num_candidates = segment.num_candidates
        shown = segment.time_K.new_full((min(num_candidates, 1),), segment.candidate_time_s)
        times += [torch.cat([segment.time_K, shown])] * max(num_candidates, 1)
        asked += [torch.cat([segment.query_time_S, shown])] * max(num_candidates, 1)
    position = torch.cat([torch.arange(length) for length in lengths.tolist()]).to(device)
    cuts = torch.tensor([segment.cut for segment in segments for _ in range(max(segment.num_candidates, 1))])
    return SequenceInfo(
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device),
        max_length=int(lengths.max()),
        position_T=position,
        token_key_T=torch.zeros_like(position),
        time_T=torch.cat(times),
        query_time_T=torch.cat(asked),
        cut_B=cuts.to(device),
    )
