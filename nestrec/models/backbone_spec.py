"""Specs of backbones (sequence encoders, a plugin extension point) and their attention span.

A package adds a backbone with a `BackboneSpec`:

    GRU = BackboneSpec(config=GRUConfig, build=GRU, flops=lambda cfg: ForwardFlops(token=12.0 * cfg.dim**2))

The config is a `@config` class with the fields `kind` (name of the backbone), `dim` and `max_length`. `build` returns a
causal encoder: a module that maps (T, D) input vectors and a `SequenceInfo` to (T, D) states.

`AttentionSpanConfig` limits the attention span of HSTU and FuXi per layer, as described by ULTRA-HSTU (2602.16986):

    window, num_prefix_tokens           semi-local attention: token i attends to the tokens i - window + 1 to i and to
                                        the first `num_prefix_tokens` tokens, so that the cost of a layer grows linearly
                                        with the length
    truncate_to, truncate_from_layer    truncation between layers: from this layer on, only the last tokens of a history
                                        are computed; the other tokens keep the states of the layer before

The cut, the first token that is left of a history of n tokens, is

    cut(n) = max(0, floor((n - truncate_to) / truncate_step) * truncate_step)

so between truncate_to and truncate_to + truncate_step - 1 tokens are left. The later layers depend on n only through
the cut: the cached keys and values of a prefix are valid for every history with the same cut. The layers after the
truncation do not attend to prefix tokens before the cut.

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
    """Attention span of the layers of a model: full, semi-local (window and prefix), or truncated between layers."""

    window: Count | None = None
    """Number of tokens that a token attends to, itself included. None: all earlier tokens."""
    num_prefix_tokens: Natural = 0
    """Number of tokens at the start of a history that all later tokens attend to, in addition to their window."""
    num_full_layers: Natural = 0
    """Number of layers, counted from the first, that use full attention instead of the window."""
    truncate_to: Count | None = None
    """Minimum number of last tokens of a history that the layers from `truncate_from_layer` on compute. None: all."""
    truncate_from_layer: Count = 1
    """Number of layers that compute the full history before it is truncated to its last tokens."""
    truncate_step: Count = 64
    """Step of the truncation, in tokens. Each time it moves, serving recomputes the cached prefix."""

    def check(self, num_layers: int) -> None:
        """Raise a UserError if an option has no effect in a model with `num_layers` layers."""
        if self.window is None and (self.num_prefix_tokens or self.num_full_layers):
            field = "num_prefix_tokens" if self.num_prefix_tokens else "num_full_layers"
            raise UserError(
                "does nothing without a window",
                option=f"attention.{field}",
                value=getattr(self, field),
                remedy="set attention.window",
            )
        for field, is_used in (("num_full_layers", self.window), ("truncate_from_layer", self.truncate_to)):
            if is_used is not None and getattr(self, field) >= max(num_layers, 1):
                raise UserError(
                    f"must be less than the number of layers, which is {num_layers}",
                    option=f"attention.{field}",
                    value=getattr(self, field),
                    remedy=f"use at most {num_layers - 1}, or more layers",
                )

    def no_context_parallel_reason(self) -> str | None:
        """Return why context parallelism is not supported with these options; None if it is."""
        return None if self.truncate_to is None else "attention.truncate_to changes the sequence lengths between layers"

    @property
    def is_full(self) -> bool:
        """Whether every layer uses full causal attention."""
        return self.window is None and self.truncate_to is None

    def truncates(self, layer: int) -> bool:
        """Return whether a layer computes only the last tokens of a history."""
        return self.truncate_to is not None and layer >= self.truncate_from_layer

    def rules(self, layer: int) -> AttentionMask:
        """Return the attention mask of a layer. Layers after the truncation do not attend to the prefix tokens."""
        is_local = layer >= self.num_full_layers
        return semi_local(self.window if is_local else None, 0 if self.truncates(layer) else self.num_prefix_tokens)

    def max_attended(self, layer: int, max_length: int) -> int:
        """Return the maximum number of tokens that a token attends to in a layer."""
        rules = self.rules(layer)
        limit = max_length
        if self.truncates(layer) and self.truncate_to is not None:
            limit = min(limit, self.truncate_to + self.truncate_step - 1)
        window = rules.max_attention_length
        return limit if window is None else min(limit, window + rules.num_context)

    def max_attended_per_layer(self, num_layers: int, max_length: int) -> list[int]:
        """Return `max_attended` of every layer; an empty list if all layers use full attention."""
        return [] if self.is_full else [self.max_attended(layer, max_length) for layer in range(num_layers)]

    def cut(self, length: int) -> int:
        """Return the cut: the first token that remains of a history of `length` tokens after the truncation."""
        return int(self.cuts_of(np.array(length)))

    def cuts_of(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Vectorized version of `cut`."""
        if self.truncate_to is None:
            return np.zeros_like(lengths)
        return np.maximum((lengths - self.truncate_to) // self.truncate_step * self.truncate_step, 0)


FULL = AttentionSpanConfig()


def truncate_sequences(attention: AttentionSpanConfig, info: SequenceInfo) -> tuple[torch.Tensor, SequenceInfo]:
    """Truncate sequences to their last tokens.

    The host waits for the device, because the number of remaining tokens is not known before.

    Returns:
        The indices of the remaining tokens, (T',), and the `SequenceInfo` of the truncated sequences.
    """
    assert attention.truncate_to is not None
    lengths_B = info.offsets.diff()
    cut_B = info.cut_B
    limit = info.max_length
    if cut_B is None:
        steps_B = (lengths_B - attention.truncate_to).div(attention.truncate_step, rounding_mode="floor")
        cut_B = (steps_B * attention.truncate_step).clamp(min=0)
        limit = attention.truncate_to + attention.truncate_step - 1
    cut_T = torch.repeat_interleave(cut_B, lengths_B, output_size=len(info.position_T))
    remaining = torch.nonzero(info.position_T >= cut_T).squeeze(1)
    return remaining, replace(
        info,
        offsets=torch.cat([info.offsets[:1], (lengths_B - cut_B).cumsum(0)]),
        max_length=min(info.max_length, limit),
        position_T=info.position_T[remaining],
        token_key_T=info.token_key_T[remaining],
        time_T=None if info.time_T is None else info.time_T[remaining],
        query_time_T=None if info.query_time_T is None else info.query_time_T[remaining],
        cut_B=None,
    )


def cut_by_attention(cfg: Any, length: int) -> int:
    """Return the cut of a config whose field `attention` is an `AttentionSpanConfig`; see `BackboneSpec.cut`."""
    attention: AttentionSpanConfig = cfg.attention
    return attention.cut(length)


class BackboneConfig(Protocol):
    """Protocol of backbone configs."""

    @property
    def kind(self) -> str:
        """Name of the backbone."""

    @property
    def dim(self) -> int:
        """Width of the model and of the item embeddings."""

    @property
    def max_length(self) -> int:
        """Maximum sequence length, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFlops:
    """Floating-point operations (FLOPs) of a forward pass.

    Only matrix products count; a multiply-add is two operations. `token`, `pair` and `channel_pair` are sums over all
    layers.

    Example:
        >>> flops = ForwardFlops(token=2.0 * 5 * 64 * 64, pair=4.0 * 64)
        >>> flops.total(np.array([100, 50]))  # two sequences
        7763200.0
    """

    token: float
    """FLOPs of the products with weights, per token."""
    pair: float = 0.0
    """FLOPs of attention, per pair of a token and a token that it attends to."""
    channel_pair: float = 0.0
    """FLOPs of the products with learned position or time weights (channels of FuXi), per pair of tokens."""
    attention_span: AttentionSpanConfig = FULL
    """Attention span, which determines the tokens and pairs that each layer computes."""
    num_layers: int = 1
    """Number of layers, among which the operations are divided evenly."""
    head: float = 0.0
    """FLOPs of the products after the layers, per token."""

    def tokens(self, lengths: NDArray[np.int64]) -> float:
        """Return the number of tokens that a layer computes in sequences of these lengths (mean over the layers)."""
        return self._mean(lambda layer: float(self._left(layer, lengths).sum()))

    def pairs(self, lengths: NDArray[np.int64]) -> float:
        """Return the number of token pairs that a layer computes for these lengths (mean over the layers)."""
        return self._mean(lambda layer: _pairs(self.attention_span.rules(layer), self._left(layer, lengths)))

    def total(self, lengths: NDArray[np.int64]) -> float:
        """Return the FLOPs of a forward pass over sequences of these lengths."""
        layers = self.token * self.tokens(lengths) + (self.pair + self.channel_pair) * self.pairs(lengths)
        return layers + self.head * float(lengths.sum())

    def length_coefficients(self, lengths: NDArray[Any]) -> tuple[float, float]:
        """Return (a, b) such that a sequence of L tokens takes a L + b L^2 FLOPs.

        If the attention span is limited, the result is a least-squares fit over `lengths`.
        """
        if self.attention_span.is_full:
            return self.token + self.head, (self.pair + self.channel_pair) / 2
        unique = np.unique(np.maximum(np.rint(lengths), 1)).astype(np.int64)
        exact = np.array([self.total(unique[i : i + 1]) for i in range(len(unique))])
        for powers in ([1, 2], [1], [2]):
            coefficients = np.linalg.lstsq(unique[:, None].astype(np.float64) ** powers, exact, rcond=None)[0]
            if (coefficients >= 0).all():
                break
        by_power = dict(zip(powers, coefficients.tolist(), strict=True))
        return by_power.get(1, 0.0), by_power.get(2, 0.0)

    def _left(self, layer: int, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths - self.attention_span.cuts_of(lengths) if self.attention_span.truncates(layer) else lengths

    def _mean(self, of_layer: Callable[[int], float]) -> float:
        if self.attention_span.is_full:
            return of_layer(0)
        return sum(of_layer(layer) for layer in range(self.num_layers)) / self.num_layers


def _pairs(rules: AttentionMask, lengths: NDArray[np.int64]) -> float:
    return causal_pairs(lengths, rules.max_attention_length, rules.num_context)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneSpec:
    """The spec of a backbone: a plugin of the entry-point group `nestrec.backbones`.

    Only `config` and `build` are required. A feature that needs a missing optional field raises a UserError that names
    the field.

    Example:
        >>> GRU = BackboneSpec(
        ...     config=GRUConfig,  # a @config class with kind, dim and max_length
        ...     build=GRUEncoder,  # forward(x_TD, info: SequenceInfo) -> (T, D) states
        ...     flops=lambda cfg: ForwardFlops(token=12.0 * cfg.dim**2),
        ... )
    """

    config: type
    """Config class of the backbone (decorated with `@config`)."""
    build: Callable[[Any], nn.Module]
    """Function that builds the encoder of a config."""
    flops: Callable[[Any], ForwardFlops] | None = None
    """Function that returns the FLOPs of the layers of a config. Required by planning and `bench step`."""
    activations: Callable[[Any], float] | None = None
    """Function that returns how many values per token the forward pass saves for the backward pass: inputs and outputs
    of the products and norms of all layers. Required by planning."""
    times_field: str | None = None
    """Boolean config field that makes the model read event times. `kind` if the model always reads them, None if it
    never does."""
    cached: CachedForward | str | None = None
    """Forward pass against the KV cache of a prefix, or its `module:attribute`. None: the model is served without a KV
    cache, so that every request computes the full sequence."""

    has_fp8: bool = False
    """Whether all projections use `norm_projection`, `gated_output` and `feed_forward`, which support fp8. Required by
    `training.precision=fp8`."""
    cut: Callable[[Any, int], int] = lambda cfg, length: 0
    """Function from (config, length of a training sequence) to the first token that all layers compute. The cached keys
    and values of a prefix are valid for sequences with the same cut."""

    no_context_parallel_reason: Callable[[Any], str | None] = lambda cfg: "it does not support parts of sequences"
    """Function that returns why an encoder of a config does not support context parallelism
    (`parallel.context_parallel`). None as its result: the encoder reads `SequenceInfo.context` and computes the tokens
    of this rank."""

    def reads_times(self, cfg: Any) -> bool:
        """Return whether the states of a config depend on event times."""
        return self.times_field is not None and bool(getattr(cfg, self.times_field))
