"""FuXi-alpha, as published (arXiv 2502.03036 and its code): attention channels and a two-stage feed-forward part.

    U, V, Q, K = split(SiLU(RMS(x) W1))                           U is as wide as all channels together
    semantic   = sum_{j seen by i} SiLU(Q_i . K_j) / normaliser V_j    the attention of HSTU, without a bias
    temporal   = sum_{j seen by i} time[bucket(t_i - t_j)] V_j         learned weights of a bucket, shared by the heads
                 or a learned function of t_i - t_j (FuXi-gamma, 2512.12740)
    positional = sum_{j seen by i} position[j - i] V_j
    x <- x + W2 dropout(U * RMS([semantic, positional, temporal])) + b2        first stage
    x <- x + W4 (SiLU(a) * b),   a, b = dropout(RMS(x)) W3                       second stage

Plain causality sees j <= i; `attention` may say less. Blocks without the time channel are for data without timestamps.

Legend: T tokens, D model width, H heads.
"""

from typing import Literal

import torch
from torch import nn

from nestrec.base.config import config
from nestrec.base.config_values import Count, Decay, Natural
from nestrec.models.backbone_spec import FULL, AttentionSpanConfig, BackboneSpec, ForwardFlops, cut_by_attention
from nestrec.models.encoder_parts import ResidualEncoder, TimeEncoding, time_parameters, with_targets
from nestrec.models.sequence import SequenceInfo
from nestrec.ops.attention.bias_only import bias_attention
from nestrec.ops.attention.hstu_attention import hstu_attention
from nestrec.ops.attention.mask_and_bias import RelativeBias
from nestrec.ops.context_parallel.ring_attention import fuxi_attention_in_context
from nestrec.ops.layers.fused_layers import Dropout, feed_forward, gated_output, norm_projection, without_keeping

FUXI_NORM_EPS = 1e-6


@config
class FuXiConfig:
    kind: Literal["fuxi"] = "fuxi"
    """network that reads a history: hstu, fuxi, sasrec, or one of another package"""
    dim: Count = 50
    """width of the model and of the item vectors"""
    num_layers: Natural = 2
    """FuXi blocks, one on the other: time and memory grow in proportion"""
    num_heads: Count = 1
    """attention heads of a block, each with weights of its own"""
    head_dim: Count = 50
    """query, key and value width of a head"""
    ffn_dim: Count = 50
    """hidden width of the second feed-forward stage"""
    dropout: Decay = 0.2
    """on the input and in both stages"""
    max_length: Count = 200
    """longest sequence the model sees"""
    normaliser_margin: Natural = 11
    """semantic attention weights are divided by max_length, or what of it a layer can see, plus this"""
    time_channel: bool = True
    """the temporal channel; needs timestamps"""
    time_encoding: TimeEncoding = "buckets"
    """the temporal channel: a learned value of each bucket, or an exponential-power function with three learned
    numbers (FuXi-gamma)"""
    num_time_buckets: Count = 128
    """logarithmic buckets of the temporal channel"""
    attention: AttentionSpanConfig = FULL
    """how far it reaches"""
    recompute: bool = False
    """on a GPU: compute norms, activations and gates again in the backward pass instead of keeping them"""

    def __post_init__(self) -> None:
        self.attention.check(self.num_layers)

    def normaliser(self, layer: int) -> float:
        """What a layer divides attention weights by."""
        return float(self.attention.most_seen(layer, self.max_length) + self.normaliser_margin)


class FuXiBlock(nn.Module):
    def __init__(self, cfg: FuXiConfig, site: int):
        super().__init__()
        self.cfg = cfg
        self.site = site
        self.rules = cfg.attention.rules(site // 2)
        self.normaliser = cfg.normaliser(site // 2)
        width = cfg.num_heads * cfg.head_dim
        num_channels = 3 if cfg.time_channel else 2
        self.widths = (num_channels * width, width, width, width)
        self.uvqk = nn.Parameter(torch.empty(cfg.dim, sum(self.widths)).normal_(std=0.02))
        self.output = nn.Linear(num_channels * width, cfg.dim)
        nn.init.xavier_uniform_(self.output.weight)
        self.up = nn.Parameter(torch.empty(cfg.dim, 2 * cfg.ffn_dim))
        self.down = nn.Parameter(torch.empty(cfg.ffn_dim, cfg.dim))
        for matrix in (*self.up.data.chunk(2, dim=1), self.down.data):
            nn.init.xavier_uniform_(matrix)
        length = cfg.max_length + cfg.normaliser_margin
        self.position_table = nn.Parameter(torch.empty(2 * length - 1).normal_(std=0.02))
        self.time_table, self.time_function = (
            time_parameters(cfg.time_encoding, cfg.num_time_buckets) if cfg.time_channel else (None, None)
        )

    def forward(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor | None, info: SequenceInfo
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta and the first stage, what the second stage adds to it)"""
        cfg = self.cfg
        heads = (len(x_TD), cfg.num_heads, cfg.head_dim)
        projected = norm_projection(
            x_TD, delta_TD, self.uvqk, self.widths, norm="rms", eps=FUXI_NORM_EPS, recompute=cfg.recompute
        )
        v, q, k = (part.reshape(heads) for part in projected.parts)
        with without_keeping(projected):
            channels = self._channels(q, k, v, info)
        p = cfg.dropout if self.training else 0.0
        first = gated_output(
            channels,
            projected.gate,
            self.output.weight,
            self.output.bias,
            Dropout(info.token_key_T, self.site, p),
            norm="rms",
            eps=FUXI_NORM_EPS,
            recompute=cfg.recompute,
            packed=projected.packed,
        )
        drop = Dropout(info.token_key_T, self.site + 1, p)
        return feed_forward(
            projected.total, first, self.up, self.down, drop, eps=FUXI_NORM_EPS, recompute=cfg.recompute
        )

    def _channels(
        self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, info: SequenceInfo
    ) -> tuple[torch.Tensor, ...]:
        """(T, width) of each: semantic, positional, temporal."""
        bias = self.bias(info)
        rules = with_targets(self.rules, info)
        if info.context is not None:
            return fuxi_attention_in_context(
                q_THD, k_THD, v_THD, info.context, normaliser=self.normaliser, bias=bias, rules=rules
            )
        semantic = hstu_attention(
            q_THD, k_THD, v_THD, info.offsets, max_length=info.max_length, normaliser=self.normaliser, rules=rules
        )
        others = bias_attention(v_THD.flatten(1), info.offsets, bias, max_length=info.max_length, rules=rules)
        return semantic.flatten(1), *others

    def bias(self, info: SequenceInfo) -> RelativeBias:
        """What weighs the values in its further channels."""
        return RelativeBias(
            position_table=self.position_table,
            time_table=self.time_table,
            time_function=self.time_function,
            time_T=info.time_T if self.cfg.time_channel else None,
            query_time_T=info.query_time_T if self.cfg.time_channel else None,
            buckets=info.buckets,
        )


class FuXi(ResidualEncoder):
    """Encoder: (T, D) input vectors to (T, D) states."""

    def __init__(self, cfg: FuXiConfig):
        super().__init__(cfg, (FuXiBlock(cfg, site=2 * i + 1) for i in range(cfg.num_layers)))
        self.cfg = cfg


def _flops(cfg: FuXiConfig) -> ForwardFlops:
    """Projections and output are as wide as all channels together; each bias channel is one product."""
    width = cfg.num_heads * cfg.head_dim
    others = 2 if cfg.time_channel else 1
    weights = cfg.dim * ((4 + others) * width + (1 + others) * width + 3 * cfg.ffn_dim)
    return ForwardFlops(
        token=2.0 * weights * cfg.num_layers,
        pair=4.0 * width * cfg.num_layers,
        channel_pair=2.0 * others * width * cfg.num_layers,
        reach=cfg.attention,
        num_layers=cfg.num_layers,
    )


def _activations(cfg: FuXiConfig) -> float:
    """As HSTU with wider gates and outputs, and the second stage."""
    width = cfg.num_heads * cfg.head_dim
    channels = 3 if cfg.time_channel else 2
    return cfg.num_layers * (5.0 * cfg.dim + (6.0 + 5.0 * channels) * width + 3.0 * cfg.ffn_dim)


BACKBONE = BackboneSpec(
    config=FuXiConfig,
    build=FuXi,
    flops=_flops,
    activations=_activations,
    cached="fuxi",
    times_field="time_channel",
    has_fp8=True,
    cut=cut_by_attention,
    whole_only=lambda cfg: cfg.attention.whole_only(),
)
