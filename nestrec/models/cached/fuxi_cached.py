"""FuXi for serving: a block over new tokens and the stored keys and values of their prefixes (residual_cached.py).

All channels weigh the same values, so keys and values are all that is kept.

Legend: T new tokens of all sequences, D model width, H heads.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import rms_norm, silu

from nestrec.models.cached.residual_cached import SegmentTimes, position_biases, residual_forward, time_biases
from nestrec.models.fuxi import FUXI_NORM_EPS, FuXi, FuXiBlock
from nestrec.models.sequence import CachedForward, KeysAndValues, PrefixReader, Segment
from nestrec.ops.attention.cached_attention import cached_attention, cached_channel
from nestrec.ops.layers.fused_layers import Dropout, feed_forward_reference


def cached_forward(
    model: FuXi, x_TD: torch.Tensor, segments: Sequence[Segment], prefix: PrefixReader
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    """(T, D) states of the new tokens, and for each block their keys and values, each (T, H, D)."""
    return residual_forward(model, x_TD, segments, prefix, layer_pass=_block, reads_times=model.cfg.time_channel)


def _block(
    block: FuXiBlock,
    x_TD: torch.Tensor,
    segments: Sequence[Segment],
    times: Sequence[SegmentTimes | None],
    prefix: Callable[[int], KeysAndValues],
) -> tuple[torch.Tensor, KeysAndValues]:
    heads = (-1, block.cfg.num_heads, block.cfg.head_dim)
    normed = rms_norm(x_TD, x_TD.shape[1:], eps=FUXI_NORM_EPS)
    u, v, q, k = silu(normed @ block.uvqk).split(block.widths, dim=1)
    q_THD, k_THD, v_THD = (t.reshape(heads) for t in (q, k, v))
    channels, first = list[list[torch.Tensor]](), 0
    for b, segment in enumerate(segments):
        rows = slice(first, first + segment.num_tokens)
        q_HND, k_HND, v_HND = (t[rows].transpose(0, 1) for t in (q_THD, k_THD, v_THD))
        kept, asked = prefix(b), segment.num_candidates
        semantic = cached_attention(
            q_HND, k_HND, v_HND, kept, num_candidates=asked, normaliser=block.normaliser, rules=block.rules
        )
        weights = [position_biases(block.position_table, segment, x_TD.dtype)]
        time = times[b]
        weights += [] if time is None else [time_biases(block, time, x_TD.dtype)]
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


CACHED = CachedForward(
    kept=lambda cfg: cfg,
    forward=cached_forward,
    most_seen=lambda cfg: cfg.attention.limits(cfg.num_layers, cfg.max_length),
    paged="nestrec.models.cached.paged_batch:PagedFuXi",
)
