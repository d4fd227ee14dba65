"""A profile and links fitted to measured stages: each operation a line in its amount, none of it negative.

Time of a collective counts from the moment when the last rank has entered it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance.cost import non_negative_least_squares
from nestrec.planning.links import Link, Links
from nestrec.planning.loads import Loads
from nestrec.planning.profile import ComputeRates, Profile, Rate, StoreRates
from nestrec.trace import Span

StageTimes = Mapping[str, Mapping[tuple[int, int, int], float]]
"""Stage to (step, rank, micro-batch) to seconds."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Measured stages of one configuration, the amounts that they had, and the links that they crossed."""

    loads: Loads
    stages: StageTimes
    gb_per_s: float = 1.0
    """of a rank's link"""
    burst_bytes: float = 0.0
    """that pass its link at no cost after a pause"""

    def links(self) -> Links:
        """The links as they are nominally."""
        return Links((Link(name="link", ranks=0, gb_per_s=self.gb_per_s, burst_bytes=self.burst_bytes),))


def stage_times(spans: Iterable[Span]) -> dict[str, dict[tuple[int, int, int], float]]:
    """Seconds of each stage, from the spans of all ranks."""
    spans = [span for span in spans if span.kind in ("compute", "lookup", "communication") and span.step is not None]
    entered: dict[tuple[str, int | None, int | None], int] = defaultdict(int)
    for span in spans:
        place = (span.name, span.step, span.micro_batch)
        entered[place] = max(entered[place], span.start_ns)
    found: dict[str, dict[tuple[int, int, int], float]] = defaultdict(dict)
    for span in spans:
        start = entered[span.name, span.step, span.micro_batch] if span.is_collective else span.start_ns
        assert span.step is not None
        found[span.name][span.step, span.rank, span.micro_batch or 0] = (span.end_ns - start) * 1e-9
    return found


def fit_profile(observed: Sequence[Observed], base: Profile, *, by_medians: bool = False) -> Profile:
    """Rates of the stages that were observed; the others as in `base`.

    by_medians: each configuration counts with its medians, so that what disturbed a few stages does not; for
    configurations whose stages all have about the same amount.
    """

    def line(stage: str, amount: str) -> Rate | None:
        of_each = [_pairs(one, stage, amount) for one in observed]
        if by_medians:
            of_each = [[tuple(np.median(pairs, axis=0))] for pairs in of_each if pairs]
        return fit_line([pair for pairs in of_each for pair in pairs])

    fetch, written = line("train.embedding.fetch", "row_bytes"), line("train.embedding.write_back", "row_bytes")
    compute = line("train.compute", "linear_flops")
    rates: dict[str, Any] = {
        "deduplicate": line("train.embedding.deduplicate", "keys"),
        "arrange": line("train.embedding.arrange", "asked"),
        "update_rows": line("train.embedding.update", "row_bytes"),
        "intersect": line("train.embedding.intersect", "rows"),
        "copy": line("train.embedding.copy", "shared_bytes"),
        "dense_apply": line("train.dense.update", "dense_bytes"),
    }
    found = replace(base, **{name: rate for name, rate in rates.items() if rate is not None})
    if fetch is not None:
        found = replace(found, dram=StoreRates(fetch=fetch, write_back=written or Rate()))
    if compute is not None:
        found = replace(found, compute=ComputeRates(fixed_s=compute.fixed_s, flop_s=compute.unit_s))
    return found


def fit_line(pairs: Sequence[tuple[float, float]]) -> Rate | None:
    """Through (seconds, amount), no coefficient negative; none without pairs."""
    if not pairs:
        return None
    seconds, amounts = np.array(pairs).T
    fixed, unit = non_negative_least_squares(np.stack([np.ones_like(amounts), amounts], axis=1), seconds)
    return Rate(fixed_s=fixed, unit_s=unit)


def ratios_of(observed: Sequence[Observed], stage: str, amount: str, rate: Rate) -> NDArray[np.float64]:
    """Measured times of a stage over its line."""
    pairs = np.array([pair for one in observed for pair in _pairs(one, stage, amount)])
    found: NDArray[np.float64] = pairs[:, 0] / (rate.fixed_s + rate.unit_s * pairs[:, 1])
    return found


def _pairs(one: Observed, stage: str, amount: str) -> list[tuple[float, float]]:
    """(seconds, amount) of every run of a stage."""
    pairs = []
    values = getattr(one.loads, amount)
    for (step, rank, part), seconds in one.stages.get(stage, {}).items():
        if isinstance(values, float):
            pairs.append((seconds, values))
            continue
        of_rank = values[one.loads.place(step)][rank]
        is_part = np.ndim(of_rank) == 1 and stage in _BY_PART
        pairs.append((seconds, float(of_rank[part]) if is_part else float(np.sum(of_rank))))
    return pairs


_BY_PART = ("train.compute", "train.embedding.vectors", "train.embedding.gradients")
