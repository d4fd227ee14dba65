"""Formats numbers and durations, and reads evaluation records: order of metrics and comparison with baselines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


def significant(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits, without an exponent between 1e-5 and 1e15."""
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
    """Format a number briefly with a unit (1.2k, 3.4M), or with an exponent if it is very small (5e-4)."""
    if 0 < abs(value) < 1e-3:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return significant(value / size, 3) + unit
    return significant(value, 3)


def memory(mib: float) -> str:
    """Format an amount of memory in MiB as MiB or GiB."""
    return f"{significant(mib / 1024, 3)} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


def duration(seconds: float) -> str:
    """Format seconds as `1h 02m`, `3m 20s` or `45s`."""
    if not math.isfinite(seconds):
        return "-"
    rounded_s = max(0, round(seconds))
    if rounded_s >= 3600:
        return f"{rounded_s // 3600}h {rounded_s % 3600 // 60:02d}m"
    return f"{rounded_s // 60}m {rounded_s % 60:02d}s" if rounded_s >= 60 else f"{rounded_s}s"


def as_number(value: Any) -> float:
    """Return a JSON value as a float; NaN if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)


Metrics = Mapping[str, Mapping[str, Any]]
"""Maps each system to its metrics, and each metric to `[mean, low, high]`."""
Outcome = Literal["wins", "unclear", "loses"]
_SHORT: dict[Outcome, str] = {"unclear": "no clear lead", "loses": "BEHIND"}


def as_interval(value: Any) -> tuple[float, float, float]:
    """Return (mean, low, high) of `[mean, low, high]`, or of a single number, whose bounds are NaN."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 3:
        return as_number(value[0]), as_number(value[1]), as_number(value[2])
    return as_number(value), math.nan, math.nan


def mean_of_metric(metrics: Metrics, system: str, metric: str) -> float:
    """Return the mean of a metric of a system; NaN if the system or the metric is missing."""
    return as_interval(metrics.get(system, {}).get(metric))[0]


def best_baseline(metrics: Metrics, metric: str, system: str = "model") -> str | None:
    """Return the baseline with the largest mean of a metric, among those with the evaluation protocol of `system`.

    The protocol is the part of the name after the comma: "model, sampled" is compared only with "..., sampled".
    """
    known = [name for name in metrics if _protocol(name) == _protocol(system) and not name.startswith("model")]
    finite = [name for name in known if math.isfinite(mean_of_metric(metrics, name, metric))]
    return max(finite, key=lambda name: mean_of_metric(metrics, name, metric), default=None)


def ratio_to_best(metrics: Metrics, system: str, metric: str) -> float:
    """Return the ratio of a system's metric to the best baseline's; NaN if there is no baseline or its metric is 0."""
    baseline = best_baseline(metrics, metric, system)
    base = mean_of_metric(metrics, baseline, metric) if baseline is not None else math.nan
    return mean_of_metric(metrics, system, metric) / base if base > 0 else math.nan


def has_baseline(metrics: Metrics, metric: str) -> bool:
    """Return whether any system can be compared with a baseline."""
    return any(math.isfinite(ratio_to_best(metrics, system, metric)) for system in metrics)


@dataclass(frozen=True, slots=True)
class BaselineVerdict:
    """Comparison of the model with its best baseline."""

    baseline: str
    ratio: float
    """Ratio of the model's mean to the baseline's; NaN if the baseline's mean is 0."""
    outcome: Outcome
    sentence: str
    """Sentence for the user, in capitals if the model does not win."""

    @property
    def short(self) -> str:
        """Short form for a line that already shows the metrics."""
        times = f"{self.ratio:.2f}x {self.baseline}" if math.isfinite(self.ratio) else f"over {self.baseline}"
        return times if self.outcome == "wins" else f"{times}: {_SHORT[self.outcome]}"


def verdict_on(metrics: Metrics, metric: str) -> BaselineVerdict | None:
    """Compare the model with its best baseline; None if one of them is missing."""
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
            f"NO CLEAR LEAD over the best baseline: {figures}, and the intervals are unknown (they need several users)"
        )
        return BaselineVerdict(baseline, ratio, "unclear", sentence)
    return BaselineVerdict(baseline, ratio, "wins", f"the model leads its best baseline: {figures}")


SLICES_TITLE = "by slice (at least ten members)"


def slice_rows(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the slices of an evaluation as table rows: name, members, and the main metric of each system."""
    rows = []
    for name, evaluated_slice in evaluation.get("slices", {}).items():
        metrics = evaluated_slice["metrics"]
        metric = metric_names(metrics, evaluation["headline"])[0]
        values = {system: mean_of_metric(metrics, system, metric) for system in metrics}
        rows.append({"slice": name, "members": evaluated_slice["count"], "metric": metric, **values})
    return rows


def _protocol(system: str) -> str:
    return system.partition(",")[2].strip()


def metric_names(metrics: Metrics, headline: str) -> list[str]:
    """Return the names of all metrics in the order of the records, with the main metric first."""
    names = dict.fromkeys(name for values in metrics.values() for name in values)
    return [*([headline] if headline in names else []), *(name for name in names if name != headline)]
