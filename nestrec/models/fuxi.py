"""FuXi-alpha backbone, as published (arXiv 2502.03036 and its code): attention channels and a two-stage feed-forward.

    U, V, Q, K = split(SiLU(RMS(x) W1))                           U is as wide as all channels together
    semantic   = sum_{j visible to i} SiLU(Q_i . K_j) / normalizer V_j    attention of HSTU, without a bias
    temporal   = sum_{j visible to i} time[bucket(t_i - t_j)] V_j         learned weights of a bucket, shared by the
                 heads, or a learned function of t_i - t_j (FuXi-gamma, 2512.12740)
    positional = sum_{j visible to i} position[j - i] V_j
    x <- x + W2 dropout(U * RMS([semantic, positional, temporal])) + b2        first stage
    x <- x + W4 (SiLU(a) * b),   a, b = dropout(RMS(x)) W3                       second stage

With a causal mask, j <= i is visible; the option `attention` can limit this. Data without timestamps needs
`time_channel=False`.

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
from nestrec.ops.layers.fused_layers import Dropout, feed_forward, gated_output, norm_projection, recompute_saved_parts

FUXI_NORM_EPS = 1e-6


@config
class FuXiConfig:
    """Config of the FuXi backbone."""

    kind: Literal["fuxi"] = "fuxi"
    """Name of the backbone (sequence encoder): hstu, fuxi, sasrec, or the backbone of a plugin."""
    dim: Count = 50
    """Width of the model and of the item embeddings."""
    num_layers: Natural = 2
    """Number of FuXi blocks; time and memory grow linearly with it."""
    num_heads: Count = 1
    """Number of attention heads per block."""
    head_dim: Count = 50
    """Width of the queries, keys and values of a head."""
    ffn_dim: Count = 50
    """Hidden width of the second feed-forward stage."""
    dropout: Decay = 0.2
    """Dropout probability on the input and in both stages of a block."""
    max_length: Count = 200
    """Maximum sequence length, in tokens."""
    normalizer_margin: Natural = 11
    """Constant added to the normalizer of semantic attention; the normalizer is this plus max_length, or plus the
    maximum number of tokens that a token of the layer attends to."""
    time_channel: bool = True
    """Whether blocks have the temporal channel, which needs timestamps."""
    time_encoding: TimeEncoding = "buckets"
    """Time encoding of the temporal channel: `buckets` learns a value per bucket, `functional` learns the three
    parameters of an exponential-power function (FuXi-gamma)."""
    num_time_buckets: Count = 128
    """Number of logarithmic time buckets of the temporal channel."""
    attention: AttentionSpanConfig = FULL
    """Attention span of the layers; full attention by default."""
    activation_checkpointing: bool = False
    """Recompute norms, activations and gates in the backward pass instead of saving them (GPU only)."""

    def __post_init__(self) -> None:
        self.attention.check(self.num_layers)

    def normalizer(self, layer: int) -> float:
        """Return the constant by which a layer divides its attention weights."""
        return float(self.attention.max_attended(layer, self.max_length) + self.normalizer_margin)


class FuXiBlock(nn.Module):
    """FuXi block: attention channels, then the two-stage feed-forward part.

    Args:
        cfg: Config of the backbone.
        site: Number that distinguishes the dropout masks of the block; the block uses `site` and `site + 1`.
    """

    def __init__(self, cfg: FuXiConfig, site: int):
        super().__init__()
        self.cfg = cfg
        self.site = site
        self.rules = cfg.attention.rules(site // 2)
        self.normalizer = cfg.normalizer(site // 2)
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
        length = cfg.max_length + cfg.normalizer_margin
        self.position_table = nn.Parameter(torch.empty(2 * length - 1).normal_(std=0.02))
        self.time_table, self.time_function = (
            time_parameters(cfg.time_encoding, cfg.num_time_buckets) if cfg.time_channel else (None, None)
        )

    def forward(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor | None, info: SequenceInfo
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream after the first stage, and the addend of the second stage.

        Args:
            x_TD: Residual stream, (T, D).
            delta_TD: Addend of the block before, which this block adds to `x_TD`; None for the first block.
            info: Layout of the sequences.
        """
        cfg = self.cfg
        heads = (len(x_TD), cfg.num_heads, cfg.head_dim)
        projected = norm_projection(
            x_TD,
            delta_TD,
            self.uvqk,
            self.widths,
            norm="rms",
            eps=FUXI_NORM_EPS,
            recompute=cfg.activation_checkpointing,
        )
        v, q, k = (part.reshape(heads) for part in projected.parts)
        with recompute_saved_parts(projected):
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
            recompute=cfg.activation_checkpointing,
            packed=projected.packed,
        )
        drop = Dropout(info.token_key_T, self.site + 1, p)
        return feed_forward(
            projected.total, first, self.up, self.down, drop, eps=FUXI_NORM_EPS, recompute=cfg.activation_checkpointing
        )

    def _channels(
        self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, info: SequenceInfo
    ) -> tuple[torch.Tensor, ...]:
        """Return the semantic, positional and temporal channel, each (T, width)."""
        bias = self.bias(info)
        rules = with_targets(self.rules, info)
        if info.context is not None:
            return fuxi_attention_in_context(
                q_THD, k_THD, v_THD, info.context, normalizer=self.normalizer, bias=bias, rules=rules
            )
        semantic = hstu_attention(
            q_THD, k_THD, v_THD, info.offsets, max_length=info.max_length, normalizer=self.normalizer, rules=rules
        )
        others = bias_attention(v_THD.flatten(1), info.offsets, bias, max_length=info.max_length, rules=rules)
        return semantic.flatten(1), *others

    def bias(self, info: SequenceInfo) -> RelativeBias:
        """Return the weights of the positional and temporal channels."""
        return RelativeBias(
            position_table=self.position_table,
            time_table=self.time_table,
            time_function=self.time_function,
            time_T=info.time_T if self.cfg.time_channel else None,
            query_time_T=info.query_time_T if self.cfg.time_channel else None,
            buckets=info.buckets,
        )


class FuXi(ResidualEncoder):
    """FuXi encoder; maps (T, D) input vectors to (T, D) states."""

    def __init__(self, cfg: FuXiConfig):
        super().__init__(cfg, (FuXiBlock(cfg, site=2 * i + 1) for i in range(cfg.num_layers)))
        self.cfg = cfg


def _flops(cfg: FuXiConfig) -> ForwardFlops:
    """Count FLOPs: gate and output are as wide as all channels together; each bias channel is one product."""
    width = cfg.num_heads * cfg.head_dim
    others = 2 if cfg.time_channel else 1
    weights = cfg.dim * ((4 + others) * width + (1 + others) * width + 3 * cfg.ffn_dim)
    return ForwardFlops(
        token=2.0 * weights * cfg.num_layers,
        pair=4.0 * width * cfg.num_layers,
        channel_pair=2.0 * others * width * cfg.num_layers,
        attention_span=cfg.attention,
        num_layers=cfg.num_layers,
    )


def _activations(cfg: FuXiConfig) -> float:
    """Count saved values: as for HSTU, with wider gates and outputs, plus the second stage."""
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
    no_context_parallel_reason=lambda cfg: cfg.attention.no_context_parallel_reason(),
)
