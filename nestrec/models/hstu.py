"""HSTU, as the public recipe has it (arXiv 2402.17152 and its released code).

    U, V, Q, K = split(SiLU(LN(x) W1))
    x <- x + W2 dropout(U * LN(attention(Q, K, V))) + b2

The norms have no parameters, scores are not scaled, and the attention weights are divided by the constant
`max_length + 11` of the recipe, padding included.

Legend: T tokens, D model width, H heads.
"""

from typing import Literal

import torch
from torch import nn
from torch.nn.functional import layer_norm, silu

from nestrec.base.config import config
from nestrec.models.sequence import SequenceInfo
from nestrec.ops.dropout import dropout
from nestrec.ops.hstu_attention import hstu_attention
from nestrec.ops.relative_bias import RelativeBias

NORM_EPS = 1e-6


@config
class HSTUConfig:
    kind: Literal["hstu"] = "hstu"
    """the backbone"""
    dim: int = 50
    """width of the model and of the item vectors"""
    num_layers: int = 2
    """HSTU layers"""
    num_heads: int = 1
    """attention heads"""
    head_dim: int = 50
    """query, key and value width of a head"""
    dropout: float = 0.2
    """on the input and inside each layer"""
    max_length: int = 200
    """longest sequence the model sees"""
    normaliser_margin: int = 11
    """attention weights are divided by max_length plus this"""
    position_bias: bool = True
    """learned bias of the distance between tokens"""
    time_bias: bool = False
    """learned bias of the time between tokens; needs timestamps"""
    num_time_buckets: int = 128
    """logarithmic buckets of the time bias"""

    @property
    def normaliser(self) -> float:
        return float(self.max_length + self.normaliser_margin)


class HSTULayer(nn.Module):
    def __init__(self, cfg: HSTUConfig, site: int):
        super().__init__()
        self.cfg, self.site = cfg, site
        width = cfg.num_heads * cfg.head_dim
        self.uvqk = nn.Parameter(torch.empty(cfg.dim, 4 * width).normal_(std=0.02))
        self.output = nn.Linear(width, cfg.dim)
        nn.init.xavier_uniform_(self.output.weight)
        bias_length = cfg.max_length + cfg.normaliser_margin
        self.position_table = (
            nn.Parameter(torch.empty(2 * bias_length - 1).normal_(std=0.02)) if cfg.position_bias else None
        )
        self.time_table = (
            nn.Parameter(torch.empty(cfg.num_time_buckets + 1).normal_(std=0.02)) if cfg.time_bias else None
        )

    def forward(self, x_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        normed = layer_norm(x_TD, x_TD.shape[1:], eps=NORM_EPS)
        u, v, q, k = silu(normed @ self.uvqk).chunk(4, dim=1)
        heads = (x_TD.shape[0], self.cfg.num_heads, self.cfg.head_dim)
        attended = hstu_attention(
            q.reshape(heads), k.reshape(heads), v.reshape(heads), info.offsets, max_length=info.max_length,
            normaliser=self.cfg.normaliser, bias=self._bias(info),
        ).flatten(1)  # fmt: skip
        gated = u * layer_norm(attended, attended.shape[1:], eps=NORM_EPS)
        p = self.cfg.dropout if self.training else 0.0
        out_TD: torch.Tensor = x_TD + self.output(dropout(gated, info.token_key_T, self.site, p))
        return out_TD

    def _bias(self, info: SequenceInfo) -> RelativeBias:
        return RelativeBias(
            position_table=self.position_table, time_table=self.time_table,
            time_T=info.time_T, query_time_T=info.query_time_T,
        )  # fmt: skip


class HSTU(nn.Module):
    """Encoder: (T, D) input vectors to (T, D) states."""

    def __init__(self, cfg: HSTUConfig):
        super().__init__()
        self.cfg = cfg
        self.position = nn.Parameter(torch.empty(cfg.max_length + cfg.normaliser_margin, cfg.dim))
        nn.init.xavier_normal_(self.position)
        self.layers = nn.ModuleList(HSTULayer(cfg, site=i + 1) for i in range(cfg.num_layers))

    def forward(self, x_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        x_TD = x_TD * self.cfg.dim**0.5 + self.position[info.position_T]
        x_TD = dropout(x_TD, info.token_key_T, 0, self.cfg.dropout if self.training else 0.0)
        for layer in self.layers:
            x_TD = layer(x_TD, info)
        return x_TD
