"""Backbone: gated causal linear attention on layer-normalized inputs.

    q, k, v, g = split(LN(x) W),   phi = 1 + elu
    x <- x + W_o (g * sum_{j <= i} (phi(q_i) . phi(k_j)) v_j / max_length)

Legend: T tokens, D model width, H heads, B sequences, N longest length, P prefix tokens.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import elu, layer_norm

from nestrec import BackboneSpec, CachedForward, ForwardFlops, SequenceInfo, config
from nestrec.base.config_values import Count, Natural
from nestrec.models.sequence import KeysAndValues, NewTokenSegment, PrefixReader
from nestrec.ops.embedding.row_gather import gather_rows
from nestrec.ops.padding import from_blocks, padded_indices, to_blocks


@config
class LinearConfig:
    kind: Literal["linear"] = "linear"
    """Name of the backbone."""
    dim: Count = 32
    """Width of the model and of the item vectors."""
    num_layers: Natural = 1
    """Number of layers."""
    num_heads: Count = 2
    """Number of attention heads per layer."""
    head_dim: Count = 16
    """Width of the queries, keys and values of a head."""
    max_length: Count = 64
    """Maximum sequence length in tokens; attention sums are divided by it."""


class LinearLayer(nn.Module):
    def __init__(self, cfg: LinearConfig):
        super().__init__()
        self.cfg = cfg
        width = cfg.num_heads * cfg.head_dim
        self.input, self.output = nn.Linear(cfg.dim, 4 * width), nn.Linear(width, cfg.dim)

    def projected(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """phi(q), phi(k), v, each (T, H, head_dim), and the gate."""
        q, k, v, gate = self.input(layer_norm(x_TD, x_TD.shape[1:])).chunk(4, dim=1)
        q, k, v = (part.reshape(-1, self.cfg.num_heads, self.cfg.head_dim) for part in (q, k, v))
        return 1 + elu(q), 1 + elu(k), v, torch.sigmoid(gate)

    def added(self, x_TD: torch.Tensor, gate: torch.Tensor, sums_THD: torch.Tensor) -> torch.Tensor:
        out_TD: torch.Tensor = x_TD + self.output(gate * sums_THD.flatten(1) / self.cfg.max_length)
        return out_TD

    def forward(self, x_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        q, k, v, gate = self.projected(x_TD)
        index_T = padded_indices(info.offsets, len(x_TD), info.max_length)
        q, k, v = (to_blocks(part, index_T, info.offsets.numel() - 1, info.max_length) for part in (q, k, v))
        weights_BHNN = (q @ k.transpose(2, 3)).tril()
        return self.added(x_TD, gate, from_blocks(weights_BHNN @ v, index_T))


class Linear(nn.Module):
    """Encoder: (T, D) input vectors to (T, D) states."""

    def __init__(self, cfg: LinearConfig):
        super().__init__()
        self.cfg = cfg
        self.position = nn.Parameter(torch.empty(cfg.max_length + 1, cfg.dim).normal_(std=0.02))
        self.layers = nn.ModuleList(LinearLayer(cfg) for _ in range(cfg.num_layers))

    def forward(self, x_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        x_TD = x_TD + gather_rows(self.position, info.position_T)
        for layer in self.layers:
            x_TD = layer(x_TD, info)
        return x_TD


def cached_forward(
    model: Linear, x_TD: torch.Tensor, segments: Sequence[NewTokenSegment], prefix: PrefixReader
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    """Compute new tokens against the cached keys and values of their prefixes.

    Returns:
        The states of the new tokens, and their keys and values per layer for the KV cache.
    """
    x_TD = x_TD + model.position[torch.cat([_positions(segment) for segment in segments]).to(x_TD.device)]
    keys_and_values: list[KeysAndValues] = []
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, LinearLayer)
        q, k, v, gate = layer.projected(x_TD)
        sums = torch.empty_like(v)
        first = 0
        for b, segment in enumerate(segments):
            rows = slice(first, first + segment.num_tokens)
            sums[rows] = _sums(q[rows], k[rows], v[rows], prefix(number, b), segment.num_history)
            first = rows.stop
        keys_and_values.append((k, v))
        x_TD = layer.added(x_TD, gate, sums)
    return x_TD, keys_and_values


def _positions(segment: NewTokenSegment) -> torch.Tensor:
    own = torch.arange(segment.prefix_length, segment.length)
    return torch.cat([own, own.new_full((segment.num_candidates,), segment.length)])


def _sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: KeysAndValues, num_history: int) -> torch.Tensor:
    """Sum with causal attention: history tokens attend to earlier tokens, a candidate to the history and itself."""
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    keys, values = (torch.cat([old, new], dim=1) for old, new in zip(prefix, (k, v), strict=True))
    weights = q @ keys.transpose(1, 2)
    num_prefix = prefix[0].shape[1]
    num_new = q.shape[1]
    index = torch.arange(num_new, device=q.device)
    sees = (index[:, None] >= index) & ((index < num_history) | (index[:, None] == index))
    weights = weights * torch.cat([sees.new_ones(num_new, num_prefix), sees], dim=1)
    return (weights @ values).transpose(0, 1)


def _flops(cfg: LinearConfig) -> ForwardFlops:
    width = cfg.num_heads * cfg.head_dim
    return ForwardFlops(token=2.0 * 5 * cfg.dim * width * cfg.num_layers, pair=4.0 * width * cfg.num_layers)


LINEAR = BackboneSpec(
    config=LinearConfig,
    build=Linear,
    flops=_flops,
    activations=lambda cfg: cfg.num_layers * (3.0 * cfg.dim + 10.0 * cfg.num_heads * cfg.head_dim),
    cached=CachedForward(cache_spec=lambda cfg: cfg, forward=cached_forward),
)
