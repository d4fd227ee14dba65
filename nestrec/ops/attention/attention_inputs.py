"""Inputs of HSTU attention shared by all kernels, and their conversion to flat arguments of a PyTorch operator."""

from typing import Any, NamedTuple

import torch

from nestrec.ops.attention.mask_and_bias import AttentionMask, RelativeBias, bucket_edges

LARGEST_HEAD = 256
"""Largest head dimension that the kernels support."""


class Gradients(NamedTuple):
    """Gradients returned by a backward pass; None for a bias that is absent."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    position_table: torch.Tensor | None
    time_table: torch.Tensor | None
    time_function: torch.Tensor | None = None


class AttentionOptions(NamedTuple):
    """Bias and mask as flat arguments of a PyTorch operator, in the order of its schema."""

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
"""Operator schema of the fields of `AttentionOptions`."""


def attention_options(bias: RelativeBias, rules: AttentionMask) -> AttentionOptions:
    """Return the fields of the bias and the mask as flat operator arguments."""
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
    """All inputs of HSTU attention except queries, keys and values."""

    offsets: torch.Tensor
    max_length: int
    """Upper bound on the sequence lengths of the batch, known on the host without a device synchronization."""
    normalizer: float
    bias: RelativeBias
    rules: AttentionMask

    @property
    def is_square(self) -> bool:
        """True if some tokens attend to later tokens, so that the mask is not causal."""
        return self.rules.is_square

    def scalars(self, x_THD: torch.Tensor) -> tuple[Any, ...]:
        """Return the head count, the scale and the mask in the argument order of the kernels.

        The last two values are the attention window in tokens and the number of leading tokens that see later ones.
        """
        rules = self.rules
        tokens, heads, _ = x_THD.shape
        return (
            heads,
            1.0 / self.normalizer,
            rules.num_targets_B,
            rules.num_context,
            rules.max_attention_length or tokens + 1,
            rules.num_context if rules.looks_ahead else 0,
        )

    @property
    def biases(self) -> tuple[Any, ...]:
        """Bias tables and event times in the argument order of kernels that compute the bucket of a pair themselves."""
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
