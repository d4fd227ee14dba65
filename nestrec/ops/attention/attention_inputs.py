"""What the launches of HSTU attention over one batch share, whichever kernel they launch."""

from typing import Any, NamedTuple

import torch

from nestrec.ops.attention.mask_and_bias import AttentionRules, RelativeBias, bucket_edges

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


class AttentionInputs(NamedTuple):
    """Everything but queries, keys and values."""

    offsets: torch.Tensor
    max_length: int
    """the longest sequence of the batch or more, known on the host"""
    normaliser: float
    bias: RelativeBias
    rules: AttentionRules

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
        position, time = bias.position_table, bias.time_table
        return (
            position,
            0 if position is None else (position.numel() - 1) // 2,
            time,
            None if time is None else bucket_edges(time.numel() - 1, time.device),
            0 if time is None else time.numel() - 1,
            bias.query_time_T,
            bias.time_T,
        )
