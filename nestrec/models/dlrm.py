"""DLRM for rows of dense numbers and categories (Criteo).

    z0 = MLP(log(1 + dense)),  zi = vector of category i;   logit = MLP([z0, all dot products zi . zj, i < j])

Legend: B rows, C categories, D vector width.
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
    kind: Literal["dlrm"] = "dlrm"
    """network that reads labelled rows: dlrm, or one of another package"""
    dim: Count = 16
    """width of the category vectors"""
    num_dense: Natural = 13
    """columns of numbers in the data (13 in Criteo's)"""
    num_categories: Natural = 26
    """columns of categories in the data (26 in Criteo's)"""
    bottom: tuple[Count, ...] = (64, 32)
    """hidden widths of the network on the dense columns"""
    top: tuple[Count, ...] = (64, 32)
    """hidden widths of the network on the interactions"""


class Interactions(nn.Module):
    """Dot products of all pairs of vectors."""

    pair: torch.Tensor

    def __init__(self, num_vectors: int):
        super().__init__()
        rows, columns = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("pair", rows * num_vectors + columns, persistent=False)

    def forward(self, vectors_BCD: torch.Tensor) -> torch.Tensor:
        """(B, C (C - 1) / 2), pairs in the order (0, 1), (0, 2), ..."""
        return (vectors_BCD @ vectors_BCD.transpose(1, 2)).flatten(1)[:, self.pair]


class DLRM(nn.Module):
    def __init__(self, cfg: DLRMConfig):
        super().__init__()
        self.cfg = cfg
        self.bottom = mlp(cfg.num_dense * 2, *cfg.bottom, cfg.dim)
        num_vectors = cfg.num_categories + 1
        self.top = mlp(cfg.dim + num_vectors * (num_vectors - 1) // 2, *cfg.top, 1)
        self.to_width = FeatureProjections(cfg.dim, {})
        """of tables whose vectors have another width than the model"""
        self.interactions = Interactions(num_vectors)

    def forward(self, dense_BN: torch.Tensor, category_BCD: torch.Tensor) -> torch.Tensor:
        """(B,) logits. Missing dense values are NaN; a second set of inputs says which were missing."""
        missing = dense_BN.isnan()
        filled = dense_BN.nan_to_num(0.0)
        scaled = filled.sign() * filled.abs().log1p()
        z_BD = self.bottom(torch.cat([scaled, missing.to(scaled.dtype)], dim=1))
        dots = self.interactions(torch.cat([z_BD[:, None], category_BCD], dim=1))
        return self.top(torch.cat([z_BD, dots], dim=1)).squeeze(1)  # type: ignore[no-any-return]


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(a, b)] + ([nn.ReLU()] if i < len(widths) - 2 else [])
    return nn.Sequential(*layers)
