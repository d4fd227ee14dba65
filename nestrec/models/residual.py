"""What HSTU and FuXi share: positions are added to the input, layers hand on a sum that the next one forms, and what
they learn of time is a table of buckets or a function.

Legend: T tokens, D model width.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, Protocol, cast

import torch
from torch import nn

from nestrec.models.reach import AttentionReach, cut_sequences
from nestrec.models.sequence import SequenceInfo
from nestrec.ops.attention.hstu_op import batch_buckets
from nestrec.ops.attention.mask import AttentionRules
from nestrec.ops.attention.relative_bias import RelativeBias
from nestrec.ops.attention.time_function import initial_time_function
from nestrec.ops.layers.dropout import Dropout
from nestrec.ops.layers.token_input import token_input, token_input_reference


class _Sizes(Protocol):
    @property
    def dim(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def max_length(self) -> int: ...
    @property
    def normaliser_margin(self) -> int: ...
    @property
    def attention(self) -> AttentionReach: ...


TimeEncoding = Literal["buckets", "functional"]


def time_parameters(encoding: TimeEncoding, num_buckets: int) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """(table of a layer, scalars of its function): one of them."""
    if encoding == "functional":
        return None, initial_time_function()
    return nn.Parameter(torch.empty(num_buckets + 1).normal_(std=0.02)), None


def with_targets(rules: AttentionRules, info: SequenceInfo) -> AttentionRules:
    """Rules of a layer for sequences that may end with candidates."""
    return rules if info.num_targets_B is None else replace(rules, num_targets_B=info.num_targets_B)


class _Layer(Protocol):
    def bias(self, info: SequenceInfo) -> RelativeBias: ...


class ResidualEncoder(nn.Module):
    """Encoder: (T, D) input vectors to (T, D) states. Layers are made after the positions, which draw first."""

    def __init__(self, cfg: _Sizes, layers: Iterable[nn.Module]):
        super().__init__()
        self._factor, self._dropout, self._reach = cfg.dim**0.5, cfg.dropout, cfg.attention
        self.position = nn.Parameter(torch.empty(cfg.max_length + cfg.normaliser_margin, cfg.dim))
        nn.init.xavier_normal_(self.position)
        self.layers = nn.ModuleList(layers)

    def forward(self, x_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        drop = Dropout(info.token_key_T, 0, self._dropout if self.training else 0.0)
        if info.context is None:
            x_TD = token_input(x_TD, self.position, info.position_T, info.offsets, factor=self._factor, drop=drop)
        else:  # the kernel takes whole sequences
            x_TD = token_input_reference(x_TD, self.position, info.position_T, factor=self._factor, drop=drop)
        first = next((n for n in range(len(self.layers)) if self._reach.cuts(n)), len(self.layers))
        x_TD = self._through(self.layers[:first], x_TD, info)
        if first == len(self.layers):
            return x_TD
        kept, info = cut_sequences(self._reach, info)
        return x_TD.index_copy(0, kept, self._through(self.layers[first:], x_TD.index_select(0, kept), info))

    @staticmethod
    def _through(layers: nn.ModuleList, x_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        if len(layers) > 0 and info.context is None:
            # What every layer would otherwise find for itself.
            bias = cast(_Layer, layers[0]).bias(info)
            info = replace(info, buckets=batch_buckets(x_TD, info.offsets, info.max_length, bias))
        delta_TD: torch.Tensor | None = None
        for layer in layers:
            x_TD, delta_TD = layer(x_TD, delta_TD, info)
        return x_TD if delta_TD is None else x_TD + delta_TD
