"""HSTU and FuXi for serving: new tokens of many users against the stored keys and values of their prefixes.

A causal encoder never looks forward, so the keys and values of a prefix do not depend on what follows it: computing
the rest against them gives the states of a full pass, up to rounding. What could break this is kept fixed: the
normaliser is a constant of a layer, and positions and times are absolute. Where layers compute the last tokens of a
history only (reach.py), their keys and values hold for as long as its cut stays where it is.

Legend: T new tokens of all sequences, D model width, H heads, P prefix tokens, S new history tokens, K = P + S.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nestrec.models.encoder_parts import ResidualEncoder, TimeEncoding
from nestrec.models.fuxi import FuXiBlock
from nestrec.models.hstu import HSTULayer
from nestrec.models.sequence import KeysAndValues, PrefixReader, Segment, new_positions
from nestrec.ops.attention.cached_attention import BiasRows
from nestrec.ops.attention.mask_and_bias import log_seconds, time_bucket, time_function_values

Layer = HSTULayer | FuXiBlock
Biases = tuple[BiasRows, torch.Tensor]
"""of the history rows, block by block, and the one row that all candidates share"""
LayerPass = Callable[
    [Any, torch.Tensor, Sequence[Segment], "Sequence[SegmentTimes | None]", Callable[[int], KeysAndValues]],
    tuple[torch.Tensor, KeysAndValues],
]
"""(layer, (T, D), segments, their times where the layer reads them, prefix of a sequence) to states, keys and values"""


def residual_forward(
    model: ResidualEncoder,
    x_TD: torch.Tensor,
    segments: Sequence[Segment],
    prefix: PrefixReader,
    *,
    layer_pass: LayerPass,
    reads_times: bool,
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    """(T, D) states of the new tokens, and for each layer their keys and values, each (T, H, D)."""
    cfg: Any = model.cfg
    x_TD = x_TD * cfg.dim**0.5 + model.position[new_positions(segments, x_TD.device)]
    layers, made = range(len(model.layers)), list[KeysAndValues]()

    def through(numbers: Sequence[int], x: torch.Tensor, some: Sequence[Segment], reader: PrefixReader) -> torch.Tensor:
        """States behind some layers; their keys and values are added to `made`."""
        times = [SegmentTimes(s, cfg.time_encoding, cfg.num_time_buckets) if reads_times else None for s in some]
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


def _rows_behind_cuts(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    first, rows = 0, list[torch.Tensor]()
    for segment in segments:
        rows.append(torch.arange(first + segment.num_cut, first + segment.num_tokens, device=device))
        first += segment.num_tokens
    return torch.cat(rows)


def _placed(some: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Zeros where there is none: nothing reads them, but they are kept like others."""
    return some.new_zeros(num_rows, *some.shape[1:]).index_copy(0, rows, some)


class SegmentTimes:
    """What layers read of a segment's time differences, computed once: their buckets, or their logarithms."""

    def __init__(self, segment: Segment, encoding: TimeEncoding, num_buckets: int):
        self._segment, self._encoding, self._num_buckets = segment, encoding, num_buckets
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


def time_biases(layer: Layer, times: SegmentTimes, dtype: torch.dtype) -> Biases:
    """What a layer has learned of the time between tokens."""
    return lambda first, end, keys: times.rows(layer, first, end, keys).to(dtype), times.candidate(layer).to(dtype)


def position_biases(table: torch.Tensor, segment: Segment, dtype: torch.dtype) -> Biases:
    """What a layer has learned of the distance between tokens."""
    centre = (table.numel() - 1) // 2

    def rows(first: int, end: int, keys: slice) -> torch.Tensor:
        # Row i is table[centre - i + keys]: the rows are sliding windows in reverse.
        low, high = segment.prefix_length + first, segment.prefix_length + end
        strip = table[centre - high + 1 + keys.start : centre - low + keys.stop]
        return strip.unfold(0, keys.stop - keys.start, 1).flip(0).to(dtype)

    return rows, table[centre - segment.length : centre + 1].to(dtype)
