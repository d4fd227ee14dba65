"""SASRec backbone, in its two public variants: the original one and the baseline of the HSTU release.

    q = LN(x);  y = q + MHA(q, x, x);  x <- z + FFN(z)  with  z = LN(y)

Only the query is normalized before attention, and the residual is taken from the normalized query. The original ends
with a LayerNorm; the HSTU release scales the output to length one instead, outside of the encoder.

Legend: T tokens, D model width, H heads.
"""

from typing import Literal

import torch
from torch import nn

from nestrec.base.config import config
from nestrec.base.config_values import Count, Decay, Natural
from nestrec.models.backbone_spec import BackboneSpec, ForwardFlops
from nestrec.models.sequence import SequenceInfo
from nestrec.ops.attention.softmax_attention import softmax_attention
from nestrec.ops.context_parallel.ring_attention import softmax_attention_in_context
from nestrec.ops.layers.fused_layers import dropout


@config
class SASRecConfig:
    """Config of the SASRec backbone."""

    kind: Literal["sasrec"] = "sasrec"
    """Name of the backbone (sequence encoder): hstu, fuxi, sasrec, or the backbone of a plugin."""
    dim: Count = 50
    """Width of the model and of the item embeddings."""
    num_layers: Natural = 2
    """Number of transformer blocks (attention and feed-forward)."""
    num_heads: Count = 1
    """Number of attention heads; `dim` is divided among them."""
    ffn_dim: Count = 50
    """Hidden width of the feed-forward part."""
    activation: Literal["relu", "gelu"] = "relu"
    """Activation function of the feed-forward part."""
    dropout: Decay = 0.2
    """Dropout probability on the input and inside the feed-forward part."""
    max_length: Count = 200
    """Maximum sequence length, in tokens."""
    norm_affine: bool = True
    """Whether LayerNorms have learned scales and shifts; those of the HSTU release do not."""
    final_norm: bool = True
    """Whether a LayerNorm is applied to the output, as in the original."""


class SASRecLayer(nn.Module):
    """SASRec block: softmax attention with a normalized query, then a feed-forward part.

    Args:
        cfg: Config of the backbone.
        site: Number that distinguishes the dropout masks of the block; the block uses `site` and `site + 1`.
    """

    def __init__(self, cfg: SASRecConfig, site: int):
        super().__init__()
        self.cfg = cfg
        self.site = site
        self.query_norm = nn.LayerNorm(cfg.dim, eps=1e-8, elementwise_affine=cfg.norm_affine)
        self.ffn_norm = nn.LayerNorm(cfg.dim, eps=1e-8, elementwise_affine=cfg.norm_affine)
        self.query, self.key, self.value, self.mix = (nn.Linear(cfg.dim, cfg.dim) for _ in range(4))
        self.up, self.down = nn.Linear(cfg.dim, cfg.ffn_dim), nn.Linear(cfg.ffn_dim, cfg.dim)
        for linear in (self.query, self.key, self.value, self.mix, self.up, self.down):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.activation = torch.relu if cfg.activation == "relu" else nn.functional.gelu

    def forward(self, x_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        heads = (x_TD.shape[0], self.cfg.num_heads, self.cfg.dim // self.cfg.num_heads)
        normed = self.query_norm(x_TD)
        q, k, v = (part.view(heads) for part in (self.query(normed), self.key(x_TD), self.value(x_TD)))
        if info.context is not None:
            attended = softmax_attention_in_context(q, k, v, info.context)
        else:
            attended = softmax_attention(q, k, v, info.offsets, max_length=info.max_length)
        return self.after_attention(normed, attended.flatten(1), info.token_key_T)

    def after_attention(
        self, normed_TD: torch.Tensor, attended_TD: torch.Tensor, token_key_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply the output projection of attention, the residual and the feed-forward part.

        Args:
            normed_TD: Normalized queries, from which the residual is taken.
            attended_TD: Output of attention, heads concatenated.
            token_key_T: Keys of the random generator for dropout; None disables dropout.
        """
        p = self.cfg.dropout if self.training and token_key_T is not None else 0.0
        keys = normed_TD if token_key_T is None else token_key_T
        z = self.ffn_norm(normed_TD + self.mix(attended_TD))
        hidden = dropout(self.activation(self.up(z)), keys, self.site, p)
        out_TD: torch.Tensor = z + dropout(self.down(hidden), keys, self.site + 1, p)
        return out_TD


class SASRec(nn.Module):
    """SASRec encoder; maps (T, D) input vectors to (T, D) states."""

    def __init__(self, cfg: SASRecConfig):
        super().__init__()
        self.cfg = cfg
        self.position = nn.Parameter(torch.empty(cfg.max_length, cfg.dim))
        nn.init.trunc_normal_(self.position, std=cfg.dim**-0.5)
        self.layers = nn.ModuleList(SASRecLayer(cfg, site=2 * i + 1) for i in range(cfg.num_layers))
        self.final_norm = nn.LayerNorm(cfg.dim, eps=1e-8) if cfg.final_norm else nn.Identity()

    def forward(self, x_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        x_TD = x_TD * self.cfg.dim**0.5 + self.position[info.position_T]
        x_TD = dropout(x_TD, info.token_key_T, 0, self.cfg.dropout if self.training else 0.0)
        for layer in self.layers:
            x_TD = layer(x_TD, info)
        return self.final_norm(x_TD)  # type: ignore[no-any-return]


def _flops(cfg: SASRecConfig) -> ForwardFlops:
    """Count FLOPs: query, key, value and output projections, two feed-forward products, two attention products."""
    weights = 4 * cfg.dim * cfg.dim + 2 * cfg.dim * cfg.ffn_dim
    return ForwardFlops(token=2.0 * weights * cfg.num_layers, pair=4.0 * cfg.dim * cfg.num_layers)


def _activations(cfg: SASRecConfig) -> float:
    return cfg.num_layers * (10.0 * cfg.dim + 3.0 * cfg.ffn_dim)


BACKBONE = BackboneSpec(
    config=SASRecConfig,
    build=SASRec,
    flops=_flops,
    activations=_activations,
    cached="sasrec",
    no_context_parallel_reason=lambda cfg: None,
)
