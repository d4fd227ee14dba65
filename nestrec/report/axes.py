"""Axes of a chart: where a value lies and where the ticks stand. Pure arithmetic."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nestrec.report.formats import compact


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values from [low, high] to places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False
    is_whole: bool = False
    """ticks at whole numbers only"""

    def place(self, value: float) -> float:
        low, high = self._scaled(self.low), self._scaled(self.high)
        return self.start + (self._scaled(value) - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """(value, label) of each tick inside the axis."""
        smallest = 1.0 if self.is_whole else 0.0
        values = _log_ticks(self.low, self.high) if self.is_log else _linear_ticks(self.low, self.high, smallest)
        return [(value, compact(value)) for value in values]

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.is_log else value


def axis_over(
    values: Iterable[float], start: float, end: float, *, is_log: bool = False, from_zero: bool = False
) -> Axis:
    """An axis that holds all finite values; `from_zero` makes it start at 0 where no value is below."""
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)]
    low, high = (min(finite), max(finite)) if finite else (1.0 if is_log else 0.0, 10.0 if is_log else 1.0)
    if is_log:
        return Axis(low, high if high > low else low * 10, start, end, is_log=True)
    low = min(0.0, low) if from_zero else low
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return Axis(low if low == 0 else low - margin, high + margin, start, end)


def counting_axis(values: Iterable[float], start: float, end: float) -> Axis:
    """An axis for steps or epochs: from the first to the last, ticks at whole numbers."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    return (
        Axis(low, high, start, end, is_whole=True) if high > low else Axis(low - 1, low + 1, start, end, is_whole=True)
    )


def _linear_ticks(low: float, high: float, smallest: float, target: int = 5) -> list[float]:
    rough = max((high - low) / target, smallest)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 2:
        every = max(1, -(-(last - first) // 7))
        return [10.0**power for power in range(first, last + 1, every)]
    candidates = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
    return [value for value in candidates if low * 0.999 <= value <= high * 1.001]
