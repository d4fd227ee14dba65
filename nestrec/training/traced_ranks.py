"""The spans of all ranks in one place, for the timeline of a run."""

import dataclasses
from collections.abc import Sequence

from nestrec.distributed import Topology
from nestrec.distributed.exchange import all_gather_json
from nestrec.trace import Span, merge


def spans_of_ranks(topology: Topology, spans: Sequence[Span]) -> list[Span]:
    """Those of every rank, in order of time. Collective.

    Ranks on one machine share a clock. Clocks of machines differ: the end of the first collective that all took part
    in, which comes at about the same moment everywhere, says by how much.
    """
    if topology.world == 1:
        return list(spans)
    gathered = all_gather_json(topology.control, [dataclasses.asdict(span) for span in spans])
    of_rank = {rank: [Span(**plain) for plain in plains] for rank, plains in enumerate(gathered)}
    return merge(of_rank, _offsets_ns(of_rank))


def _offsets_ns(of_rank: dict[int, list[Span]]) -> dict[int, int]:
    """How far each rank's clock is ahead of rank 0's; nothing where it is less than a step, as on one machine."""
    steps = {rank: {s.step: s.end_ns for s in spans if s.kind == "step"} for rank, spans in of_rank.items()}
    offsets = {}
    for rank, ends in steps.items():
        common = sorted(set(ends) & set(steps[0]), key=lambda step: -1 if step is None else step)
        if common:
            ahead = ends[common[0]] - steps[0][common[0]]
            longest = max(s.duration_ns for s in of_rank[rank] if s.kind == "step")
            offsets[rank] = ahead if abs(ahead) > longest else 0
    return offsets
