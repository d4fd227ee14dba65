"""SASRec for serving: new tokens of many users against the stored keys and values of their prefixes.

Attention is causal and positions are absolute, so what is kept of a prefix does not depend on what follows it. The
softmax is over all that a token sees, old and new.

Legend: T new tokens of all sequences, D model width, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nestrec.models.sasrec import SASRec, SASRecConfig, SASRecLayer
from nestrec.models.sequence import CachedForward, KeysAndValues, PrefixReader, Segment, new_positions
from nestrec.ops.attention.cached_attention import cached_softmax_attention


def cached_forward(
    model: SASRec, x_TD: torch.Tensor, segments: Sequence[Segment], prefix: PrefixReader
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    """(T, D) states of the new tokens, and for each layer their keys and values, each (T, H, D)."""
    x_TD = x_TD * model.cfg.dim**0.5 + model.position[new_positions(segments, x_TD.device)]
    made = list[KeysAndValues]()
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, SASRecLayer)
        normed, heads = layer.query_norm(x_TD), (-1, model.cfg.num_heads, model.cfg.dim // model.cfg.num_heads)
        q_THD, k_THD, v_THD = (part.view(heads) for part in (layer.query(normed), layer.key(x_TD), layer.value(x_TD)))
        attended, first = list[torch.Tensor](), 0
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
class _Kept:
    num_layers: int
    num_heads: int
    head_dim: int


def _kept(cfg: SASRecConfig) -> _Kept:
    return _Kept(cfg.num_layers, cfg.num_heads, cfg.dim // cfg.num_heads)


CACHED = CachedForward(kept=_kept, forward=cached_forward, paged="nestrec.models.cached.paged_batch:PagedSASRec")
