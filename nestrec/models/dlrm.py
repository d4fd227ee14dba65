"""DLRM: click-through-rate model for samples with dense and categorical features (Criteo).

    z0 = MLP(log(1 + dense)),  zi = embedding of category i;   logit = MLP([z0, all dot products zi . zj, i < j])

Legend: B samples, N dense features, C categorical features, D embedding width.
"""

import itertools
from typing import Literal

import torch
from torch import nn

from nestrec.base.config import config
from nestrec.base.config_values import Count, Natural
from nestrec.models.encoder_parts import FeatureProjections


@config
class DLRMConfig:
    """Config of a DLRM."""

    kind: Literal["dlrm"] = "dlrm"
    """Name of the CTR model: dlrm, or the model of a plugin."""
    dim: Count = 16
    """Width of the embeddings of categorical features."""
    num_dense: Natural = 13
    """Number of dense (numeric) features of a sample; Criteo has 13."""
    num_categorical: Natural = 26
    """Number of categorical features of a sample; Criteo has 26."""
    bottom_mlp: tuple[Count, ...] = (64, 32)
    """Hidden widths of the MLP over the dense features."""
    top_mlp: tuple[Count, ...] = (64, 32)
    """Hidden widths of the MLP over the feature interactions."""


class Interactions(nn.Module):
    """Dot products of all pairs of vectors."""

    pair: torch.Tensor

    def __init__(self, num_vectors: int):
        super().__init__()
        rows, columns = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("pair", rows * num_vectors + columns, persistent=False)

    def forward(self, vectors_BCD: torch.Tensor) -> torch.Tensor:
        """Return (B, C (C - 1) / 2) dot products, in the order (0, 1), (0, 2), ..."""
        return (vectors_BCD @ vectors_BCD.transpose(1, 2)).flatten(1)[:, self.pair]


class DLRM(nn.Module):
    """DLRM, as published by Facebook: bottom MLP, pairwise interactions and top MLP."""

    def __init__(self, cfg: DLRMConfig):
        super().__init__()
        self.cfg = cfg
        self.bottom = mlp(cfg.num_dense * 2, *cfg.bottom_mlp, cfg.dim)
        num_vectors = cfg.num_categorical + 1
        self.top = mlp(cfg.dim + num_vectors * (num_vectors - 1) // 2, *cfg.top_mlp, 1)
        self.to_width = FeatureProjections(cfg.dim, {})
        """Projections for tables whose embeddings are not as wide as the model."""
        self.interactions = Interactions(num_vectors)

    def forward(self, dense_BN: torch.Tensor, category_BCD: torch.Tensor) -> torch.Tensor:
        """Return the (B,) logits.

        Args:
            dense_BN: Dense features; NaN is a missing value, which the bottom MLP reads as 0 and a missing flag.
            category_BCD: Embeddings of the categorical features.
        """
        missing = dense_BN.isnan()
        filled = dense_BN.nan_to_num(0.0)
        scaled = filled.sign() * filled.abs().log1p()
        z_BD = self.bottom(torch.cat([scaled, missing.to(scaled.dtype)], dim=1))
        dots = self.interactions(torch.cat([z_BD[:, None], category_BCD], dim=1))
        return self.top(torch.cat([z_BD, dots], dim=1)).squeeze(1)  # type: ignore[no-any-return]


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers of these widths with ReLU between them (input width first)."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(a, b)] + ([nn.ReLU()] if i < len(widths) - 2 else [])
    return nn.Sequential(*layers)
