"""HSTU, as the public recipe has it (arXiv 2402.17152 and its released code).

    U, V, Q, K = split(SiLU(LN(x) W1))                            norm_projection
    x <- x + W2 dropout(U * LN(attention(Q, K, V))) + b2          hstu_attention, gated_output

The norms have no parameters, scores are not scaled, and the attention weights are divided by the constant
`max_length + 11` of the recipe, padding included; `window + 11` where a layer sees no more.

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
from nestrec.ops.layers.fused_layers import Dropout, gated_output, norm_projection, without_keeping

NORM_EPS = 1e-6


@config
class HSTUConfig:
    kind: Literal["hstu"] = "hstu"
    """network that reads a history: hstu, fuxi, sasrec, or one of another package"""
    dim: Count = 50
    """width of the model and of the item vectors"""
    num_layers: Natural = 2
    """HSTU layers, one on the other: time and memory grow in proportion"""
    num_heads: Count = 1
    """attention heads of a layer, each with weights of its own"""
    head_dim: Count = 50
    """query, key and value width of a head"""
    dropout: Decay = 0.2
    """share of values that are set to 0 in training, on the input and inside each layer, against overfitting"""
    max_length: Count = 200
    """longest sequence the model sees"""
    normaliser_margin: Natural = 11
    """attention weights are divided by max_length, or what of it a layer can see, plus this"""
    position_bias: bool = True
    """learned bias of the distance between tokens"""
    time_bias: bool = False
    """learned bias of the time between tokens; needs timestamps"""
    time_encoding: TimeEncoding = "buckets"
    """the time bias: a learned value of each bucket, or an exponential-power function with three learned numbers"""
    num_time_buckets: Count = 128
    """logarithmic buckets of the time bias"""
    attention: AttentionSpanConfig = FULL
    """how far it reaches"""
    recompute: bool = False
    """on a GPU: compute norms, activations and gates again in the backward pass instead of keeping them"""

    def __post_init__(self) -> None:
        self.attention.check(self.num_layers)

    def normaliser(self, layer: int) -> float:
        """What a layer divides attention weights by."""
        return float(self.attention.most_seen(layer, self.max_length) + self.normaliser_margin)


class HSTULayer(nn.Module):
    def __init__(self, cfg: HSTUConfig, site: int):
        super().__init__()
        self.cfg = cfg
        self.site = site
        self.rules = cfg.attention.rules(site - 1)
        self.normaliser = cfg.normaliser(site - 1)
        width = cfg.num_heads * cfg.head_dim
        self.uvqk = nn.Parameter(torch.empty(cfg.dim, 4 * width).normal_(std=0.02))
        self.output = nn.Linear(width, cfg.dim)
        nn.init.xavier_uniform_(self.output.weight)
        bias_length = cfg.max_length + cfg.normaliser_margin
        self.position_table = (
            nn.Parameter(torch.empty(2 * bias_length - 1).normal_(std=0.02)) if cfg.position_bias else None
        )
        self.time_table, self.time_function = (
            time_parameters(cfg.time_encoding, cfg.num_time_buckets) if cfg.time_bias else (None, None)
        )

    def forward(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor | None, info: SequenceInfo
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta, what this layer adds to it): the sum is left to the next one, which reads it anyway."""
        cfg = self.cfg
        width = cfg.num_heads * cfg.head_dim
        heads = (len(x_TD), cfg.num_heads, cfg.head_dim)
        projected = norm_projection(
            x_TD, delta_TD, self.uvqk, (width,) * 4, norm="layer", eps=NORM_EPS, recompute=cfg.recompute
        )
        v, q, k = (part.reshape(heads) for part in projected.parts)
        with without_keeping(projected):
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
            recompute=cfg.recompute,
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
                q_THD, k_THD, v_THD, info.context, normaliser=self.normaliser, bias=bias, rules=rules
            )
        return hstu_attention(
            q_THD,
            k_THD,
            v_THD,
            info.offsets,
            max_length=info.max_length,
            normaliser=self.normaliser,
            bias=bias,
            rules=rules,
        )

    def bias(self, info: SequenceInfo) -> RelativeBias:
        """What its attention adds to the scores of such sequences."""
        return RelativeBias(
            position_table=self.position_table,
            time_table=self.time_table,
            time_function=self.time_function,
            time_T=info.time_T,
            query_time_T=info.query_time_T,
            buckets=info.buckets,
        )


class HSTU(ResidualEncoder):
    """Encoder: (T, D) input vectors to (T, D) states."""

    def __init__(self, cfg: HSTUConfig):
        super().__init__(cfg, (HSTULayer(cfg, site=i + 1) for i in range(cfg.num_layers)))
        self.cfg = cfg


def _flops(cfg: HSTUConfig) -> ForwardFlops:
    """U, V, Q, K and the output; two products of attention."""
    width = cfg.num_heads * cfg.head_dim
    return ForwardFlops(
        token=2.0 * 5 * cfg.dim * width * cfg.num_layers,
        pair=4.0 * width * cfg.num_layers,
        reach=cfg.attention,
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
    whole_only=lambda cfg: cfg.attention.whole_only(),
)
