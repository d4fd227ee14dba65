"""The spec of a backbone (a plugin), and its limits on attention span.

What a backbone says of itself: the seam through which models of other packages join in.

    GRU = Backbone(config=GRUConfig, build=GRU, flops=lambda cfg: ForwardFlops(token=12.0 * cfg.dim**2))

Its config is a `@config` class with the fields `kind` (the name of the backbone), `dim` and `max_length`; `build` makes
of it an encoder, a module that maps (T, D) input vectors and a `SequenceInfo` to (T, D) states and never looks forward.

How far attention of HSTU and FuXi reaches in each layer: a whole history, a window and a prefix, or the last tokens.

    window, prefix       token i sees the tokens from i - window + 1 to itself, and the first `prefix` ones: the cost of
                         a layer grows with the length, not with its square (semi-local attention)
    keep_last            from layer `keep_from` on, only the last tokens of a history go on: the states of the others
                         are those of the layers before (truncation between layers)

Both as ULTRA-HSTU (2602.16986) describes them. The cut of a history of n tokens is

    cut(n) = max(0, floor((n - keep_last) / keep_step) * keep_step)

so between keep_last and keep_last + keep_step - 1 tokens are left. What later layers compute depends on the cut, and on
n only through it: keys and values that are kept of a prefix hold for every history with the same cut. A prefix that
stood before it is not seen behind it.

Legend: T tokens, B sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nestrec.base.config import config
from nestrec.base.config_values import Count, Natural
from nestrec.base.errors import UserError
from nestrec.models.sequence import CachedForward, SequenceInfo
from nestrec.ops.attention.mask_and_bias import AttentionMask, causal_pairs, semi_local


@config
class AttentionSpanConfig:
    """Of the layers of a model."""

    window: Count | None = None
    """tokens that one sees, itself included; none: all before it"""
    prefix: Natural = 0
    """first tokens of a history that all later ones see beside their window"""
    full_layers: Natural = 0
    """first layers that see everything, whatever the window is"""
    keep_last: Count | None = None
    """last tokens of a history that layers from keep_from on compute; none: all"""
    keep_from: Count = 1
    """layers before a history is cut to its last tokens"""
    keep_step: Count = 64
    """tokens that the cut moves by: prefixes that serving keeps are computed anew each time it moves"""

    def check(self, num_layers: int) -> None:
        """Refuses what would do nothing in a model of so many layers."""
        if self.window is None and (self.prefix or self.full_layers):
            field = "prefix" if self.prefix else "full_layers"
            raise UserError(
                "means nothing without a window",
                option=f"attention.{field}",
                value=getattr(self, field),
                remedy="give attention.window",
            )
        for field, is_used in (("full_layers", self.window), ("keep_from", self.keep_last)):
            if is_used is not None and getattr(self, field) >= max(num_layers, 1):
                raise UserError(
                    f"leaves none of {num_layers} layers",
                    option=f"attention.{field}",
                    value=getattr(self, field),
                    remedy=f"give less than {num_layers}",
                )

    def whole_only(self) -> str | None:
        """Why it needs whole sequences on one rank; none where parts of them will do."""
        return None if self.keep_last is None else "attention.keep_last cuts sequences anew between layers"

    @property
    def is_full(self) -> bool:
        """Whether every layer sees everything."""
        return self.window is None and self.keep_last is None

    def cuts(self, layer: int) -> bool:
        """Whether a layer computes the last tokens only."""
        return self.keep_last is not None and layer >= self.keep_from

    def rules(self, layer: int) -> AttentionMask:
        """Who sees whom in a layer; the prefix of a history does not reach those that compute its last tokens."""
        is_local = layer >= self.full_layers
        return semi_local(self.window if is_local else None, 0 if self.cuts(layer) else self.prefix)

    def most_seen(self, layer: int, max_length: int) -> int:
        """Tokens that one sees at most in a layer."""
        rules = self.rules(layer)
        most = max_length
        if self.cuts(layer) and self.keep_last is not None:
            most = min(most, self.keep_last + self.keep_step - 1)
        window = rules.max_attention_length
        return most if window is None else min(most, window + rules.num_context)

    def limits(self, num_layers: int, max_length: int) -> list[int]:
        """`most_seen` of every layer; none where all of them see everything."""
        return [] if self.is_full else [self.most_seen(layer, max_length) for layer in range(num_layers)]

    def cut(self, length: int) -> int:
        """First token of a history that is left behind the cut."""
        return int(self.cut_of(np.array(length)))

    def cut_of(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same of many."""
        if self.keep_last is None:
            return np.zeros_like(lengths)
        return np.maximum((lengths - self.keep_last) // self.keep_step * self.keep_step, 0)


FULL = AttentionSpanConfig()


def cut_sequences(reach: AttentionSpanConfig, info: SequenceInfo) -> tuple[torch.Tensor, SequenceInfo]:
    """(T',) the tokens that are left, and what is known of their sequences. It waits for the device, to count them."""
    assert reach.keep_last is not None
    lengths_B = info.offsets.diff()
    cut_B = info.cut_B
    most = info.max_length
    if cut_B is None:
        steps_B = (lengths_B - reach.keep_last).div(reach.keep_step, rounding_mode="floor")
        cut_B = (steps_B * reach.keep_step).clamp(min=0)
        most = reach.keep_last + reach.keep_step - 1
    cut_T = torch.repeat_interleave(cut_B, lengths_B, output_size=len(info.position_T))
    kept = torch.nonzero(info.position_T >= cut_T).squeeze(1)
    return kept, replace(
        info,
        offsets=torch.cat([info.offsets[:1], (lengths_B - cut_B).cumsum(0)]),
        max_length=min(info.max_length, most),
        position_T=info.position_T[kept],
        token_key_T=info.token_key_T[kept],
        time_T=None if info.time_T is None else info.time_T[kept],
        query_time_T=None if info.query_time_T is None else info.query_time_T[kept],
        cut_B=None,
    )


def cut_by_attention(cfg: Any, length: int) -> int:
    """`BackboneSpec.cut` of a config whose field `attention` is an `AttentionSpanConfig`."""
    reach: AttentionSpanConfig = cfg.attention
    return reach.cut(length)


class BackboneConfig(Protocol):
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
    reach: AttentionSpanConfig = FULL
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


def _pairs(rules: AttentionMask, lengths: NDArray[np.int64]) -> float:
    return causal_pairs(lengths, rules.max_attention_length, rules.num_context)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneSpec:
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
