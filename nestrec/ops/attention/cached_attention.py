"""HSTU attention of new tokens over the KV cache of a prefix, with contiguous cached keys and values.

    history  out[i] = sum_{j <= i} w[i, j] v[j]                             j over prefix and history
    candidate out[c] = sum_{j in prefix, history} w[c, j] v[j] + w[c, c] v[c]      candidates do not see each other
    w[i, j]         = SiLU(q[i] . k[j] + bias[i, j]) / normalizer

A sliding window with a contextual prefix (mask_and_bias.py) restricts the keys. No token looks ahead, so cached keys
and values stay valid when a sequence grows. `cached_attention_reference` is the reference implementation, with one
mask over all tokens. `cached_attention` iterates over blocks of query rows, skips the keys that a block cannot see, and
never computes scores between candidates. The version for a paged KV cache is in attention/paged.

Legend: H heads, D head dimension, P prefix tokens, S new history tokens, C candidates, N = S + C new tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import silu

from nestrec.ops.attention.mask_and_bias import PLAIN, AttentionMask, attention_mask

BLOCK_ROWS = 256

BiasRows = Callable[[int, int, slice], torch.Tensor]
"""Function that returns the bias of new history tokens first to end (exclusive) and a slice of keys, shared by the
heads: (first, end, keys) -> (end - first, number of keys)."""


def cached_attention_reference(
    q_HND: torch.Tensor,
    k_HND: torch.Tensor,
    v_HND: torch.Tensor,
    prefix_HPD: tuple[torch.Tensor, torch.Tensor],
    *,
    num_candidates: int,
    normalizer: float,
    bias_NK: torch.Tensor | None = None,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """Reference implementation of `cached_attention`.

    Args:
        q_HND: Queries of the new tokens, history before candidates, (H, N, D).
        k_HND: Keys of the new tokens, (H, N, D).
        v_HND: Values of the new tokens, (H, N, D).
        prefix_HPD: Cached keys and cached values, each (H, P, D).
        num_candidates: Number of candidates C at the end of the new tokens.
        normalizer: Constant that divides the sums.
        bias_NK: Bias of new tokens against prefix and new tokens, (N, P + N).
        rules: Attention mask.
    """
    keys, values = (torch.cat(pair, dim=1) for pair in zip(prefix_HPD, (k_HND, v_HND), strict=True))
    num_prefix = prefix_HPD[0].shape[1]
    offsets = torch.tensor([0, keys.shape[1]], device=q_HND.device)
    rules = replace(rules, num_targets_B=torch.tensor([num_candidates], device=q_HND.device))
    mask_NK = attention_mask(offsets, keys.shape[1], rules)[0, num_prefix:]
    scores_HNK = q_HND @ keys.transpose(1, 2)
    if bias_NK is not None:
        scores_HNK = scores_HNK + bias_NK
    return (silu(scores_HNK) * mask_NK / normalizer) @ values


def cached_attention(
    q_HND: torch.Tensor,
    k_HND: torch.Tensor,
    v_HND: torch.Tensor,
    prefix_HPD: tuple[torch.Tensor, torch.Tensor],
    *,
    num_candidates: int,
    normalizer: float,
    history_bias: BiasRows | None = None,
    candidate_bias_K: torch.Tensor | None = None,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """Compute HSTU attention of new tokens against cached keys and values and each other.

    Args:
        q_HND: Queries of the new tokens, history before candidates, (H, N, D).
        k_HND: Keys of the new tokens, (H, N, D).
        v_HND: Values of the new tokens, (H, N, D).
        prefix_HPD: Cached keys and cached values, each (H, P, D).
        num_candidates: Number of candidates C at the end of the new tokens.
        normalizer: Constant that divides the sums.
        history_bias: Function that returns the bias of rows of the new history.
        candidate_bias_K: Bias of every candidate, (P + S + 1,). It is the same for all, because candidates share
            position and time. The last value is the bias of a candidate with itself.
        rules: Attention mask; it must not look ahead.

    Returns:
        Attention output of the new tokens, (H, N, D).
    """
    keys = _history(prefix_HPD[0], k_HND, num_candidates)

    def weigh(rows: slice, spans: Sequence[slice], bias_RK: torch.Tensor | None) -> torch.Tensor:
        return _weights(q_HND[:, rows], _select_spans(keys, spans), bias_RK)

    def weigh_own(rows: slice) -> torch.Tensor:
        own_HC = (q_HND[:, rows] * k_HND[:, rows]).sum(2)
        return silu(own_HC if candidate_bias_K is None else own_HC + candidate_bias_K[-1])

    weigher = _Weigher(weigh, weigh_own, history_bias, candidate_bias_K)
    return _weighted_sum(v_HND, prefix_HPD[1], num_candidates, weigher, rules).div_(normalizer)


def cached_channel(
    v_HND: torch.Tensor,
    prefix_HPD: torch.Tensor,
    *,
    num_candidates: int,
    history_weights: BiasRows,
    candidate_weights_K: torch.Tensor,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """Compute sums of values weighted by distance or time alone (the positional and temporal channels of FuXi).

    Args:
        v_HND: Values of the new tokens, history before candidates, (H, N, D).
        prefix_HPD: Cached values, (H, P, D).
        num_candidates: Number of candidates C at the end of the new tokens.
        history_weights: Function that returns the weights of rows of the new history.
        candidate_weights_K: Weights of every candidate, (P + S + 1,); the last one is a candidate with itself.
        rules: Attention mask; it must not look ahead.

    Returns:
        Weighted sums of the new tokens, (H, N, D).
    """

    def weigh(rows: slice, spans: Sequence[slice], bias_RK: torch.Tensor | None) -> torch.Tensor:
        assert bias_RK is not None
        return bias_RK[None].clone()

    def weigh_own(rows: slice) -> torch.Tensor:
        return candidate_weights_K[-1:, None]

    weigher = _Weigher(weigh, weigh_own, history_weights, candidate_weights_K)
    return _weighted_sum(v_HND, prefix_HPD, num_candidates, weigher, rules)


def cached_softmax_attention(
    q_HND: torch.Tensor,
    k_HND: torch.Tensor,
    v_HND: torch.Tensor,
    prefix_HPD: tuple[torch.Tensor, torch.Tensor],
    *,
    num_candidates: int,
) -> torch.Tensor:
    """Compute causal softmax attention (SASRec) over cached and new tokens, (H, N, D).

    Candidates attend to the history and to themselves.
    """
    num_new = q_HND.shape[1]
    num_prefix = prefix_HPD[0].shape[1]
    num_history = num_new - num_candidates
    scale = q_HND.shape[2] ** -0.5
    keys, values = (_history(old, new, num_candidates) for old, new in zip(prefix_HPD, (k_HND, v_HND), strict=True))
    out_HND = torch.empty_like(v_HND, memory_format=torch.contiguous_format)
    for first in range(0, num_history, BLOCK_ROWS):
        rows = slice(first, min(first + BLOCK_ROWS, num_history))
        visible = slice(0, num_prefix + rows.stop)
        scores = scale * (q_HND[:, rows] @ keys[:, visible].transpose(1, 2))
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(num_prefix + first + 1)
        out_HND[:, rows] = scores.masked_fill_(ahead, -torch.inf).softmax(2) @ values[:, visible]
    for first in range(num_history, num_new, BLOCK_ROWS):
        rows = slice(first, min(first + BLOCK_ROWS, num_new))
        own = (q_HND[:, rows] * k_HND[:, rows]).sum(2, keepdim=True)
        weights = (scale * torch.cat([q_HND[:, rows] @ keys.transpose(1, 2), own], dim=2)).softmax(2)
        out_HND[:, rows] = weights[:, :, :-1] @ values + weights[:, :, -1:] * v_HND[:, rows]
    return out_HND


class _Weigher(NamedTuple):
    """Functions and biases that produce the attention weights of new tokens."""

    weigh: Callable[[slice, Sequence[slice], torch.Tensor | None], torch.Tensor]
    """Returns the weights of (rows, spans of visible keys, bias) as a new (H or 1, rows, keys) tensor that the caller
    modifies in place."""
    weigh_own: Callable[[slice], torch.Tensor]
    """Returns the weights of candidates with themselves, (H or 1, rows)."""
    history_bias: BiasRows | None
    candidate_bias_K: torch.Tensor | None


def _weighted_sum(
    v_HND: torch.Tensor, prefix_HPD: torch.Tensor, num_candidates: int, weigher: _Weigher, rules: AttentionMask
) -> torch.Tensor:
    """Compute the weighted sums of values in blocks of rows, (H, N, D)."""
    assert not rules.is_square, "a prefix that looks ahead changes with what comes after it"
    num_new = v_HND.shape[1]
    num_prefix = prefix_HPD.shape[1]
    num_history = num_new - num_candidates
    values = _history(prefix_HPD, v_HND, num_candidates)
    out_HND = torch.empty_like(v_HND, memory_format=torch.contiguous_format)
    for first in range(0, num_history, BLOCK_ROWS):
        end = min(first + BLOCK_ROWS, num_history)
        spans = visible_spans(num_prefix + first, num_prefix + end, rules)
        history_bias = weigher.history_bias
        bias = None if history_bias is None else _concatenate([history_bias(first, end, span) for span in spans])
        weights = weigher.weigh(slice(first, end), spans, bias)
        weights[:, :, first - end :].tril_()
        if rules.max_attention_length is not None:
            _hide_far(weights, num_prefix + first, spans, rules)
        out_HND[:, first:end] = weights @ _select_spans(values, spans)
    spans = visible_spans(num_prefix + num_history, num_prefix + num_history, rules)
    values, shared = _select_spans(values, spans), weigher.candidate_bias_K
    row_bias = None if shared is None else _select_spans(shared[None, :-1], spans)
    for first in range(num_history, num_new, BLOCK_ROWS):
        rows = slice(first, min(first + BLOCK_ROWS, num_new))
        out_HND[:, rows] = weigher.weigh(rows, spans, row_bias) @ values
        out_HND[:, rows] += weigher.weigh_own(rows)[:, :, None] * v_HND[:, rows]
    return out_HND


def _history(old_HPD: torch.Tensor, new_HND: torch.Tensor, num_candidates: int) -> torch.Tensor:
    """Concatenate prefix and new history, (H, P + S, D); no copy if one of them is empty."""
    num_history = new_HND.shape[1] - num_candidates
    if num_history == 0:
        return old_HPD
    new = new_HND[:, :num_history]
    return new if old_HPD.shape[1] == 0 else torch.cat([old_HPD, new], 1)


def _weights(q_HRD: torch.Tensor, keys_HKD: torch.Tensor, bias_RK: torch.Tensor | None) -> torch.Tensor:
    transposed = keys_HKD.transpose(1, 2)
    scores = torch.bmm(q_HRD, transposed) if bias_RK is None else torch.baddbmm(bias_RK[None], q_HRD, transposed)
    return silu(scores, inplace=True)


def visible_spans(first_row: int, end: int, rules: AttentionMask) -> list[slice]:
    """Return the keys before `end` visible to any query from `first_row` on: contextual prefix and window."""
    window = rules.max_attention_length
    low = 0 if window is None else max(0, first_row - window + 1)
    context = min(rules.num_context, low)
    return [slice(0, context), slice(low, end)] if context else [slice(low, end)]


def _hide_far(weights_HRK: torch.Tensor, first_row: int, spans: Sequence[slice], rules: AttentionMask) -> None:
    """Zero the weights of keys outside the window of their row, for a block that starts at position `first_row`."""
    assert rules.max_attention_length is not None
    near = spans[-1]
    i = torch.arange(first_row, first_row + weights_HRK.shape[1], device=weights_HRK.device)[:, None]
    j = torch.arange(near.start, near.stop, device=weights_HRK.device)[None]
    is_far = (i - j >= rules.max_attention_length) & (j >= rules.num_context)
    weights_HRK[:, :, -is_far.shape[1] :].masked_fill_(is_far, 0.0)


def _select_spans(x: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
    """Select spans of the second dimension; a single span is a view."""
    return _concatenate([x[:, span] for span in spans])


def _concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
