"""Throughput over the run and where the time of a step went."""

import math
from collections.abc import Sequence

from nestrec.report.charts import Line, colours_of, line_chart, stacked_bar
from nestrec.report.curves import thinned
from nestrec.report.formats import as_number, significant
from nestrec.report.markup import Markup, element
from nestrec.report.run_folder import Record, RunRecords
from nestrec.report.style import COLOUR_OF_KIND

_CURVES = {
    "samples_per_s": "Samples a second",
    "tokens_per_s": "Tokens a second",
    "memory_mib": "Memory, MiB",
    "step_ms": "Time of a step, ms",
    "learning_rate": "Learning rate",
}


def speed(run: RunRecords) -> Markup | None:
    """Charts of throughput and memory, and the breakdown of a step."""
    if not run.steps:
        return None
    charts = [_chart(name, title, run.steps) for name, title in _CURVES.items()]
    return element("div", _breakdown(run.steps), _reading(run.steps), element("div", charts, class_="charts"))


def _reading(steps: Sequence[Record]) -> Markup | None:
    """Whether batches are made as fast as steps would take them, did they never wait for data."""
    warm = [record for record in steps[1:] or steps if "readable_per_s" in record]
    could, took, step_ms = (
        mean_of([as_number(r.get(name)) for r in warm]) for name in ("readable_per_s", "samples_per_s", "step_ms")
    )
    if not (math.isfinite(could) and took > 0):
        return None
    wait_ms = min(mean_parts(warm).get("data.wait", 0.0), 0.99 * step_ms)
    wanted = took * step_ms / (step_ms - wait_ms)
    said = f"its threads can make {significant(could, 3)} samples a second, steps would take {significant(wanted, 3)}"
    if could >= wanted:
        return element("p", f"Reading keeps up: {said}.", class_="quiet")
    remedy = "give it more threads (--batch.workers) or cores"
    return element("p", f"Reading is short by {1 - could / wanted:.0%}: {said}; {remedy}.")


def _chart(name: str, title: str, steps: Sequence[Record]) -> Markup | None:
    values = [as_number(record.get(name)) for record in steps]
    if not any(math.isfinite(value) for value in values):
        return None
    x, y = thinned([as_number(record["step"]) for record in steps], values, most=200)
    return line_chart(title, [Line(title, x, y)], x_label="step", from_zero=True)


def _breakdown(steps: Sequence[Record]) -> Markup | None:
    warm = steps[1:] if len(steps) > 1 else steps
    parts = mean_parts(warm)
    if sum(parts.values()) <= 0:
        return None
    step_ms = mean_of([as_number(record.get("step_ms")) for record in warm])
    total = sum(parts.values())
    note = f"Mean of {len(warm):,} records" + (", the first left out as warm-up" if len(steps) > 1 else "")
    if total > step_ms * 1.01:
        note += f". Parts overlap: together {significant(total, 3)} ms in a step of {significant(step_ms, 3)} ms"
    elif step_ms > total * 1.001:
        parts["other"] = step_ms - total
    bar = stacked_bar(parts, "ms", colours_of(parts, COLOUR_OF_KIND))
    title = element("h3", "Where a step's time goes")
    return element("div", title, bar, element("p", f"{note}.", class_="quiet"), class_="card")


def mean_parts(steps: Sequence[Record]) -> dict[str, float]:
    """Mean milliseconds of each part; a part that a record lacks took none of that step."""
    names = dict.fromkeys(name for record in steps for name in record.get("parts", {}))
    means = {name: mean_of([as_number(record.get("parts", {}).get(name, 0)) for record in steps]) for name in names}
    return {name: value for name, value in means.items() if value >= 0}


def mean_of(values: Sequence[float]) -> float:
    """Of the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
