"""Counts of seconds between fixed bounds, for Prometheus."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable

BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_NAMES = (*map(str, BOUNDS_S), "+Inf")


class Histogram:
    """One thread observes, any may read."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, how many were at most that)"""
        return list(zip(_NAMES, map(float, itertools.accumulate(self.counts)), strict=True))

    @staticmethod
    def sum_of(histograms: "Iterable[Histogram]") -> "Histogram":
        total = Histogram()
        for histogram in histograms:
            total.counts = [a + b for a, b in zip(total.counts, histogram.counts, strict=True)]
            total.seconds += histogram.seconds
        return total
