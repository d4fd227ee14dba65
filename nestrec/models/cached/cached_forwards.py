"""KV-cache forward passes of HSTU, FuXi and SASRec: reference implementations of incremental inference in serving.

A pass takes the new tokens of many users and the cached keys and values of their prefixes. Encoders are causal, so the
keys and values of a prefix do not depend on later tokens: computing the new tokens against them gives the states of a
full forward pass, up to rounding. This requires that nothing else depends on the length: the normalizer is a constant
of a layer, and positions and times are absolute. If layers compute only the last tokens of a history (`backbone_spec`),
their cached keys and values are valid as long as the cut does not change.

HSTU and FuXi share the loop over layers (`_residual_forward`). All channels of FuXi weigh the same values, so its cache
contains only keys and values. The softmax of SASRec is over all visible tokens, cached and new.

Legend: T new tokens of all sequences, D model width, H heads, P prefix tokens, S new history tokens, K = P + S.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import layer_norm, rms_norm, silu

from nestrec.models.encoder_parts import ResidualEncoder, TimeEncoding
from nestrec.models.fuxi import FUXI_NORM_EPS, FuXi, FuXiBlock
from nestrec.models.hstu import HSTU, NORM_EPS, HSTULayer
from nestrec.models.sasrec import SASRec, SASRecConfig, SASRecLayer
from nestrec.models.sequence import CachedForward, KeysAndValues, NewTokenSegment, PrefixReader, new_positions
from nestrec.ops.attention.cached_attention import BiasRows, cached_attention, cached_channel, cached_softmax_attention
from nestrec.ops.attention.mask_and_bias import log_seconds, time_bucket, time_function_values
from nestrec.ops.layers.fused_layers import Dropout, feed_forward_reference

Layer = HSTULayer | FuXiBlock
Biases = tuple[BiasRows, torch.Tensor]
"""Biases of the history rows, block by block, and the one row that all candidates share."""
LayerPass = Callable[
    [Any, torch.Tensor, Sequence[NewTokenSegment], "Sequence[_SegmentTimes | None]", Callable[[int], KeysAndValues]],
    tuple[torch.Tensor, KeysAndValues],
]
"""Function from (layer, (T, D) inputs, segments, their times if the layer reads times, prefix of a sequence) to
(states, (keys, values))."""


def _residual_forward(
    model: ResidualEncoder,
    x_TD: torch.Tensor,
    segments: Sequence[NewTokenSegment],
    prefix: PrefixReader,
    *,
    layer_pass: LayerPass,
    reads_times: bool,
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    """Run the layers of HSTU or FuXi.

    Returns:
        The (T, D) states of the new tokens and, per layer, their keys and values, each (T, H, D).
    """
    cfg: Any = model.cfg
    x_TD = x_TD * cfg.dim**0.5 + model.position[new_positions(segments, x_TD.device)]
    layers = range(len(model.layers))
    new_cache = list[KeysAndValues]()

    def run_layers(
        numbers: Sequence[int], x: torch.Tensor, parts: Sequence[NewTokenSegment], reader: PrefixReader
    ) -> torch.Tensor:
        """Return the states after these layers, and append their keys and values to `new_cache`."""
        times = [_SegmentTimes(s, cfg.time_encoding, cfg.num_time_buckets) if reads_times else None for s in parts]
        for number in numbers:
            x, new = layer_pass(model.layers[number], x, parts, times, lambda b, n=number: reader(n, b))  # type: ignore[misc]
            new_cache.append(new)
        return x

    first = next((n for n in layers if cfg.attention.truncates(n)), len(layers))
    x_TD = run_layers(layers[:first], x_TD, segments, prefix)
    if first == len(layers):
        return x_TD, new_cache
    rows = _rows_after_cuts(segments, x_TD.device)

    def prefix_after_cut(layer: int, b: int) -> KeysAndValues:
        keys, values = prefix(layer, b)
        return keys[:, segments[b].cut :], values[:, segments[b].cut :]

    truncated = [segment.after_cut() for segment in segments]
    left = run_layers(layers[first:], x_TD.index_select(0, rows), truncated, prefix_after_cut)
    new_cache[first:] = [
        (_scatter_rows(keys, rows, len(x_TD)), _scatter_rows(values, rows, len(x_TD)))
        for keys, values in new_cache[first:]
    ]
    return x_TD.index_copy(0, rows, left), new_cache


def _rows_after_cuts(segments: Sequence[NewTokenSegment], device: torch.device) -> torch.Tensor:
    first = 0
    rows = list[torch.Tensor]()
    for segment in segments:
        rows.append(torch.arange(first + segment.num_cut, first + segment.num_tokens, device=device))
        first += segment.num_tokens
    return torch.cat(rows)


def _scatter_rows(values: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Scatter values to their rows; the other rows are zero: they are cached like all rows, but never read."""
    return values.new_zeros(num_rows, *values.shape[1:]).index_copy(0, rows, values)


class _SegmentTimes:
    """Time differences of a segment as layers read them, computed once: bucket numbers or logarithms."""

    def __init__(self, segment: NewTokenSegment, encoding: TimeEncoding, num_buckets: int):
        self._segment = segment
        self._encoding = encoding
        self._num_buckets = num_buckets
        self._blocks: dict[tuple[int, int, int], torch.Tensor] = {}
        delta_K = segment.candidate_time_s - segment.time_K
        self._candidate_K = self._read(torch.cat([delta_K, delta_K.new_zeros(1)]))

    def candidate(self, layer: Layer) -> torch.Tensor:
        """Return the (P + S + 1,) bias, which is the same for every candidate."""
        return _time_values(layer, self._candidate_K)

    def rows(self, layer: Layer, first: int, end: int, keys: slice) -> torch.Tensor:
        """Return the (end - first, keys) bias of new history tokens."""
        block = (first, keys.start, keys.stop)
        if block not in self._blocks:
            delta = self._segment.query_time_S[first:end, None] - self._segment.time_K[None, keys]
            self._blocks[block] = self._read(delta)
        return _time_values(layer, self._blocks[block])

    def _read(self, delta_s: torch.Tensor) -> torch.Tensor:
        if self._encoding == "functional":
            return log_seconds(delta_s)
        return time_bucket(delta_s, self._num_buckets).to(torch.int32)


def _time_values(layer: Layer, read: torch.Tensor) -> torch.Tensor:
    if layer.time_function is not None:
        return time_function_values(layer.time_function, read)
    assert layer.time_table is not None
    return layer.time_table.index_select(0, read.flatten()).view(read.shape)


def _time_biases(layer: Layer, times: _SegmentTimes, dtype: torch.dtype) -> Biases:
    """Return the learned time bias of a layer."""
    return lambda first, end, keys: times.rows(layer, first, end, keys).to(dtype), times.candidate(layer).to(dtype)


def _position_biases(table: torch.Tensor, segment: NewTokenSegment, dtype: torch.dtype) -> Biases:
    """Return the learned relative position bias of a layer."""
    center = (table.numel() - 1) // 2

    def rows(first: int, end: int, keys: slice) -> torch.Tensor:
        # Row i is table[center - i + keys]: the rows are sliding windows in reverse order.
        low = segment.prefix_length + first
        high = segment.prefix_length + end
        strip = table[center - high + 1 + keys.start : center - low + keys.stop]
        return strip.unfold(0, keys.stop - keys.start, 1).flip(0).to(dtype)

    return rows, table[center - segment.length : center + 1].to(dtype)


def _hstu_forward(
    model: HSTU, x_TD: torch.Tensor, segments: Sequence[NewTokenSegment], prefix: PrefixReader
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    return _residual_forward(model, x_TD, segments, prefix, layer_pass=_hstu_layer, reads_times=model.cfg.time_bias)


def _hstu_layer(
    layer: HSTULayer,
    x_TD: torch.Tensor,
    segments: Sequence[NewTokenSegment],
    times: Sequence[_SegmentTimes | None],
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
        history_bias, candidate_bias = _hstu_biases(layer, segment, times[b], x_TD.dtype)
        q_HND, k_HND, v_HND = (t[rows].transpose(0, 1) for t in (q_THD, k_THD, v_THD))
        attended_THD[rows] = cached_attention(
            q_HND,
            k_HND,
            v_HND,
            prefix(b),
            num_candidates=segment.num_candidates,
            normalizer=layer.normalizer,
            history_bias=history_bias,
            candidate_bias_K=candidate_bias,
            rules=layer.rules,
        ).transpose(0, 1)
        first = rows.stop
    attended = attended_THD.flatten(1)
    gated = u * layer_norm(attended, attended.shape[1:], eps=NORM_EPS)
    return x_TD + layer.output(gated), (k_THD, v_THD)


def _hstu_biases(
    layer: HSTULayer, segment: NewTokenSegment, times: _SegmentTimes | None, dtype: torch.dtype
) -> tuple[BiasRows | None, torch.Tensor | None]:
    """Return the sum of the position and time biases of a layer; (None, None) if it has neither."""
    full = torch.promote_types(dtype, torch.float32)
    biases = [] if layer.position_table is None else [_position_biases(layer.position_table, segment, full)]
    biases += [] if times is None else [_time_biases(layer, times, full)]
    if not biases:
        return None, None

    def rows(first: int, end: int, keys: slice) -> torch.Tensor:
        total = biases[0][0](first, end, keys)
        return (total if len(biases) == 1 else total + biases[1][0](first, end, keys)).to(dtype)

    candidate = biases[0][1] if len(biases) == 1 else biases[0][1] + biases[1][1]
    return rows, candidate.to(dtype)


HSTU_CACHED = CachedForward(
    cache_spec=lambda cfg: cfg,
    forward=_hstu_forward,
    max_attended=lambda cfg: cfg.attention.max_attended_per_layer(cfg.num_layers, cfg.max_length),
    paged="nestrec.models.cached.paged_batch:PagedHSTU",
)


def _fuxi_forward(
    model: FuXi, x_TD: torch.Tensor, segments: Sequence[NewTokenSegment], prefix: PrefixReader
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    return _residual_forward(model, x_TD, segments, prefix, layer_pass=_fuxi_block, reads_times=model.cfg.time_channel)


def _fuxi_block(
    block: FuXiBlock,
    x_TD: torch.Tensor,
    segments: Sequence[NewTokenSegment],
    times: Sequence[_SegmentTimes | None],
    prefix: Callable[[int], KeysAndValues],
) -> tuple[torch.Tensor, KeysAndValues]:
    heads = (-1, block.cfg.num_heads, block.cfg.head_dim)
    normed = rms_norm(x_TD, x_TD.shape[1:], eps=FUXI_NORM_EPS)
    u, v, q, k = silu(normed @ block.uvqk).split(block.widths, dim=1)
    q_THD, k_THD, v_THD = (t.reshape(heads) for t in (q, k, v))
    channels = list[list[torch.Tensor]]()
    first = 0
    for b, segment in enumerate(segments):
        rows = slice(first, first + segment.num_tokens)
        q_HND, k_HND, v_HND = (t[rows].transpose(0, 1) for t in (q_THD, k_THD, v_THD))
        cached = prefix(b)
        num_candidates = segment.num_candidates
        semantic = cached_attention(
            q_HND,
            k_HND,
            v_HND,
            cached,
            num_candidates=num_candidates,
            normalizer=block.normalizer,
            rules=block.rules,
        )
        weights = [_position_biases(block.position_table, segment, x_TD.dtype)]
        time = times[b]
        weights += [] if time is None else [_time_biases(block, time, x_TD.dtype)]
        others = [
            cached_channel(
                v_HND,
                cached[1],
                num_candidates=num_candidates,
                history_weights=of_rows,
                candidate_weights_K=of_candidates,
                rules=block.rules,
            )
            for of_rows, of_candidates in weights
        ]
        channels.append([channel.transpose(0, 1).flatten(1) for channel in (semantic, *others)])
        first = rows.stop
    joined = torch.cat([torch.cat(parts) for parts in zip(*channels, strict=True)], dim=1)
    first_stage = block.output(u * rms_norm(joined, joined.shape[1:], eps=FUXI_NORM_EPS))
    no_dropout = Dropout(x_TD, 0, 0.0)
    total, second_stage = feed_forward_reference(x_TD, first_stage, block.up, block.down, no_dropout, eps=FUXI_NORM_EPS)
    return total + second_stage, (k_THD, v_THD)


FUXI_CACHED = CachedForward(
    cache_spec=lambda cfg: cfg,
    forward=_fuxi_forward,
    max_attended=lambda cfg: cfg.attention.max_attended_per_layer(cfg.num_layers, cfg.max_length),
    paged="nestrec.models.cached.paged_batch:PagedFuXi",
)


def _sasrec_forward(
    model: SASRec, x_TD: torch.Tensor, segments: Sequence[NewTokenSegment], prefix: PrefixReader
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    x_TD = x_TD * model.cfg.dim**0.5 + model.position[new_positions(segments, x_TD.device)]
    new_cache = list[KeysAndValues]()
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, SASRecLayer)
        normed = layer.query_norm(x_TD)
        heads = (-1, model.cfg.num_heads, model.cfg.dim // model.cfg.num_heads)
        q_THD, k_THD, v_THD = (part.view(heads) for part in (layer.query(normed), layer.key(x_TD), layer.value(x_TD)))
        attended = list[torch.Tensor]()
        first = 0
        for b, segment in enumerate(segments):
            rows = slice(first, first + segment.num_tokens)
            q_HND, k_HND, v_HND = (t[rows].transpose(0, 1) for t in (q_THD, k_THD, v_THD))
            attended_HND = cached_softmax_attention(
                q_HND, k_HND, v_HND, prefix(number, b), num_candidates=segment.num_candidates
            )
            attended.append(attended_HND.transpose(0, 1).flatten(1))
            first = rows.stop
        x_TD = layer.after_attention(normed, torch.cat(attended))
        new_cache.append((k_THD, v_THD))
    return model.final_norm(x_TD), new_cache


@dataclass(frozen=True, slots=True)
class _SASRecCacheSpec:
    num_layers: int
    num_heads: int
    head_dim: int


def _sasrec_cache_spec(cfg: SASRecConfig) -> _SASRecCacheSpec:
    return _SASRecCacheSpec(cfg.num_layers, cfg.num_heads, cfg.dim // cfg.num_heads)


SASREC_CACHED = CachedForward(
    cache_spec=_sasrec_cache_spec, forward=_sasrec_forward, paged="nestrec.models.cached.paged_batch:PagedSASRec"
)
