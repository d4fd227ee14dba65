"""HSTU for serving: new tokens of many users against the stored keys and values of their prefixes.

A causal encoder never looks forward, so the keys and values of a prefix do not depend on what follows it: computing
the rest against them gives the states of a full pass, up to rounding. What could break this is kept fixed: the
normaliser is a constant of a layer, and positions and times are absolute. Where layers compute the last tokens of a
history only (reach.py), their keys and values hold for as long as its cut stays where it is.

Legend: T new tokens of all sequences, D model width, H heads, P prefix tokens, S new history tokens, K = P + S.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import layer_norm, silu

from nestrec.models.hstu import HSTU, NORM_EPS, HSTUConfig, HSTULayer
from nestrec.models.segments import CachedForward, KeysAndValues, PrefixReader, Segment
from nestrec.ops.attention.cached import BiasRows, cached_attention
from nestrec.ops.attention.relative_bias import time_bucket
from nestrec.ops.attention.time_function import log_seconds, time_function_values


def cached_forward(
    model: HSTU, x_TD: torch.Tensor, segments: Sequence[Segment], prefix: PrefixReader
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    """(T, D) states of the new tokens, and for each layer their keys and values, each (T, H, D)."""
    position_T = torch.cat([_positions(segment, x_TD.device) for segment in segments])
    x_TD = x_TD * model.cfg.dim**0.5 + model.position[position_T]
    layers, made = range(model.cfg.num_layers), list[KeysAndValues]()
    first = next((n for n in layers if model.cfg.attention.cuts(n)), len(layers))
    x_TD = _through(model, layers[:first], x_TD, (segments, prefix), made)
    if first == len(layers):
        return x_TD, made
    kept = _rows_behind_cuts(segments, x_TD.device)
    later, some = [segment.behind_cut() for segment in segments], list[KeysAndValues]()

    def reader(layer: int, b: int) -> KeysAndValues:
        keys, values = prefix(layer, b)
        return keys[:, segments[b].cut :], values[:, segments[b].cut :]

    left = _through(model, layers[first:], x_TD.index_select(0, kept), (later, reader), some)
    made += [(_placed(keys, kept, len(x_TD)), _placed(values, kept, len(x_TD))) for keys, values in some]
    return x_TD.index_copy(0, kept, left), made


def _through(
    model: HSTU,
    layers: Sequence[int],
    x_TD: torch.Tensor,
    known: tuple[Sequence[Segment], PrefixReader],
    made: list[KeysAndValues],
) -> torch.Tensor:
    """States behind some layers; their keys and values are added to `made`."""
    segments, prefix = known
    times = [_Times(segment, model.cfg) if model.cfg.time_bias else None for segment in segments]
    for number in layers:
        layer = model.layers[number]
        assert isinstance(layer, HSTULayer)
        x_TD, keys_values = _layer(layer, x_TD, segments, times, lambda b, n=number: prefix(n, b))  # type: ignore[misc]
        made.append(keys_values)
    return x_TD


def _rows_behind_cuts(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    first, rows = 0, list[torch.Tensor]()
    for segment in segments:
        rows.append(torch.arange(first + segment.num_cut, first + segment.num_tokens, device=device))
        first += segment.num_tokens
    return torch.cat(rows)


def _placed(some: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Zeros where there is none: nothing reads them, but they are kept like others."""
    return some.new_zeros(num_rows, *some.shape[1:]).index_copy(0, rows, some)


def no_prefix(model: HSTU) -> PrefixReader:
    """The reader of sequences without a prefix."""
    empty = model.position.new_empty(model.cfg.num_heads, 0, model.cfg.head_dim)
    return lambda layer, sequence: (empty, empty)


def _positions(segment: Segment, device: torch.device) -> torch.Tensor:
    own = torch.arange(segment.prefix_length, segment.length, device=device)
    return torch.cat([own, own.new_full((segment.num_candidates,), segment.length)])


def _layer(
    layer: HSTULayer,
    x_TD: torch.Tensor,
    segments: Sequence[Segment],
    times: "Sequence[_Times | None]",
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


class _Times:
    """What layers read of a segment's time differences, computed once: their buckets, or their logarithms."""

    def __init__(self, segment: Segment, cfg: HSTUConfig):
        self._segment, self._cfg = segment, cfg
        self._blocks: dict[tuple[int, int, int], torch.Tensor] = {}
        delta_K = segment.candidate_time_s - segment.time_K
        self._candidate_K = self._read(torch.cat([delta_K, delta_K.new_zeros(1)]))

    def candidate(self, layer: HSTULayer) -> torch.Tensor:
        """(P + S + 1,) bias of every candidate"""
        return _time_values(layer, self._candidate_K)

    def rows(self, layer: HSTULayer, first: int, end: int, keys: slice) -> torch.Tensor:
        """(end - first, keys) bias of new history"""
        place = (first, keys.start, keys.stop)
        if place not in self._blocks:
            delta = self._segment.query_time_S[first:end, None] - self._segment.time_K[None, keys]
            self._blocks[place] = self._read(delta)
        return _time_values(layer, self._blocks[place])

    def _read(self, delta_s: torch.Tensor) -> torch.Tensor:
        if self._cfg.time_encoding == "functional":
            return log_seconds(delta_s)
        return time_bucket(delta_s, self._cfg.num_time_buckets).to(torch.int32)


def _time_values(layer: HSTULayer, read: torch.Tensor) -> torch.Tensor:
    if layer.time_function is not None:
        return time_function_values(layer.time_function, read)
    assert layer.time_table is not None
    return layer.time_table.index_select(0, read.flatten()).view(read.shape)


def _biases(
    layer: HSTULayer, segment: Segment, times: _Times | None, dtype: torch.dtype
) -> tuple[BiasRows | None, torch.Tensor | None]:
    """Bias of the history rows, block by block, and the one row that all candidates share."""
    position = layer.position_table
    if position is None and times is None:
        return None, None

    def rows(first: int, end: int, keys: slice) -> torch.Tensor:
        total = (
            _position_rows(position, segment.prefix_length + first, segment.prefix_length + end, keys)
            if position is not None
            else None
        )
        if times is not None:
            by_time = times.rows(layer, first, end, keys)
            total = by_time if total is None else total.add_(by_time)
        assert total is not None
        return total.to(dtype)

    candidate = None
    if position is not None:
        centre = (position.numel() - 1) // 2
        candidate = position[centre - segment.length : centre + 1]
    if times is not None:
        by_time = times.candidate(layer)
        candidate = by_time if candidate is None else candidate + by_time
    assert candidate is not None
    return rows, candidate.to(dtype)


def _position_rows(table: torch.Tensor, first: int, end: int, keys: slice) -> torch.Tensor:
    """(end - first, keys) bias of queries at positions [first, end)."""
    centre = (table.numel() - 1) // 2
    # Row i is table[centre - i + keys]: the rows are sliding windows in reverse.
    strip = table[centre - end + 1 + keys.start : centre - first + keys.stop]
    return strip.unfold(0, keys.stop - keys.start, 1).flip(0)


def is_pageable(model: HSTU) -> bool:
    """Whether `nestrec.models.hstu_paged.PagedHSTU` computes this model."""
    cfg = model.cfg
    has_whole_tiles = cfg.head_dim >= 16 and cfg.head_dim & (cfg.head_dim - 1) == 0
    return has_whole_tiles and not (cfg.position_bias or cfg.time_bias) and cfg.attention.is_uniform


CACHED = CachedForward(
    kept=lambda cfg: cfg,
    forward=cached_forward,
    most_seen=lambda cfg: cfg.attention.limits(cfg.num_layers, cfg.max_length),
    is_pageable=is_pageable,
)
