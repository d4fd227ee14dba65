"""HSTU for serving: a layer over new tokens and the stored keys and values of their prefixes (residual_cached.py).

Legend: T new tokens of all sequences, D model width, H heads, P prefix tokens, S new history tokens, K = P + S.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import layer_norm, silu

from nestrec.models.cached.residual_cached import SegmentTimes, position_biases, residual_forward, time_biases
from nestrec.models.hstu import HSTU, NORM_EPS, HSTULayer
from nestrec.models.sequence import CachedForward, KeysAndValues, PrefixReader, Segment
from nestrec.ops.attention.cached_attention import BiasRows, cached_attention


def cached_forward(
    model: HSTU, x_TD: torch.Tensor, segments: Sequence[Segment], prefix: PrefixReader
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    """(T, D) states of the new tokens, and for each layer their keys and values, each (T, H, D)."""
    return residual_forward(model, x_TD, segments, prefix, layer_pass=_layer, reads_times=model.cfg.time_bias)


def _layer(
    layer: HSTULayer,
    x_TD: torch.Tensor,
    segments: Sequence[Segment],
    times: Sequence[SegmentTimes | None],
    prefix: Callable[[int], KeysAndValues],
) -> tuple[torch.Tensor, KeysAndValues]:
    cfg = layer.cfg
    normed = layer_norm(x_TD, x_TD.shape[1:], eps=NORM_EPS)
    u, v, q, k = silu(normed @ layer.uvqk).chunk(4, dim=1)
    q_THD, k_THD, v_THD = (t.reshape(-1, cfg.num_heads, cfg.head_dim) for t in (q, k, v))
    attended_THD = torch.empty_like(v_THD, memory_format=torch.contiguous_format)
    first = 0
    for b, segment in enumerate(segments):
        rows = slice(first, first + segment.num_tokens)
        history_bias, candidate_bias = _biases(layer, segment, times[b], x_TD.dtype)
        q_HND, k_HND, v_HND = (t[rows].transpose(0, 1) for t in (q_THD, k_THD, v_THD))
        attended_THD[rows] = cached_attention(
            q_HND,
            k_HND,
            v_HND,
            prefix(b),
            num_candidates=segment.num_candidates,
            normaliser=layer.normaliser,
            history_bias=history_bias,
            candidate_bias_K=candidate_bias,
            rules=layer.rules,
        ).transpose(0, 1)
        first = rows.stop
    attended = attended_THD.flatten(1)
    gated = u * layer_norm(attended, attended.shape[1:], eps=NORM_EPS)
    return x_TD + layer.output(gated), (k_THD, v_THD)


def _biases(
    layer: HSTULayer, segment: Segment, times: SegmentTimes | None, dtype: torch.dtype
) -> tuple[BiasRows | None, torch.Tensor | None]:
    """The sum of what a layer has learned of distance and time; none where it has neither."""
    full = torch.promote_types(dtype, torch.float32)
    found = [] if layer.position_table is None else [position_biases(layer.position_table, segment, full)]
    found += [] if times is None else [time_biases(layer, times, full)]
    if not found:
        return None, None

    def rows(first: int, end: int, keys: slice) -> torch.Tensor:
        total = found[0][0](first, end, keys)
        return (total if len(found) == 1 else total + found[1][0](first, end, keys)).to(dtype)

    candidate = found[0][1] if len(found) == 1 else found[0][1] + found[1][1]
    return rows, candidate.to(dtype)


CACHED = CachedForward(
    kept=lambda cfg: cfg,
    forward=cached_forward,
    most_seen=lambda cfg: cfg.attention.limits(cfg.num_layers, cfg.max_length),
    paged="nestrec.models.cached.paged_batch:PagedHSTU",
)
