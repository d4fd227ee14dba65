"""Search for the best plan: coordinate descent, one start per schedule.

The effects of options on a step are mostly additive. Changing one option at a time therefore finds the best candidate,
or one close to it, with a small fraction of the predictions of an exhaustive search, which is the reference
implementation (`exhaustive`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nestrec.planning.predictor import Prediction, Predictor
from nestrec.planning.search_space import FIELDS, Candidate, Space

EQUAL_TOLERANCE = 0.005
"""Step times with a smaller relative difference count as equal; then the simpler candidate is better."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Candidates that a search has predicted."""

    best: tuple[Prediction, ...]
    """Candidates that fit into memory, fastest first."""
    others: tuple[Prediction, ...]
    """Candidates that do not fit, smallest shortage first."""


def search(predictor: Predictor, space: Space) -> SearchResult:
    """Search by coordinate descent from one start per schedule; the result contains every candidate predicted."""
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
    return _sort_outcomes(list(predictor.outcomes.values()))


def exhaustive(predictor: Predictor, space: Space) -> SearchResult:
    """Predict every candidate of the space; reference implementation of `search`."""
    return _sort_outcomes([predictor.predict(candidate) for candidate in space.all_candidates()])


def _improve(predictor: Predictor, space: Space, start: Candidate) -> None:
    best = predictor.predict(start)
    while True:
        before = best
        for field in FIELDS[1:]:  # not the schedule: the best values of the other options depend on it
            for value in space.values(field):
                changed = replace(best.candidate, **{field: value})
                if changed.micro_batches == 1:  # with one micro-batch the window cache has no effect
                    changed = replace(changed, window_cache=space.window_cache[0])
                if space.is_sensible(changed):
                    best = min(best, predictor.predict(changed), key=_badness)
        if best is before:
            return


def _badness(outcome: Prediction) -> tuple[float, int, int]:
    """Return the sort key of a candidate: missing memory, then step time, then complexity."""
    return (
        outcome.missing_bytes,
        round(math.log(outcome.step_s) / math.log(1.0 + EQUAL_TOLERANCE)),
        _complexity(outcome),
    )


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


def _sort_outcomes(outcomes: Sequence[Prediction]) -> SearchResult:
    fitting = sorted((o for o in outcomes if o.fits), key=_badness)
    others = sorted((o for o in outcomes if not o.fits), key=_badness)
    return SearchResult(tuple(fitting), tuple(others))
