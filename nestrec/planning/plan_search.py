"""The search for a plan: for each schedule, one option at a time is changed as long as that helps.

Most of what options do to a step adds up, so this finds the best or nearly so with a small part of the predictions of
an exhaustive search, which is here too: the slow twin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nestrec.planning.predictor import Prediction, Predictor
from nestrec.planning.search_space import FIELDS, Candidate, Space

AS_GOOD = 0.005
"""Times that differ by less than this part count as the same; then the simpler candidate wins."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search leaves behind."""

    best: tuple[Prediction, ...]
    """candidates that fit, the quickest first"""
    others: tuple[Prediction, ...]
    """those that were looked at and do not fit, the least lacking first"""


def search(predictor: Predictor, space: Space) -> SearchResult:
    """Improve from one start a schedule; every candidate that was predicted is in the result."""
    for schedule in space.schedules:
        parts = [n for n in space.micro_batches if space.is_sensible(Candidate(schedule=schedule, micro_batches=n))]
        if parts:
            middle = parts[len(parts) // 2]
            start = Candidate(
                schedule=schedule,
                micro_batches=middle,
                replicas=space.replicas[0],
                store=space.stores[-1],
                policy=space.policies[0],
                window_cache=space.window_cache[0],
                transport=space.transports[0],
            )
            _improve(predictor, space, start)
    return _sorted(list(predictor.outcomes.values()))


def exhaustive(predictor: Predictor, space: Space) -> SearchResult:
    """Every candidate."""
    return _sorted([predictor.predict(candidate) for candidate in space.everything()])


def _improve(predictor: Predictor, space: Space, start: Candidate) -> None:
    best = predictor.predict(start)
    while True:
        before = best
        for field in FIELDS[1:]:  # the schedule stays: which is best depends on the other options, and theirs on it
            for value in space.values(field):
                changed = replace(best.candidate, **{field: value})
                if changed.micro_batches == 1:  # where that is open, there is nothing to cache
                    changed = replace(changed, window_cache=space.window_cache[0])
                if space.is_sensible(changed):
                    best = min(best, predictor.predict(changed), key=_badness)
        if best is before:
            return


def _badness(outcome: Prediction) -> tuple[float, int, int]:
    """First what does not fit, then time, then how much there is to explain."""
    return outcome.missing_bytes, round(math.log(outcome.step_s) / math.log(1.0 + AS_GOOD)), _complexity(outcome)


def _complexity(outcome: Prediction) -> int:
    c = outcome.candidate
    tiers = ("device", "dram", "disk").index(c.store)
    return (
        (c.schedule != "serial")
        + math.ceil(math.log2(c.micro_batches))
        + math.ceil(math.log2(c.replicas))
        + 2 * tiers
        + (c.policy != "fixed")
        + c.window_cache
        + (c.transport != "collectives")
    )


def _sorted(outcomes: Sequence[Prediction]) -> SearchResult:
    fitting = sorted((o for o in outcomes if o.fits), key=_badness)
    others = sorted((o for o in outcomes if not o.fits), key=_badness)
    return SearchResult(tuple(fitting), tuple(others))
