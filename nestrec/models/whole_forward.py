"""New tokens of sequences without a prefix, by whole passes of any encoder: the slow twin of a cached forward.

Candidates come next after the history, each without the others: a sequence with C candidates is computed C times, each
time with one of them at its end.

Legend: T new tokens of all sequences, D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from nestrec.models.segments import CachedForward, KeysAndValues, PrefixReader, Segment
from nestrec.models.sequence import SequenceInfo


def whole_forward(
    model: nn.Module, x_TD: torch.Tensor, segments: Sequence[Segment], prefix: PrefixReader
) -> tuple[torch.Tensor, list[KeysAndValues]]:
    """(T, D) states of the new tokens; nothing is kept of them. There may be no prefix."""
    assert all(segment.prefix_length == 0 for segment in segments)
    first, places, kept = 0, list[torch.Tensor](), list[tuple[int, int, int]]()
    for segment in segments:
        history = torch.arange(first, first + segment.num_history)
        last = first + segment.num_history
        ends = [torch.tensor([last + c]) for c in range(segment.num_candidates)] or [history.new_empty(0)]
        kept.append((len(places), segment.num_history, segment.num_candidates))
        places += [torch.cat([history, end]) for end in ends]
        first += segment.num_tokens
    states = torch.split(model(x_TD[torch.cat(places)], _info(places, segments, x_TD.device)), [len(p) for p in places])
    found = []
    for number, num_history, num_candidates in kept:
        found.append(states[number][:num_history])
        found += [states[number + c][num_history:] for c in range(num_candidates)]
    return torch.cat(found), []


@dataclass(frozen=True, slots=True)
class _Nothing:
    num_layers: int = 0
    num_heads: int = 1
    head_dim: int = 1


WHOLE = CachedForward(kept=lambda cfg: _Nothing(), forward=whole_forward, keeps=False)
"""of backbones that say of none how they compute against a kept prefix"""


def _info(places: Sequence[torch.Tensor], segments: Sequence[Segment], device: torch.device) -> SequenceInfo:
    lengths = torch.tensor([len(p) for p in places])
    times, asked = list[torch.Tensor](), list[torch.Tensor]()
    for segment in segments:
        num_candidates = segment.num_candidates
        shown = segment.time_K.new_full((min(num_candidates, 1),), segment.candidate_time_s)
        times += [torch.cat([segment.time_K, shown])] * max(num_candidates, 1)
        asked += [torch.cat([segment.query_time_S, shown])] * max(num_candidates, 1)
    position = torch.cat([torch.arange(length) for length in lengths.tolist()]).to(device)
    cuts = torch.tensor([segment.cut for segment in segments for _ in range(max(segment.num_candidates, 1))])
    return SequenceInfo(
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device),
        max_length=int(lengths.max()),
        position_T=position,
        token_key_T=torch.zeros_like(position),
        time_T=torch.cat(times),
        query_time_T=torch.cat(asked),
        cut_B=cuts.to(device),
    )
