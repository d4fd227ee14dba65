"""What a backbone says of itself: the seam through which models of other packages join in.

    GRU = Backbone(config=GRUConfig, build=GRU, flops=lambda cfg: ForwardFlops(token=12.0 * cfg.dim**2))

Its config is a `@config` class with the fields `kind` (the name of the backbone), `dim` and `max_length`; `build` makes
of it an encoder, a module that maps (T, D) input vectors and a `SequenceInfo` to (T, D) states and never looks forward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from nestrec.models.reach import FULL, AttentionReach
from nestrec.models.segments import CachedForward
from nestrec.ops.attention.mask import AttentionRules, causal_pairs


class SequenceConfig(Protocol):
    """What the config of every backbone has."""

    @property
    def kind(self) -> str:
        """the backbone"""

    @property
    def dim(self) -> int:
        """width of the model and of the item vectors"""

    @property
    def max_length(self) -> int:
        """longest sequence the model sees"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFlops:
    """Floating-point operations of a forward pass, those of products only: 2 for a multiplication with its addition."""

    token: float
    """products with weights of the layers, for each token"""
    pair: float = 0.0
    """attention, for each pair of a token and itself or one before it"""
    channel_pair: float = 0.0
    """products with learned weights of distance or time (FuXi's channels), for each such pair"""
    reach: AttentionReach = FULL
    """which tokens and pairs the layers compute"""
    num_layers: int = 1
    """that share all of these alike"""
    head: float = 0.0
    """products behind the layers, for each token"""

    def tokens(self, lengths: NDArray[np.int64]) -> float:
        """Tokens that a layer computes in sequences of these lengths, a mean over the layers."""
        return self._mean(lambda layer: float(self._left(layer, lengths).sum()))

    def pairs(self, lengths: NDArray[np.int64]) -> float:
        """Pairs of tokens, alike."""
        return self._mean(lambda layer: _pairs(self.reach.rules(layer), self._left(layer, lengths)))

    def of(self, lengths: NDArray[np.int64]) -> float:
        """Of a forward pass over sequences of these lengths."""
        layers = self.token * self.tokens(lengths) + (self.pair + self.channel_pair) * self.pairs(lengths)
        return layers + self.head * float(lengths.sum())

    def of_length(self, lengths: NDArray[Any]) -> tuple[float, float]:
        """(a, b): a L + b L^2 operations are those of a sequence of L tokens; where attention does not see everything,
        the nearest to them over these lengths."""
        if self.reach.is_full:
            return self.token + self.head, (self.pair + self.channel_pair) / 2
        some = np.unique(np.maximum(np.rint(lengths), 1)).astype(np.int64)
        exact = np.array([self.of(some[i : i + 1]) for i in range(len(some))])
        for powers in ([1, 2], [1], [2]):
            found = np.linalg.lstsq(some[:, None].astype(np.float64) ** powers, exact, rcond=None)[0]
            if (found >= 0).all():
                break
        by_power = dict(zip(powers, found.tolist(), strict=True))
        return by_power.get(1, 0.0), by_power.get(2, 0.0)

    def _left(self, layer: int, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths - self.reach.cut_of(lengths) if self.reach.cuts(layer) else lengths

    def _mean(self, of_layer: Callable[[int], float]) -> float:
        if self.reach.is_full:
            return of_layer(0)
        return sum(of_layer(layer) for layer in range(self.num_layers)) / self.num_layers


def _pairs(rules: AttentionRules, lengths: NDArray[np.int64]) -> float:
    return causal_pairs(lengths, rules.max_attention_length, rules.num_context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """The spec of a backbone. What it leaves at none it cannot answer, and who needs the answer says so."""

    config: type
    """its `@config` class"""
    build: Callable[[Any], nn.Module]
    """the encoder of a config"""
    flops: Callable[[Any], ForwardFlops] | None = None
    """operations of the layers of a config; planning and `bench step` ask for them"""
    activations: Callable[[Any], float] | None = None
    """numbers a token that are kept from forward to backward: inputs and outputs of the products and norms of all
    layers; planning asks for them"""
    times_field: str | None = None
    """field of the config that, where it is true, makes the model read when events happened; `kind` where it always
    does, none where it never does"""
    cached: CachedForward | str | None = None
    """how serving computes against kept prefixes, or `module:attribute` of it; none: such a model is served without,
    and every request computed whole"""

    has_fp8: bool = False
    """whether its projections are `norm_projection`, `gated_output` and `feed_forward`, which know products of eight
    bits; `training.precision=fp8` asks for it"""
    cut: Callable[[Any, int], int] = lambda cfg, length: 0
    """(config, tokens of a sequence as training sees it) to the first of them that all layers compute; what is kept of
    a prefix holds for sequences with the same one"""

    whole_only: Callable[[Any], str | None] = lambda cfg: "it is not written for parts of sequences"
    """why an encoder of a config needs whole sequences on one rank; none: it reads `SequenceInfo.context`, where each
    rank of a context group (`ranks.context`) computes a part of their tokens"""

    def reads_times(self, cfg: Any) -> bool:
        """Whether the states of a config depend on when events happened."""
        return self.times_field is not None and bool(getattr(cfg, self.times_field))
