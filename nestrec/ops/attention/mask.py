"""Who sees whom in HSTU attention, as one dense mask: the definition that every kernel is tested against.

    h               = length - targets           tokens of the history
    place(i)        = min(i, h)                   all targets stand where the next event would
    i sees j     if   i == j
                 or   j < h and j < place(i) and (place(i) - j < max_attention_length or j < context)
                 or   i < context and j < h and looks_ahead

A target sees the history and itself, never another target. The contextual prefix is seen by everybody, however short
the maximum attention length is, and sees the whole history: right for what is known of a user beforehand. The first
events of a history may not look ahead, or states would know what they predict: semi-local attention (ULTRA-HSTU,
2602.16986) is a window and a prefix that does not.

Legend: B sequences, N padded length.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRules:
    """What is seen besides plain causality."""

    num_targets_B: torch.Tensor | None = None
    """int32 or int64; so many last tokens of each sequence are candidates"""
    num_context: int = 0
    """first tokens of every sequence that are its contextual prefix"""
    max_attention_length: int | None = None
    """keys that a query sees at most, itself included and the prefix apart; None for all"""
    looks_ahead: bool = True
    """whether the contextual prefix sees what comes after it"""

    def __post_init__(self) -> None:
        if self.num_context < 0:
            raise UserError("a count of tokens is at least 0", field="num_context", value=self.num_context)
        if self.max_attention_length is not None and self.max_attention_length < 1:
            raise UserError(
                "a query sees at least itself",
                field="max_attention_length",
                value=self.max_attention_length,
                remedy="give at least 1, or None for no limit",
            )

    @property
    def is_plain(self) -> bool:
        """Whether this is causality alone."""
        return self.num_targets_B is None and self.num_context == 0 and self.max_attention_length is None

    @property
    def is_square(self) -> bool:
        """Whether some tokens see later ones."""
        return self.num_context > 0 and self.looks_ahead


PLAIN = AttentionRules()


def semi_local(window: int | None, prefix: int = 0) -> AttentionRules:
    """Causal attention to the last `window` tokens, itself included, and to the first `prefix` ones."""
    return AttentionRules(max_attention_length=window, num_context=prefix if window else 0, looks_ahead=False)


def causal_pairs(lengths: NDArray[np.int64], window: int | None = None, prefix: int = 0) -> float:
    """Pairs of `semi_local` attention, each of a token and one that it sees, in sequences of these lengths."""
    if window is None:
        return float((lengths * (lengths + 1)).sum()) / 2
    return _sum_of_least(lengths, window) + _sum_of_least(np.maximum(lengths - window, 0), prefix)


def _sum_of_least(counts: NDArray[np.int64], most: int) -> float:
    """Of min(1, most) + min(2, most) + ... up to each count."""
    rising = np.minimum(counts, most)
    return float((rising * (rising + 1) / 2 + (counts - rising) * most).sum())


def history_lengths(offsets: torch.Tensor, rules: AttentionRules) -> torch.Tensor:
    """(B,) int64 tokens before the targets."""
    lengths_B = offsets.diff()
    return lengths_B if rules.num_targets_B is None else (lengths_B - rules.num_targets_B).clamp(min=0)


def places(offsets: torch.Tensor, max_length: int, rules: AttentionRules) -> torch.Tensor:
    """(B, N) int64 places in the sequence; targets share the first one after the history."""
    token_N = torch.arange(max_length, device=offsets.device)
    return torch.minimum(token_N[None], history_lengths(offsets, rules)[:, None])


def seen_mask(offsets: torch.Tensor, max_length: int, rules: AttentionRules) -> torch.Tensor:
    """(B, N, N) bool: query i (dim 1) sees key j (dim 2). Rows behind the end of a sequence mean nothing."""
    token_N = torch.arange(max_length, device=offsets.device)
    history_B11 = history_lengths(offsets, rules)[:, None, None]
    place_BN1 = places(offsets, max_length, rules)[:, :, None]
    i, j = token_N[None, :, None], token_N[None, None, :]
    is_near = torch.ones_like(place_BN1 - j, dtype=torch.bool)
    if rules.max_attention_length is not None:
        is_near = (place_BN1 - j < rules.max_attention_length) | (j < rules.num_context)
    by_history = (j < history_B11) & (((j < place_BN1) & is_near) | (rules.looks_ahead & (i < rules.num_context)))
    return by_history | (i == j)


def seen_weights(weights: torch.Tensor, offsets: torch.Tensor, rules: AttentionRules) -> torch.Tensor:
    """Weights, zero where a query does not look. (H, N, N) of one sequence, (B or 1, N, N) or (B, H, N, N)."""
    if rules.is_plain:
        return weights.tril()
    seen_BNN = seen_mask(offsets, weights.shape[-1], rules)
    return torch.where(seen_BNN if weights.dim() == 3 else seen_BNN[:, None], weights, 0.0)


def rules_of_sequences(rules: AttentionRules, chosen: slice | torch.Tensor) -> AttentionRules:
    """Of some sequences of a batch."""
    return rules if rules.num_targets_B is None else replace(rules, num_targets_B=rules.num_targets_B[chosen])
