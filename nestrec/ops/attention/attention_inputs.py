"""Inputs of HSTU attention over one batch that all kernels share, and their options as flat operator arguments."""

from typing import Any, NamedTuple

import torch

from nestrec.ops.attention.mask_and_bias import AttentionMask, RelativeBias, bucket_edges

LARGEST_HEAD = 256
"""columns of a head that kernels take"""


class Gradients(NamedTuple):
    """What a backward pass finds; what is absent of the biases has none."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    position_table: torch.Tensor | None
    time_table: torch.Tensor | None
    time_function: torch.Tensor | None = None


class AttentionOptions(NamedTuple):
    """Biases and rules as the flat arguments of an operator of torch, in the order of its schema."""

    position_table: torch.Tensor | None
    time_table: torch.Tensor | None
    time_function: torch.Tensor | None
    time_T: torch.Tensor | None
    query_time_T: torch.Tensor | None
    buckets: torch.Tensor | None
    num_targets_B: torch.Tensor | None
    num_context: int
    max_attention_length: int | None
    looks_ahead: bool

    @property
    def bias(self) -> RelativeBias:
        return RelativeBias(
            position_table=self.position_table,
            time_table=self.time_table,
            time_function=self.time_function,
            time_T=self.time_T,
            query_time_T=self.query_time_T,
            buckets=self.buckets,
        )

    @property
    def rules(self) -> AttentionMask:
        return AttentionMask(
            num_targets_B=self.num_targets_B,
            num_context=self.num_context,
            max_attention_length=self.max_attention_length,
            looks_ahead=self.looks_ahead,
        )


OPTIONS_SCHEMA = (
    "Tensor? position_table, Tensor? time_table, Tensor? time_function, Tensor? time_T, Tensor? query_time_T, "
    "Tensor? buckets, Tensor? num_targets_B, SymInt num_context, SymInt? max_attention_length, bool looks_ahead"
)
"""Arguments of `AttentionOptions` in the schema of an operator."""


def attention_options(bias: RelativeBias, rules: AttentionMask) -> AttentionOptions:
    """Returns the fields of biases and rules as flat arguments."""
    return AttentionOptions(
        position_table=bias.position_table,
        time_table=bias.time_table,
        time_function=bias.time_function,
        time_T=bias.time_T,
        query_time_T=bias.query_time_T,
        buckets=bias.buckets,
        num_targets_B=rules.num_targets_B,
        num_context=rules.num_context,
        max_attention_length=rules.max_attention_length,
        looks_ahead=rules.looks_ahead,
    )


class AttentionInputs(NamedTuple):
    """Everything but queries, keys and values."""

    offsets: torch.Tensor
    max_length: int
    """the longest sequence of the batch or more, known on the host"""
    normaliser: float
    bias: RelativeBias
    rules: AttentionMask

    @property
    def is_square(self) -> bool:
        """Whether tokens look at later ones too."""
        return self.rules.is_square

    def scalars(self, x_THD: torch.Tensor) -> tuple[Any, ...]:
        """Heads, scale and rules, as kernels take them.

        The last two: tokens that one may look back, and first tokens of a sequence that look ahead.
        """
        rules = self.rules
        tokens, heads, _ = x_THD.shape
        return (
            heads,
            1.0 / self.normaliser,
            rules.num_targets_B,
            rules.num_context,
            rules.max_attention_length or tokens + 1,
            rules.num_context if rules.looks_ahead else 0,
        )

    @property
    def biases(self) -> tuple[Any, ...]:
        """Both tables and the times, as kernels take them that find the bucket of a pair themselves."""
        bias = self.bias
        position = bias.position_table
        time = bias.time_table
        return (
            position,
            0 if position is None else (position.numel() - 1) // 2,
            time,
            None if time is None else bucket_edges(time.numel() - 1, time.device),
            0 if time is None else time.numel() - 1,
            bias.query_time_T,
            bias.time_T,
        )
