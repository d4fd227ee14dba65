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

from nestrec.models.segments import CachedForward


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
    """products with weights, for each token"""
    pair: float = 0.0
    """attention, for each pair of a token and itself or one before it"""
    channel_pair: float = 0.0
    """products with learned weights of distance or time (FuXi's channels), for each such pair"""

    def of(self, lengths: NDArray[np.int64]) -> float:
        """Of a forward pass over sequences of these lengths."""
        pairs = float((lengths * (lengths + 1)).sum()) / 2
        return self.token * float(lengths.sum()) + (self.pair + self.channel_pair) * pairs


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
    """how serving computes against kept prefixes, or `module:attribute` of it; none: such a model cannot be served"""

    def reads_times(self, cfg: Any) -> bool:
        """Whether the states of a config depend on when events happened."""
        return self.times_field is not None and bool(getattr(cfg, self.times_field))
