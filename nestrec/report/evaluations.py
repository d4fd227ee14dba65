"""Reading plain evaluation records: values, the order of metrics, and ratios to the popularity baseline."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nestrec.report.formats import as_number

Metrics = Mapping[str, Mapping[str, Any]]
"""system to metric to [mean, low, high]"""


def as_interval(value: Any) -> tuple[float, float, float]:
    """(mean, low, high) from `[mean, low, high]`; a lone number has an unknown interval."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 3:
        return as_number(value[0]), as_number(value[1]), as_number(value[2])
    return as_number(value), math.nan, math.nan


def mean_of_metric(metrics: Metrics, system: str, metric: str) -> float:
    """NaN where the system or the metric is missing."""
    return as_interval(metrics.get(system, {}).get(metric))[0]


def popularity_ratio(metrics: Metrics, system: str, metric: str) -> float:
    """How many times a system's metric is that of the popularity baseline; NaN where either is missing or that is 0.

    A system named "model, sampled" was measured by another protocol and is compared with "popularity, sampled" only.
    """
    _, comma, protocol = system.partition(",")
    base = mean_of_metric(metrics, f"popularity{comma}{protocol}", metric)
    return mean_of_metric(metrics, system, metric) / base if base > 0 else math.nan


def has_popularity(metrics: Metrics, metric: str) -> bool:
    """Whether any system can be compared with popularity."""
    return any(math.isfinite(popularity_ratio(metrics, system, metric)) for system in metrics)


def metric_names(metrics: Metrics, headline: str) -> list[str]:
    """All metrics of all systems in their order, the headline first."""
    names = dict.fromkeys(name for values in metrics.values() for name in values)
    return [*([headline] if headline in names else []), *(name for name in names if name != headline)]
