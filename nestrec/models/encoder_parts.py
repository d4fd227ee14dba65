"""Components shared by encoders: feature projections, prefix tokens, dtype conversion and the residual encoder.

- **Feature projections** map embeddings of several tables, and numeric columns, to the width of the model. A table of
  another width has a projection matrix, which all features of the table share. The vectors of one token are summed.
- **Prefix tokens** precede a history and hold user features, one token per feature. They are causal like all tokens: a
  prefix that attended to later tokens would leak the last events of a sample to its first ones, and every position of a
  sample is trained. If attention has a window, prefix tokens are visible in addition to it (`num_prefix_tokens`).
- **`ResidualEncoder`** is the base class of HSTU and FuXi: it adds position embeddings to the input, and each layer
  returns an addend that the next layer adds to the residual stream. The time encoding of a layer is a table of buckets
  or a function.

Legend: T tokens of histories, B sequences, P prefix tokens, D model width, E tokens of any kind.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, Protocol, TypeVar, cast

import torch
from torch import nn

from nestrec.base.errors import UserError
from nestrec.base.random import GOLDEN64
from nestrec.models.backbone_spec import AttentionSpanConfig, BackboneConfig, truncate_sequences
from nestrec.models.sequence import SequenceInfo
from nestrec.ops.attention.hstu_op import batch_buckets
from nestrec.ops.attention.mask_and_bias import AttentionMask, RelativeBias, initial_time_function
from nestrec.ops.layers.fused_layers import Dropout
from nestrec.ops.layers.token_input import token_input, token_input_reference

_LEARNED_OF_PAIRS = ("position_table", "time_table", "time_function")
"""Parameters of the learned position and time biases. They stay in float32 or better: they are small, their sums are
rounded once, and the logarithm of a scale in 16 bits would change the scale by some percent."""

Model = TypeVar("Model", bound=nn.Module)


def convert_model(model: Model, dtype: torch.dtype) -> Model:
    """Convert a model to another dtype in place; parameters of position and time biases stay in float32 or better."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            target = torch.promote_types(dtype, torch.float32) if name.endswith(_LEARNED_OF_PAIRS) else dtype
            tensor.data = tensor.data.to(target)
    return model


def compute_dtype(weights: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype in which a model with these weights computes: the smallest floating-point dtype among them."""
    return min((w.dtype for w in weights.values() if w.is_floating_point()), key=lambda dtype: dtype.itemsize)


class FeatureProjections(nn.Module):
    """Projections of embeddings and dense columns to the width of the model.

    A table whose embeddings have the width of the model is not projected and has no weights here.

    Args:
        dim: Width of the model.
        widths: Width of the embeddings, per table.
        dense: Width of each dense column (numbers or vectors without a table). They are always projected.
    """

    def __init__(self, dim: int, widths: Mapping[str, int], dense: Mapping[str, int] | None = None):
        super().__init__()
        self.matrices = nn.ModuleDict(
            {_key(table): nn.Linear(width, dim, bias=False) for table, width in widths.items() if width != dim}
        )

        self.dense = tuple(dense or ())
        """Names of the dense columns, which do not have a table."""
        for column, width in (dense or {}).items():
            matrix = nn.Linear(width, dim, bias=False)
            nn.init.normal_(matrix.weight, std=0.02)  # as embeddings, so that a dense column does not dominate the sum
            self.matrices[_key(column)] = matrix

    def forward(self, table: str, vectors: torch.Tensor) -> torch.Tensor:
        """Project (..., width of the table) vectors to (..., D)."""
        key = _key(table)
        return self.matrices[key](vectors) if key in self.matrices else vectors

    def without_tables(self) -> "FeatureProjections":
        """Return the projections of the dense columns only; the matrices are shared with this module."""
        dense_only = FeatureProjections(0, {})
        dense_only.dense = self.dense
        dense_only.matrices.update({_key(column): self.matrices[_key(column)] for column in self.dense})
        return dense_only

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrices; float32 if there are none."""
        return next((p.dtype for p in self.parameters()), torch.float32)

    def projects(self, table: str) -> bool:
        """Return whether the embeddings of a table are projected (True) or used as they are stored (False)."""
        return _key(table) in self.matrices


def sum_features(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Sum the (E, D) vectors of all features."""
    return torch.stack(vectors).sum(0)


def _key(table: str) -> str:
    """Return the module name for a table: without dots, and never the name of a method of `ModuleDict`."""
    return "of_" + table.replace(".", "_")


ConfigT = TypeVar("ConfigT", bound=BackboneConfig)
_STEP = GOLDEN64 - (1 << 64)
"""Difference between the generator keys of consecutive prefix tokens, as a signed 64-bit number."""


def reserve_prefix(cfg: ConfigT, num_prefix: int) -> ConfigT:
    """Return the encoder config for sequences that start with `num_prefix` prefix tokens."""
    if num_prefix == 0:
        return cfg
    changes = {"max_length": cfg.max_length + num_prefix}
    attention = getattr(cfg, "attention", None)
    if attention is not None and attention.window is not None:
        changes["attention"] = replace(attention, num_prefix_tokens=attention.num_prefix_tokens + num_prefix)
    return replace(cfg, **changes)  # type: ignore[type-var]


def encode_with_prefix(
    encoder: nn.Module, token_TD: torch.Tensor, info: SequenceInfo, prefix_BPD: torch.Tensor | None
) -> torch.Tensor:
    """Encode histories that are preceded by prefix tokens.

    Args:
        encoder: Encoder whose config has room for the prefix tokens (`reserve_prefix`).
        token_TD: Input vectors of the history tokens.
        info: Layout of the histories, without prefix tokens.
        prefix_BPD: Input vectors of the prefix tokens; None if there are none.

    Returns:
        The (T, D) states of the history tokens.
    """
    if prefix_BPD is None:
        return _states(encoder, token_TD, info)
    (num_sequences, num_prefix, _) = prefix_BPD.shape
    device = token_TD.device
    sequence_T = torch.searchsorted(info.offsets, torch.arange(len(token_TD), device=device), right=True) - 1
    index_T = torch.arange(len(token_TD), device=device) + num_prefix * (sequence_T + 1)
    first_B = info.offsets[:-1] + num_prefix * torch.arange(num_sequences, device=device)
    index_BP = first_B[:, None] + torch.arange(num_prefix, device=device)

    def interleave(of_prefix: torch.Tensor, of_tokens: torch.Tensor) -> torch.Tensor:
        out = of_tokens.new_empty(len(token_TD) + num_sequences * num_prefix, *of_tokens.shape[1:])
        out = out.index_copy(0, index_BP.reshape(-1), of_prefix.reshape(-1, *of_tokens.shape[1:]).to(out.dtype))
        return out.index_copy(0, index_T, of_tokens)

    def repeat_first(of_tokens: torch.Tensor) -> torch.Tensor:
        """Return the (B, P) values of the first token of each sequence, repeated for its prefix tokens."""
        return of_tokens[info.offsets[:-1].clamp(max=len(token_TD) - 1), None].expand(-1, num_prefix)

    number_P = torch.arange(num_prefix, device=device)
    extended = replace(
        info,
        offsets=info.offsets + num_prefix * torch.arange(num_sequences + 1, device=device),
        max_length=info.max_length + num_prefix,
        position_T=interleave(number_P.expand(num_sequences, -1), info.position_T + num_prefix),
        token_key_T=interleave(repeat_first(info.token_key_T) + (number_P + 1) * _STEP, info.token_key_T),
        time_T=None if info.time_T is None else interleave(repeat_first(info.time_T), info.time_T),
        query_time_T=None if info.time_T is None or info.query_time_T is None
        else interleave(repeat_first(info.time_T), info.query_time_T),
        cut_B=None if info.cut_B is None else info.cut_B + num_prefix,
    )  # fmt: skip
    return _states(encoder, interleave(prefix_BPD, token_TD), extended).index_select(0, index_T)


def _states(encoder: nn.Module, token_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
    """Run an encoder and check the shape of its result: the error of a faulty plugin would otherwise surface later."""
    states_TD = encoder(token_TD, info)
    if not isinstance(states_TD, torch.Tensor) or states_TD.shape != token_TD.shape:
        shape = tuple(states_TD.shape) if isinstance(states_TD, torch.Tensor) else type(states_TD).__name__
        remedy = f"return a tensor of shape {tuple(token_TD.shape)}, one state per token, from forward(tokens, info)"
        raise UserError(
            f"its forward method returned {shape}", option="encoder", value=type(encoder).__name__, remedy=remedy
        )
    return states_TD


class _ResidualConfig(Protocol):
    @property
    def dim(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def max_length(self) -> int: ...
    @property
    def normalizer_margin(self) -> int: ...
    @property
    def attention(self) -> AttentionSpanConfig: ...


TimeEncoding = Literal["buckets", "functional"]


def time_parameters(encoding: TimeEncoding, num_buckets: int) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """Return the parameters of a time encoding: (table of buckets, None) or (None, scalars of the function)."""
    if encoding == "functional":
        return None, initial_time_function()
    return nn.Parameter(torch.empty(num_buckets + 1).normal_(std=0.02)), None


def with_targets(rules: AttentionMask, info: SequenceInfo) -> AttentionMask:
    """Return the attention mask of a layer for sequences that may end with candidates."""
    return rules if info.num_targets_B is None else replace(rules, num_targets_B=info.num_targets_B)


class _Layer(Protocol):
    def bias(self, info: SequenceInfo) -> RelativeBias: ...


class ResidualEncoder(nn.Module):
    """Encoder that adds position embeddings and applies residual layers; maps (T, D) inputs to (T, D) states.

    `layers` is an iterator, so that the position embeddings draw their initial values before the layers do.
    """

    def __init__(self, cfg: _ResidualConfig, layers: Iterable[nn.Module]):
        super().__init__()
        self._factor = cfg.dim**0.5
        self._dropout = cfg.dropout
        self._attention = cfg.attention
        self.position = nn.Parameter(torch.empty(cfg.max_length + cfg.normalizer_margin, cfg.dim))
        nn.init.xavier_normal_(self.position)
        self.layers = nn.ModuleList(layers)

    def forward(self, x_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        drop = Dropout(info.token_key_T, 0, self._dropout if self.training else 0.0)
        if info.context is None:
            x_TD = token_input(x_TD, self.position, info.position_T, info.offsets, factor=self._factor, drop=drop)
        else:  # the fused kernel does not support partial sequences
            x_TD = token_input_reference(x_TD, self.position, info.position_T, factor=self._factor, drop=drop)
        first = next((n for n in range(len(self.layers)) if self._attention.truncates(n)), len(self.layers))
        x_TD = self._run_layers(self.layers[:first], x_TD, info)
        if first == len(self.layers):
            return x_TD
        remaining, info = truncate_sequences(self._attention, info)
        return x_TD.index_copy(
            0, remaining, self._run_layers(self.layers[first:], x_TD.index_select(0, remaining), info)
        )

    @staticmethod
    def _run_layers(layers: nn.ModuleList, x_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        if len(layers) > 0 and info.context is None:
            # Computed once here, because every layer would otherwise compute the same time buckets.
            bias = cast(_Layer, layers[0]).bias(info)
            info = replace(info, buckets=batch_buckets(x_TD, info.offsets, info.max_length, bias))
        delta_TD: torch.Tensor | None = None
        for layer in layers:
            x_TD, delta_TD = layer(x_TD, delta_TD, info)
        return x_TD if delta_TD is None else x_TD + delta_TD
