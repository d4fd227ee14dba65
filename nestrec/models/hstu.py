"""HSTU backbone, as in the public recipe (arXiv 2402.17152 and its released code).

    U, V, Q, K = split(SiLU(LN(x) W1))                            norm_projection
    x <- x + W2 dropout(U * LN(attention(Q, K, V))) + b2          hstu_attention, gated_output

The norms have no parameters, scores are not scaled, and the attention weights are divided by the constant
`max_length + 11` of the recipe (padding included), or by `window + 11` if the layer attends to a window only.

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
from nestrec.ops.attention.hstu_attention import hstu_attention
from nestrec.ops.attention.mask_and_bias import RelativeBias
from nestrec.ops.context_parallel.ring_attention import hstu_attention_in_context
from nestrec.ops.layers.fused_layers import Dropout, gated_output, norm_projection, recompute_saved_parts

NORM_EPS = 1e-6


@config
class HSTUConfig:
    """Config of the HSTU backbone."""

    kind: Literal["hstu"] = "hstu"
    """Name of the backbone (sequence encoder): hstu, fuxi, sasrec, or the backbone of a plugin."""
    dim: Count = 50
    """Width of the model and of the item embeddings."""
    num_layers: Natural = 2
    """Number of HSTU layers; time and memory grow linearly with it."""
    num_heads: Count = 1
    """Number of attention heads per layer."""
    head_dim: Count = 50
    """Width of the queries, keys and values of a head."""
    dropout: Decay = 0.2
    """Dropout probability on the input and inside each layer."""
    max_length: Count = 200
    """Maximum sequence length, in tokens."""
    normalizer_margin: Natural = 11
    """Constant added to the attention normalizer; the normalizer is this plus max_length, or plus the maximum number of
    tokens that a token of the layer attends to."""
    position_bias: bool = True
    """Whether attention has a learned relative position bias."""
    time_bias: bool = False
    """Whether attention has a learned bias of the time between tokens, which needs timestamps."""
    time_encoding: TimeEncoding = "buckets"
    """Time encoding of the time bias: `buckets` learns a value per bucket, `functional` learns the three parameters of
    an exponential-power function."""
    num_time_buckets: Count = 128
    """Number of logarithmic time buckets of the time bias."""
    attention: AttentionSpanConfig = FULL
    """Attention span of the layers; full attention by default."""
    activation_checkpointing: bool = False
    """Recompute norms, activations and gates in the backward pass instead of saving them (GPU only)."""

    def __post_init__(self) -> None:
        self.attention.check(self.num_layers)

    def normalizer(self, layer: int) -> float:
        """Return the constant by which a layer divides its attention weights."""
        return float(self.attention.max_attended(layer, self.max_length) + self.normalizer_margin)


class HSTULayer(nn.Module):
    """HSTU layer: pointwise attention with relative bias, and a gated output.

    Args:
        cfg: Config of the backbone.
        site: Number that distinguishes the dropout masks of the layers, from 1.
    """

    def __init__(self, cfg: HSTUConfig, site: int):
        super().__init__()
        self.cfg = cfg
        self.site = site
        self.rules = cfg.attention.rules(site - 1)
        self.normalizer = cfg.normalizer(site - 1)
        width = cfg.num_heads * cfg.head_dim
        self.uvqk = nn.Parameter(torch.empty(cfg.dim, 4 * width).normal_(std=0.02))
        self.output = nn.Linear(width, cfg.dim)
        nn.init.xavier_uniform_(self.output.weight)
        bias_length = cfg.max_length + cfg.normalizer_margin
        self.position_table = (
            nn.Parameter(torch.empty(2 * bias_length - 1).normal_(std=0.02)) if cfg.position_bias else None
        )
        self.time_table, self.time_function = (
            time_parameters(cfg.time_encoding, cfg.num_time_buckets) if cfg.time_bias else (None, None)
        )

    def forward(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor | None, info: SequenceInfo
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream and the addend of this layer.

        The next layer performs the addition, fused with its norm, because it reads the sum anyway.

        Args:
            x_TD: Residual stream, (T, D).
            delta_TD: Addend of the layer before, which this layer adds to `x_TD`; None for the first layer.
            info: Layout of the sequences.
        """
        cfg = self.cfg
        width = cfg.num_heads * cfg.head_dim
        heads = (len(x_TD), cfg.num_heads, cfg.head_dim)
        projected = norm_projection(
            x_TD, delta_TD, self.uvqk, (width,) * 4, norm="layer", eps=NORM_EPS, recompute=cfg.activation_checkpointing
        )
        v, q, k = (part.reshape(heads) for part in projected.parts)
        with recompute_saved_parts(projected):
            attended = self._attention(q, k, v, info)
        drop = Dropout(info.token_key_T, self.site, cfg.dropout if self.training else 0.0)
        added = gated_output(
            (attended.flatten(1),),
            projected.gate,
            self.output.weight,
            self.output.bias,
            drop,
            norm="layer",
            eps=NORM_EPS,
            recompute=cfg.activation_checkpointing,
            packed=projected.packed,
        )
        return projected.total, added

    def _attention(
        self, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, info: SequenceInfo
    ) -> torch.Tensor:
        bias = self.bias(info)
        rules = with_targets(self.rules, info)
        if info.context is not None:
            return hstu_attention_in_context(
                q_THD, k_THD, v_THD, info.context, normalizer=self.normalizer, bias=bias, rules=rules
            )
        return hstu_attention(
            q_THD,
            k_THD,
            v_THD,
            info.offsets,
            max_length=info.max_length,
            normalizer=self.normalizer,
            bias=bias,
            rules=rules,
        )

    def bias(self, info: SequenceInfo) -> RelativeBias:
        """Return the relative bias that attention adds to its scores."""
        return RelativeBias(
            position_table=self.position_table,
            time_table=self.time_table,
            time_function=self.time_function,
            time_T=info.time_T,
            query_time_T=info.query_time_T,
            buckets=info.buckets,
        )


class HSTU(ResidualEncoder):
    """HSTU encoder; maps (T, D) input vectors to (T, D) states."""

    def __init__(self, cfg: HSTUConfig):
        super().__init__(cfg, (HSTULayer(cfg, site=i + 1) for i in range(cfg.num_layers)))
        self.cfg = cfg


def _flops(cfg: HSTUConfig) -> ForwardFlops:
    """Count FLOPs: the projections U, V, Q, K and the output, and two attention products."""
    width = cfg.num_heads * cfg.head_dim
    return ForwardFlops(
        token=2.0 * 5 * cfg.dim * width * cfg.num_layers,
        pair=4.0 * width * cfg.num_layers,
        attention_span=cfg.attention,
        num_layers=cfg.num_layers,
    )


def _activations(cfg: HSTUConfig) -> float:
    return cfg.num_layers * (3.0 * cfg.dim + 11.0 * cfg.num_heads * cfg.head_dim)


BACKBONE = BackboneSpec(
    config=HSTUConfig,
    build=HSTU,
    flops=_flops,
    activations=_activations,
    cached="hstu",
    times_field="time_bias",
    has_fp8=True,
    cut=cut_by_attention,
    no_context_parallel_reason=lambda cfg: cfg.attention.no_context_parallel_reason(),
)
