"""Counts of seconds between fixed bounds, for Prometheus."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable

BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""of what a user waits for"""
LONG_BOUNDS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""of what goes by between an event and what is learnt from it: windows may be seconds or a day"""


class Histogram:
    """One thread observes, any may read."""

    __slots__ = ("bounds_s", "counts", "seconds")

    def __init__(self, bounds_s: tuple[float, ...] = BOUNDS_S) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.seconds += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, how many were at most that)"""
        names = (*map(str, self.bounds_s), "+Inf")
        return list(zip(names, map(float, itertools.accumulate(self.counts)), strict=True))

    @staticmethod
    def sum_of(histograms: "Iterable[Histogram]") -> "Histogram":
        total = Histogram()
        for histogram in histograms:
            total.counts = [a + b for a, b in zip(total.counts, histogram.counts, strict=True)]
            total.seconds += histogram.seconds
        return total
