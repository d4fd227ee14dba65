"""Curves made fit to be drawn: smoothed, and thinned to what a screen can show. Pure functions on lists."""

import itertools
import math
from collections.abc import Sequence


def smoothed(values: Sequence[float], half_life: float) -> list[float]:
    """Exponential moving average that weighs a value half as much `half_life` values later, unbiased at the start.

    Values that are not finite are carried over.
    """
    keep = 0.5 ** (1.0 / max(half_life, 1e-9))
    average, weight, result = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            average = keep * average + (1 - keep) * value
            weight = keep * weight + (1 - keep)
        result.append(average / weight if weight > 0 else math.nan)
    return result


def thinned(x: Sequence[float], y: Sequence[float], most: int = 300) -> tuple[list[float], list[float]]:
    """At most `most` points: means over equal runs of points. A run with a value that is not finite has none either."""
    if len(x) <= most:
        return list(x), list(y)
    bounds = [len(x) * i // most for i in range(most + 1)]
    runs = list(itertools.pairwise(bounds))
    return [_mean(x[a:b]) for a, b in runs], [_mean(y[a:b]) for a, b in runs]


def unbroken(x: Sequence[float], y: Sequence[float]) -> list[list[tuple[float, float]]]:
    """The stretches of points between values that are not finite."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for point in zip(x, y, strict=True):
        if math.isfinite(point[0]) and math.isfinite(point[1]):
            stretches[-1].append(point)
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
