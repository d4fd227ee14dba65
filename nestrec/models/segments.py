"""New tokens of sequences whose first part has been computed before, as serving asks a backbone for them.

Legend: T new tokens of all sequences, D model width, H heads, P prefix tokens, S new history tokens, K = P + S.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
PrefixReader = Callable[[int, int], KeysAndValues]
"""(layer, sequence) to the prefix's keys and values, each (H, P, head_dim)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
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

    def behind_cut(self) -> "Segment":
        """What is left of it, as a segment whose history begins at the cut."""
        return replace(
            self,
            prefix_length=max(0, self.prefix_length - self.cut),
            num_history=self.num_history - self.num_cut,
            time_K=self.time_K[self.cut :],
            query_time_S=self.query_time_S[self.num_cut :],
            cut=0,
        )


def new_positions(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """(T,) positions of new tokens; candidates stand where the next event would."""
    found = list[torch.Tensor]()
    for segment in segments:
        own = torch.arange(segment.prefix_length, segment.length, device=device)
        found += [own, own.new_full((segment.num_candidates,), segment.length)]
    return torch.cat(found)


class KeptShape(Protocol):
    """What is kept of a prefix: in each layer a key and a value of each head, for each token."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPages:
    """Memory of kept prefixes, of all layers."""

    pool: torch.Tensor
    """(L, 2, H, slots, head_dim)"""
    scales: torch.Tensor | None
    """(L, 2, H, slots) uint8, exponents of powers of two, where the pool is of float8_e4m3fn"""
    times: torch.Tensor | None
    """(slots,) float64 seconds of kept tokens, of a model that reads them"""
    page_tokens: int


Forward = Callable[[Any, torch.Tensor, Sequence[Segment], PrefixReader], tuple[torch.Tensor, list[KeysAndValues]]]
"""(model, (T, D) vectors of the new tokens, segments, prefixes) to the (T, D) states of the new tokens and, for each
layer, their keys and values, each (T, H, head_dim)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedForward:
    """How a backbone computes new tokens against what is kept of their prefixes. Its results are those of a pass over
    the whole sequences, up to rounding."""

    kept: Callable[[Any], KeptShape]
    """of a config; a config with these three fields may be handed back as it is"""
    forward: Forward
    """a pass over new tokens"""
    most_seen: Callable[[Any], Sequence[int]] = lambda cfg: ()
    """of a config: keys that a token meets at most in each layer; none: all"""
    keeps: bool = True
    """whether anything is kept of a prefix; otherwise every request is computed whole"""
    paged: "Callable[[Any, KeptPages], Any] | str | None" = None
    """(model, pages) to a `PagedEncoder` that computes whole batches on a GPU, or `module:attribute` of it; none: such
    models run there sequence by sequence"""
