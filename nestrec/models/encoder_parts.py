"""Parts that encoders share: features, prefix tokens, data types, residual blocks.

The type that a model computes in, where it is another than it was trained in.

Vectors of several tables, and columns of numbers, as one vector of the model's width.

A table whose rows have another width has a matrix of its own, which brings them to the model's; features that share a
table share it. What is looked up for one token is summed.

Legend: E places, D channels of the model.

Tokens that stand before a history: what is known of its user, one token a feature.

    P prefix tokens, then the tokens of the history; no state of a prefix token is asked for

They are causal as all others: a prefix that looked ahead would tell the first event of a sample what its last ones are,
and a sample asks at every position. Where attention has a window they are seen beside it, as `attention.prefix` is.

Legend: T tokens of histories, B sequences, P prefix tokens, D channels, N = T + B P.

What HSTU and FuXi share: positions are added to the input, layers hand on a sum that the next one forms, and what
they learn of time is a table of buckets or a function.

Legend: T tokens, D model width.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, Protocol, TypeVar, cast

import torch
from torch import nn

from nestrec.base.errors import UserError
from nestrec.base.random import GOLDEN64
from nestrec.models.backbone_spec import AttentionSpanConfig, BackboneConfig, cut_sequences
from nestrec.models.sequence import SequenceInfo
from nestrec.ops.attention.hstu_op import batch_buckets
from nestrec.ops.attention.mask_and_bias import AttentionMask, RelativeBias, initial_time_function
from nestrec.ops.layers.fused_layers import Dropout
from nestrec.ops.layers.token_input import token_input, token_input_reference

_LEARNED_OF_PAIRS = ("position_table", "time_table", "time_function")
"""Numbers of a layer about distance and time. They are few, their sums are rounded once, and the logarithm of a scale
in 16 bits would move it by some percent: they stay in 32 bits at the least."""

Model = TypeVar("Model", bound=nn.Module)


def computed_in(model: Model, dtype: torch.dtype) -> Model:
    """The same model in another type."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            own = torch.promote_types(dtype, torch.float32) if name.endswith(_LEARNED_OF_PAIRS) else dtype
            tensor.data = tensor.data.to(own)
    return model


def dtype_of(weights: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The type that a model of these weights computes in: that of most of them, which is the shortest."""
    return min((w.dtype for w in weights.values() if w.is_floating_point()), key=lambda dtype: dtype.itemsize)


class FeatureProjections(nn.Module):
    """The matrices of the tables that need one; no weights at all where none does."""

    def __init__(self, dim: int, widths: Mapping[str, int], dense: Mapping[str, int] | None = None):
        """widths: of the rows of each table. dense: of columns that have no table, numbers and vectors, each of which
        has a matrix whatever its width."""
        super().__init__()
        self.matrices = nn.ModuleDict(
            {_key(table): nn.Linear(width, dim, bias=False) for table, width in widths.items() if width != dim}
        )

        self.dense = tuple(dense or ())
        """columns that have no table"""
        for column, width in (dense or {}).items():
            matrix = nn.Linear(width, dim, bias=False)
            nn.init.normal_(matrix.weight, std=0.02)  # as rows begin: a column of numbers shall not drown the others
            self.matrices[_key(column)] = matrix

    def forward(self, table: str, vectors: torch.Tensor) -> torch.Tensor:
        """(..., D) of (..., width of the table)."""
        key = _key(table)
        return self.matrices[key](vectors) if key in self.matrices else vectors

    def without_tables(self) -> "FeatureProjections":
        """The matrices of columns of numbers alone, shared with this."""
        kept = FeatureProjections(0, {})
        kept.dense = self.dense
        kept.matrices.update({_key(column): self.matrices[_key(column)] for column in self.dense})
        return kept

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes; float32 where it has nothing to compute."""
        return next((p.dtype for p in self.parameters()), torch.float32)

    def changes(self, table: str) -> bool:
        """Whether its vectors are not what its rows hold."""
        return _key(table) in self.matrices


def summed(vectors: list[torch.Tensor]) -> torch.Tensor:
    """(E, D) of as many (E, D) as there are features."""
    return torch.stack(vectors).sum(0)


def _key(table: str) -> str:
    """Names of tables are those of columns; a module's may hold no dot, and not be those of a dictionary's methods."""
    return "of_" + table.replace(".", "_")


ConfigT = TypeVar("ConfigT", bound=BackboneConfig)
_STEP = GOLDEN64 - (1 << 64)
"""As a signed number: what the keys of prefix tokens differ by."""


def with_room(cfg: ConfigT, num_prefix: int) -> ConfigT:
    """The config of an encoder for sequences with so many tokens before them."""
    if num_prefix == 0:
        return cfg
    more = {"max_length": cfg.max_length + num_prefix}
    reach = getattr(cfg, "attention", None)
    if reach is not None and reach.window is not None:
        more["attention"] = replace(reach, prefix=reach.prefix + num_prefix)
    return replace(cfg, **more)  # type: ignore[type-var]


def states_behind(
    encoder: nn.Module, token_TD: torch.Tensor, info: SequenceInfo, prefix_BPD: torch.Tensor | None
) -> torch.Tensor:
    """(T, D) states of the tokens of histories that begin with these."""
    if prefix_BPD is None:
        return _states(encoder, token_TD, info)
    (num_sequences, num_prefix, _) = prefix_BPD.shape
    device = token_TD.device
    sequence_T = torch.searchsorted(info.offsets, torch.arange(len(token_TD), device=device), right=True) - 1
    place_T = torch.arange(len(token_TD), device=device) + num_prefix * (sequence_T + 1)
    first_B = info.offsets[:-1] + num_prefix * torch.arange(num_sequences, device=device)
    place_BP = first_B[:, None] + torch.arange(num_prefix, device=device)

    def joined(of_prefix: torch.Tensor, of_tokens: torch.Tensor) -> torch.Tensor:
        out = of_tokens.new_empty(len(token_TD) + num_sequences * num_prefix, *of_tokens.shape[1:])
        out = out.index_copy(0, place_BP.reshape(-1), of_prefix.reshape(-1, *of_tokens.shape[1:]).to(out.dtype))
        return out.index_copy(0, place_T, of_tokens)

    def of_first(of_tokens: torch.Tensor) -> torch.Tensor:
        """(B, P) what the first token of each sequence has."""
        return of_tokens[info.offsets[:-1].clamp(max=len(token_TD) - 1), None].expand(-1, num_prefix)

    number_P = torch.arange(num_prefix, device=device)
    longer = replace(
        info,
        offsets=info.offsets + num_prefix * torch.arange(num_sequences + 1, device=device),
        max_length=info.max_length + num_prefix,
        position_T=joined(number_P.expand(num_sequences, -1), info.position_T + num_prefix),
        token_key_T=joined(of_first(info.token_key_T) + (number_P + 1) * _STEP, info.token_key_T),
        time_T=None if info.time_T is None else joined(of_first(info.time_T), info.time_T),
        query_time_T=None if info.time_T is None or info.query_time_T is None
        else joined(of_first(info.time_T), info.query_time_T),
        cut_B=None if info.cut_B is None else info.cut_B + num_prefix,
    )  # fmt: skip
    return _states(encoder, joined(prefix_BPD, token_TD), longer).index_select(0, place_T)


def _states(encoder: nn.Module, token_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
    """What an encoder makes of tokens; one of another package may give something else, which would fail far from it."""
    states_TD = encoder(token_TD, info)
    if not isinstance(states_TD, torch.Tensor) or states_TD.shape != token_TD.shape:
        shape = tuple(states_TD.shape) if isinstance(states_TD, torch.Tensor) else type(states_TD).__name__
        remedy = (
            f"let its forward(tokens, info) return a tensor of shape {tuple(token_TD.shape)}, a state for each token"
        )
        raise UserError(f"gives {shape}", option="encoder", value=type(encoder).__name__, remedy=remedy)
    return states_TD


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
    def attention(self) -> AttentionSpanConfig: ...


TimeEncoding = Literal["buckets", "functional"]


def time_parameters(encoding: TimeEncoding, num_buckets: int) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """(table of a layer, scalars of its function): one of them."""
    if encoding == "functional":
        return None, initial_time_function()
    return nn.Parameter(torch.empty(num_buckets + 1).normal_(std=0.02)), None


def with_targets(rules: AttentionMask, info: SequenceInfo) -> AttentionMask:
    """Rules of a layer for sequences that may end with candidates."""
    return rules if info.num_targets_B is None else replace(rules, num_targets_B=info.num_targets_B)


class _Layer(Protocol):
    def bias(self, info: SequenceInfo) -> RelativeBias: ...


class ResidualEncoder(nn.Module):
    """Encoder: (T, D) input vectors to (T, D) states. Layers are made after the positions, which draw first."""

    def __init__(self, cfg: _Sizes, layers: Iterable[nn.Module]):
        super().__init__()
        self._factor = cfg.dim**0.5
        self._dropout = cfg.dropout
        self._reach = cfg.attention
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
