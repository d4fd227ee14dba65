"""HSTU attention of new tokens against the stored keys and values of a prefix.

    history  out[i] = sum_{j <= i} w[i, j] v[j]                             j over prefix and history
    candidate out[c] = sum_{j in prefix, history} w[c, j] v[j] + w[c, c] v[c]      candidates do not see each other
    w[i, j]         = SiLU(q[i] . k[j] + bias[i, j]) / normaliser

With a window and a prefix (mask.py) fewer are seen: none of them looks ahead, so what is kept stays valid.
`cached_attention_reference` is the definition, with one mask over everything. `cached_attention` walks over blocks of
query rows, leaves out the keys that a block cannot see, and never forms the candidates' square.

Legend: H heads, D head dimension, P prefix tokens, S new history tokens, C candidates, N = S + C new tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import silu

from nestrec.ops.attention.mask_and_bias import PLAIN, AttentionMask, seen_mask

BLOCK_ROWS = 256

BiasRows = Callable[[int, int, slice], torch.Tensor]
"""(first, end) new history tokens and some keys to (end - first, keys) bias, shared by the heads."""


def cached_attention_reference(
    q_HND: torch.Tensor,
    k_HND: torch.Tensor,
    v_HND: torch.Tensor,
    prefix_HPD: tuple[torch.Tensor, torch.Tensor],
    *,
    num_candidates: int,
    normaliser: float,
    bias_NK: torch.Tensor | None = None,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """The definition. bias_NK: (N, P + N), of new tokens against prefix and new tokens."""
    keys, values = (torch.cat(pair, dim=1) for pair in zip(prefix_HPD, (k_HND, v_HND), strict=True))
    num_prefix = prefix_HPD[0].shape[1]
    offsets = torch.tensor([0, keys.shape[1]], device=q_HND.device)
    rules = replace(rules, num_targets_B=torch.tensor([num_candidates], device=q_HND.device))
    seen_NK = seen_mask(offsets, keys.shape[1], rules)[0, num_prefix:]
    scores_HNK = q_HND @ keys.transpose(1, 2)
    if bias_NK is not None:
        scores_HNK = scores_HNK + bias_NK
    return (silu(scores_HNK) * seen_NK / normaliser) @ values


def cached_attention(
    q_HND: torch.Tensor,
    k_HND: torch.Tensor,
    v_HND: torch.Tensor,
    prefix_HPD: tuple[torch.Tensor, torch.Tensor],
    *,
    num_candidates: int,
    normaliser: float,
    history_bias: BiasRows | None = None,
    candidate_bias_K: torch.Tensor | None = None,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """(H, N, D). candidate_bias_K: (P + S + 1,), one for all candidates, since they share position and time; the last
    value is that of a candidate with itself."""
    keys = _history(prefix_HPD[0], k_HND, num_candidates)

    def weigh(rows: slice, spans: Sequence[slice], bias_RK: torch.Tensor | None) -> torch.Tensor:
        return _weights(q_HND[:, rows], _taken(keys, spans), bias_RK)

    def weigh_own(rows: slice) -> torch.Tensor:
        own_HC = (q_HND[:, rows] * k_HND[:, rows]).sum(2)
        return silu(own_HC if candidate_bias_K is None else own_HC + candidate_bias_K[-1])

    weigher = _Weigher(weigh, weigh_own, history_bias, candidate_bias_K)
    return _weighted_sum(v_HND, prefix_HPD[1], num_candidates, weigher, rules).div_(normaliser)


def cached_channel(
    v_HND: torch.Tensor,
    prefix_HPD: torch.Tensor,
    *,
    num_candidates: int,
    history_weights: BiasRows,
    candidate_weights_K: torch.Tensor,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """(H, N, D) sums of values whose weights are those of distance or time alone (FuXi's further channels)."""

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
    """(H, N, D) causal attention of SASRec (softmax.py); candidates see the history and themselves."""
    num_new = q_HND.shape[1]
    num_prefix = prefix_HPD[0].shape[1]
    num_history = num_new - num_candidates
    scale = q_HND.shape[2] ** -0.5
    keys, values = (_history(old, new, num_candidates) for old, new in zip(prefix_HPD, (k_HND, v_HND), strict=True))
    out_HND = torch.empty_like(v_HND, memory_format=torch.contiguous_format)
    for first in range(0, num_history, BLOCK_ROWS):
        rows = slice(first, min(first + BLOCK_ROWS, num_history))
        seen = slice(0, num_prefix + rows.stop)
        scores = scale * (q_HND[:, rows] @ keys[:, seen].transpose(1, 2))
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(num_prefix + first + 1)
        out_HND[:, rows] = scores.masked_fill_(ahead, -torch.inf).softmax(2) @ values[:, seen]
    for first in range(num_history, num_new, BLOCK_ROWS):
        rows = slice(first, min(first + BLOCK_ROWS, num_new))
        own = (q_HND[:, rows] * k_HND[:, rows]).sum(2, keepdim=True)
        weights = (scale * torch.cat([q_HND[:, rows] @ keys.transpose(1, 2), own], dim=2)).softmax(2)
        out_HND[:, rows] = weights[:, :, :-1] @ values + weights[:, :, -1:] * v_HND[:, rows]
    return out_HND


class _Weigher(NamedTuple):
    """Weights of new tokens."""

    weigh: Callable[[slice, Sequence[slice], torch.Tensor | None], torch.Tensor]
    """(rows, keys that they may see, their bias) to (H or 1, rows, keys), to be changed by who asks"""
    weigh_own: Callable[[slice], torch.Tensor]
    """of candidates with themselves, (H or 1, rows)"""
    history_bias: BiasRows | None
    candidate_bias_K: torch.Tensor | None


def _weighted_sum(
    v_HND: torch.Tensor, prefix_HPD: torch.Tensor, num_candidates: int, weigher: _Weigher, rules: AttentionMask
) -> torch.Tensor:
    """(H, N, D), block by block of rows."""
    assert not rules.is_square, "a prefix that looks ahead changes with what comes after it"
    num_new = v_HND.shape[1]
    num_prefix = prefix_HPD.shape[1]
    num_history = num_new - num_candidates
    values = _history(prefix_HPD, v_HND, num_candidates)
    out_HND = torch.empty_like(v_HND, memory_format=torch.contiguous_format)
    for first in range(0, num_history, BLOCK_ROWS):
        end = min(first + BLOCK_ROWS, num_history)
        spans = seen_spans(num_prefix + first, num_prefix + end, rules)
        of_rows = weigher.history_bias
        bias = None if of_rows is None else _joined([of_rows(first, end, span) for span in spans])
        weights = weigher.weigh(slice(first, end), spans, bias)
        weights[:, :, first - end :].tril_()
        if rules.max_attention_length is not None:
            _hide_far(weights, num_prefix + first, spans, rules)
        out_HND[:, first:end] = weights @ _taken(values, spans)
    spans = seen_spans(num_prefix + num_history, num_prefix + num_history, rules)
    values, shared = _taken(values, spans), weigher.candidate_bias_K
    row_bias = None if shared is None else _taken(shared[None, :-1], spans)
    for first in range(num_history, num_new, BLOCK_ROWS):
        rows = slice(first, min(first + BLOCK_ROWS, num_new))
        out_HND[:, rows] = weigher.weigh(rows, spans, row_bias) @ values
        out_HND[:, rows] += weigher.weigh_own(rows)[:, :, None] * v_HND[:, rows]
    return out_HND


def _history(old_HPD: torch.Tensor, new_HND: torch.Tensor, num_candidates: int) -> torch.Tensor:
    """(H, P + S, D) of prefix and new history; no copy where one of them is empty."""
    num_history = new_HND.shape[1] - num_candidates
    if num_history == 0:
        return old_HPD
    new = new_HND[:, :num_history]
    return new if old_HPD.shape[1] == 0 else torch.cat([old_HPD, new], 1)


def _weights(q_HRD: torch.Tensor, keys_HKD: torch.Tensor, bias_RK: torch.Tensor | None) -> torch.Tensor:
    transposed = keys_HKD.transpose(1, 2)
    scores = torch.bmm(q_HRD, transposed) if bias_RK is None else torch.baddbmm(bias_RK[None], q_HRD, transposed)
    return silu(scores, inplace=True)


def seen_spans(place: int, end: int, rules: AttentionMask) -> list[slice]:
    """Keys before `end` that some query from `place` on may see: a part of the prefix, and what no window has left."""
    window = rules.max_attention_length
    low = 0 if window is None else max(0, place - window + 1)
    context = min(rules.num_context, low)
    return [slice(0, context), slice(low, end)] if context else [slice(low, end)]


def _hide_far(weights_HRK: torch.Tensor, place: int, spans: Sequence[slice], rules: AttentionMask) -> None:
    """Zeros where a key has left the window of a later row of a block that begins at `place`."""
    assert rules.max_attention_length is not None
    near = spans[-1]
    i = torch.arange(place, place + weights_HRK.shape[1], device=weights_HRK.device)[:, None]
    j = torch.arange(near.start, near.stop, device=weights_HRK.device)[None]
    is_far = (i - j >= rules.max_attention_length) & (j >= rules.num_context)
    weights_HRK[:, :, -is_far.shape[1] :].masked_fill_(is_far, 0.0)


def _taken(x: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
    """Of the second dimension; no copy where it is one span."""
    return _joined([x[:, span] for span in spans])


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
