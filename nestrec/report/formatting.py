"""Formats evaluation records: values, order of metrics, verdict against baselines.

Reading plain evaluation records: values, the order of metrics, and how the model stands beside its best baseline.

Numbers and times as people read them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


def significant(value: float, digits: int = 4) -> str:
    """`value` with so many significant digits and no exponent where it is of a usual size."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -5 or exponent >= 15:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - exponent)
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def compact(value: float) -> str:
    """Short, with a unit of thousands: 1.2k, 3.4M; very small values with an exponent: 5e-4."""
    if 0 < abs(value) < 1e-3:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return significant(value / size, 3) + unit
    return significant(value, 3)


def memory(mib: float) -> str:
    return f"{significant(mib / 1024, 3)} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


def duration(seconds: float) -> str:
    """1h 02m, 3m 20s or 45s."""
    if not math.isfinite(seconds):
        return "-"
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def as_number(value: Any) -> float:
    """A JSON value as a number; NaN where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)


Metrics = Mapping[str, Mapping[str, Any]]
"""system to metric to [mean, low, high]"""
Outcome = Literal["wins", "unclear", "loses"]
_SHORT: dict[Outcome, str] = {"unclear": "no clear lead", "loses": "BEHIND"}


def as_interval(value: Any) -> tuple[float, float, float]:
    """(mean, low, high) from `[mean, low, high]`; a lone number has an unknown interval."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 3:
        return as_number(value[0]), as_number(value[1]), as_number(value[2])
    return as_number(value), math.nan, math.nan


def mean_of_metric(metrics: Metrics, system: str, metric: str) -> float:
    """NaN where the system or the metric is missing."""
    return as_interval(metrics.get(system, {}).get(metric))[0]


def best_baseline(metrics: Metrics, metric: str, system: str = "model") -> str | None:
    """The baseline with the largest mean of a metric, among those that were measured by the protocol of `system`.

    A system named "model, sampled" was measured by another protocol than "model" and is not compared with its
    baselines.
    """
    known = [name for name in metrics if _protocol(name) == _protocol(system) and not name.startswith("model")]
    finite = [name for name in known if math.isfinite(mean_of_metric(metrics, name, metric))]
    return max(finite, key=lambda name: mean_of_metric(metrics, name, metric), default=None)


def ratio_to_best(metrics: Metrics, system: str, metric: str) -> float:
    """How many times a system's metric is that of the best baseline; NaN where there is none or it is 0."""
    baseline = best_baseline(metrics, metric, system)
    base = mean_of_metric(metrics, baseline, metric) if baseline is not None else math.nan
    return mean_of_metric(metrics, system, metric) / base if base > 0 else math.nan


def has_baseline(metrics: Metrics, metric: str) -> bool:
    """Whether any system can be compared with a baseline."""
    return any(math.isfinite(ratio_to_best(metrics, system, metric)) for system in metrics)


@dataclass(frozen=True, slots=True)
class BaselineVerdict:
    """The model beside the best of its baselines."""

    baseline: str
    ratio: float
    """of the model's mean to the baseline's; NaN where that is 0"""
    outcome: Outcome
    sentence: str
    """for people; loud where the model does not win"""

    @property
    def short(self) -> str:
        """A few words for a line that holds the figures already."""
        times = f"{self.ratio:.2f}x {self.baseline}" if math.isfinite(self.ratio) else f"over {self.baseline}"
        return times if self.outcome == "wins" else f"{times}: {_SHORT[self.outcome]}"


def verdict_on(metrics: Metrics, metric: str) -> BaselineVerdict | None:
    """Nothing where there is no model or no baseline to compare."""
    baseline = best_baseline(metrics, metric)
    mean, low, _ = as_interval(metrics.get("model", {}).get(metric))
    if baseline is None or not math.isfinite(mean):
        return None
    base, _, base_high = as_interval(metrics[baseline][metric])
    ratio = mean / base if base > 0 else math.nan
    figures = f"{metric} {mean:.4f} against {base:.4f} of {baseline!r}"
    if mean <= base:
        sentence = f"THE MODEL DOES NOT BEAT ITS BEST BASELINE: {figures}"
        return BaselineVerdict(baseline, ratio, "loses", sentence)
    if low <= base_high:
        sentence = f"NO CLEAR LEAD over the best baseline: {figures}, and their 95% intervals overlap"
        return BaselineVerdict(baseline, ratio, "unclear", sentence)
    if not (math.isfinite(low) and math.isfinite(base_high)):
        sentence = (
            f"NO CLEAR LEAD over the best baseline: {figures}, and no interval is known (one user alone gives none)"
        )
        return BaselineVerdict(baseline, ratio, "unclear", sentence)
    return BaselineVerdict(baseline, ratio, "wins", f"the model leads its best baseline: {figures}")


OF_SLICES = "by slices of ten members and more"


def slice_rows(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Slices of an evaluation as rows: name, members, and the headline metric of each system (or the nearest to it)."""
    rows = []
    for name, found in evaluation.get("slices", {}).items():
        metrics = found["metrics"]
        metric = metric_names(metrics, evaluation["headline"])[0]
        values = {system: mean_of_metric(metrics, system, metric) for system in metrics}
        rows.append({"slice": name, "members": found["count"], "metric": metric, **values})
    return rows


def _protocol(system: str) -> str:
    return system.partition(",")[2].strip()


def metric_names(metrics: Metrics, headline: str) -> list[str]:
    """All metrics of all systems in their order, the headline first."""
    names = dict.fromkeys(name for values in metrics.values() for name in values)
    return [*([headline] if headline in names else []), *(name for name in names if name != headline)]
