"""The forward passes of HSTU, FuXi and SASRec over cached prefixes, which define what serving computes.

A pass takes the new tokens of many users and the cached keys and values of their prefixes. A causal encoder never looks
forward, so the keys and values of a prefix do not depend on what follows it: computing the rest against them gives the
states of a full pass, up to rounding. What could break this is kept fixed: the normalizer is a constant of a layer, and
positions and times are absolute. If layers compute the last tokens of a history only (`backbone_spec`), their keys
and values hold for as long as its cut stays where it is.

HSTU and FuXi share the loop over layers (`_residual_forward`). All channels of FuXi weigh the same values, so its cache
holds nothing but keys and values. The softmax of SASRec is over all that a token sees, old and new.

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
"""of the history rows, block by block, and the one row that all candidates share"""
LayerPass = Callable[
    [Any, torch.Tensor, Sequence[NewTokenSegment], "Sequence[_SegmentTimes | None]", Callable[[int], KeysAndValues]],
    tuple[torch.Tensor, KeysAndValues],
]
"""(layer, (T, D), segments, their times where the layer reads them, prefix of a sequence) to states, keys and values"""


def _residual_forward(
    model: ResidualEncoder,
    x_TD: torch.Tensor,
    segments: Sequence[NewTokenSegment],
    prefix: PrefixReader,
    *,
    layer_pass: LayerPass,
    reads_times: bool,
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    """(T, D) states of the new tokens, and for each layer their keys and values, each (T, H, D)."""
    cfg: Any = model.cfg
    x_TD = x_TD * cfg.dim**0.5 + model.position[new_positions(segments, x_TD.device)]
    layers = range(len(model.layers))
    made = list[KeysAndValues]()

    def through(
        numbers: Sequence[int], x: torch.Tensor, some: Sequence[NewTokenSegment], reader: PrefixReader
    ) -> torch.Tensor:
        """States behind some layers; their keys and values are added to `made`."""
        times = [_SegmentTimes(s, cfg.time_encoding, cfg.num_time_buckets) if reads_times else None for s in some]
        for number in numbers:
            x, kept = layer_pass(model.layers[number], x, some, times, lambda b, n=number: reader(n, b))  # type: ignore[misc]
            made.append(kept)
        return x

    first = next((n for n in layers if cfg.attention.cuts(n)), len(layers))
    x_TD = through(layers[:first], x_TD, segments, prefix)
    if first == len(layers):
        return x_TD, made
    rows = _rows_behind_cuts(segments, x_TD.device)

    def behind_cut(layer: int, b: int) -> KeysAndValues:
        keys, values = prefix(layer, b)
        return keys[:, segments[b].cut :], values[:, segments[b].cut :]

    later = [segment.behind_cut() for segment in segments]
    left = through(layers[first:], x_TD.index_select(0, rows), later, behind_cut)
    made[first:] = [(_placed(keys, rows, len(x_TD)), _placed(values, rows, len(x_TD))) for keys, values in made[first:]]
    return x_TD.index_copy(0, rows, left), made


def _rows_behind_cuts(segments: Sequence[NewTokenSegment], device: torch.device) -> torch.Tensor:
    first = 0
    rows = list[torch.Tensor]()
    for segment in segments:
        rows.append(torch.arange(first + segment.num_cut, first + segment.num_tokens, device=device))
        first += segment.num_tokens
    return torch.cat(rows)


def _placed(some: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Zeros where there is none: nothing reads them, but they are kept like others."""
    return some.new_zeros(num_rows, *some.shape[1:]).index_copy(0, rows, some)


class _SegmentTimes:
    """What layers read of a segment's time differences, computed once: their buckets, or their logarithms."""

    def __init__(self, segment: NewTokenSegment, encoding: TimeEncoding, num_buckets: int):
        self._segment = segment
        self._encoding = encoding
        self._num_buckets = num_buckets
        self._blocks: dict[tuple[int, int, int], torch.Tensor] = {}
        delta_K = segment.candidate_time_s - segment.time_K
        self._candidate_K = self._read(torch.cat([delta_K, delta_K.new_zeros(1)]))

    def candidate(self, layer: Layer) -> torch.Tensor:
        """(P + S + 1,) bias of every candidate"""
        return _time_values(layer, self._candidate_K)

    def rows(self, layer: Layer, first: int, end: int, keys: slice) -> torch.Tensor:
        """(end - first, keys) bias of new history"""
        place = (first, keys.start, keys.stop)
        if place not in self._blocks:
            delta = self._segment.query_time_S[first:end, None] - self._segment.time_K[None, keys]
            self._blocks[place] = self._read(delta)
        return _time_values(layer, self._blocks[place])

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
    """What a layer has learned of the time between tokens."""
    return lambda first, end, keys: times.rows(layer, first, end, keys).to(dtype), times.candidate(layer).to(dtype)


def _position_biases(table: torch.Tensor, segment: NewTokenSegment, dtype: torch.dtype) -> Biases:
    """What a layer has learned of the distance between tokens."""
    centre = (table.numel() - 1) // 2

    def rows(first: int, end: int, keys: slice) -> torch.Tensor:
        # Row i is table[centre - i + keys]: the rows are sliding windows in reverse.
        low = segment.prefix_length + first
        high = segment.prefix_length + end
        strip = table[centre - high + 1 + keys.start : centre - low + keys.stop]
        return strip.unfold(0, keys.stop - keys.start, 1).flip(0).to(dtype)

    return rows, table[centre - segment.length : centre + 1].to(dtype)


def _hstu_forward(
    model: HSTU, x_TD: torch.Tensor, segments: Sequence[NewTokenSegment], prefix: PrefixReader
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    """(T, D) states of the new tokens, and for each layer their keys and values, each (T, H, D)."""
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
            normaliser=layer.normaliser,
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
    """The sum of what a layer has learned of distance and time; none where it has neither."""
    full = torch.promote_types(dtype, torch.float32)
    found = [] if layer.position_table is None else [_position_biases(layer.position_table, segment, full)]
    found += [] if times is None else [_time_biases(layer, times, full)]
    if not found:
        return None, None

    def rows(first: int, end: int, keys: slice) -> torch.Tensor:
        total = found[0][0](first, end, keys)
        return (total if len(found) == 1 else total + found[1][0](first, end, keys)).to(dtype)

    candidate = found[0][1] if len(found) == 1 else found[0][1] + found[1][1]
    return rows, candidate.to(dtype)


HSTU_CACHED = CachedForward(
    kept=lambda cfg: cfg,
    forward=_hstu_forward,
    most_seen=lambda cfg: cfg.attention.limits(cfg.num_layers, cfg.max_length),
    paged="nestrec.models.cached.paged_batch:PagedHSTU",
)


def _fuxi_forward(
    model: FuXi, x_TD: torch.Tensor, segments: Sequence[NewTokenSegment], prefix: PrefixReader
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    """(T, D) states of the new tokens, and for each block their keys and values, each (T, H, D)."""
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
        kept = prefix(b)
        asked = segment.num_candidates
        semantic = cached_attention(
            q_HND, k_HND, v_HND, kept, num_candidates=asked, normaliser=block.normaliser, rules=block.rules
        )
        weights = [_position_biases(block.position_table, segment, x_TD.dtype)]
        time = times[b]
        weights += [] if time is None else [_time_biases(block, time, x_TD.dtype)]
        others = [
            cached_channel(
                v_HND,
                kept[1],
                num_candidates=asked,
                history_weights=of_rows,
                candidate_weights_K=of_candidates,
                rules=block.rules,
            )
            for of_rows, of_candidates in weights
        ]
        channels.append([channel.transpose(0, 1).flatten(1) for channel in (semantic, *others)])
        first = rows.stop
    together = torch.cat([torch.cat(parts) for parts in zip(*channels, strict=True)], dim=1)
    first_stage = block.output(u * rms_norm(together, together.shape[1:], eps=FUXI_NORM_EPS))
    none = Dropout(x_TD, 0, 0.0)
    total, second_stage = feed_forward_reference(x_TD, first_stage, block.up, block.down, none, eps=FUXI_NORM_EPS)
    return total + second_stage, (k_THD, v_THD)


FUXI_CACHED = CachedForward(
    kept=lambda cfg: cfg,
    forward=_fuxi_forward,
    most_seen=lambda cfg: cfg.attention.limits(cfg.num_layers, cfg.max_length),
    paged="nestrec.models.cached.paged_batch:PagedFuXi",
)


def _sasrec_forward(
    model: SASRec, x_TD: torch.Tensor, segments: Sequence[NewTokenSegment], prefix: PrefixReader
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    """(T, D) states of the new tokens, and for each layer their keys and values, each (T, H, D)."""
    x_TD = x_TD * model.cfg.dim**0.5 + model.position[new_positions(segments, x_TD.device)]
    made = list[KeysAndValues]()
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
            found_HND = cached_softmax_attention(
                q_HND, k_HND, v_HND, prefix(number, b), num_candidates=segment.num_candidates
            )
            attended.append(found_HND.transpose(0, 1).flatten(1))
            first = rows.stop
        x_TD = layer.behind_attention(normed, torch.cat(attended))
        made.append((k_THD, v_THD))
    return model.final_norm(x_TD), made


@dataclass(frozen=True, slots=True)
class _SASRecCacheSpec:
    num_layers: int
    num_heads: int
    head_dim: int


def _sasrec_kept(cfg: SASRecConfig) -> _SASRecCacheSpec:
    return _SASRecCacheSpec(cfg.num_layers, cfg.num_heads, cfg.dim // cfg.num_heads)


SASREC_CACHED = CachedForward(
    kept=_sasrec_kept, forward=_sasrec_forward, paged="nestrec.models.cached.paged_batch:PagedSASRec"
)
