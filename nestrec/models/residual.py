"""What HSTU and FuXi share: positions are added to the input, and layers hand on a sum that the next one forms.

Legend: T tokens, D model width.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn

from nestrec.models.sequence import SequenceInfo
from nestrec.ops.layers.dropout import Dropout
from nestrec.ops.layers.token_input import token_input


class _Sizes(Protocol):
    @property
    def dim(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def max_length(self) -> int: ...
    @property
    def normaliser_margin(self) -> int: ...


class ResidualEncoder(nn.Module):
    """Encoder: (T, D) input vectors to (T, D) states. Layers are made after the positions, which draw first."""

    def __init__(self, cfg: _Sizes, layers: Iterable[nn.Module]):
        super().__init__()
        self._factor, self._dropout = cfg.dim**0.5, cfg.dropout
        self.position = nn.Parameter(torch.empty(cfg.max_length + cfg.normaliser_margin, cfg.dim))
        nn.init.xavier_normal_(self.position)
        self.layers = nn.ModuleList(layers)

    def forward(self, x_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        drop = Dropout(info.token_key_T, 0, self._dropout if self.training else 0.0)
        x_TD = token_input(x_TD, self.position, info.position_T, info.offsets, factor=self._factor, drop=drop)
        delta_TD: torch.Tensor | None = None
        for layer in self.layers:
            x_TD, delta_TD = layer(x_TD, delta_TD, info)
        return x_TD if delta_TD is None else x_TD + delta_TD
