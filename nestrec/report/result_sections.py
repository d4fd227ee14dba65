"""Sections of the run page about results: metrics of the model and baselines, samples, training curves, time windows.

Samples are a few test users with their history, their recommendations and their next item. Each time window is
evaluated before it is trained on (test-then-train).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nestrec.report.charts import Line, downsample, line_chart, smooth
from nestrec.report.formatting import (
    SLICES_TITLE,
    BaselineVerdict,
    as_interval,
    as_number,
    best_baseline,
    has_baseline,
    mean_of_metric,
    metric_names,
    ratio_to_best,
    slice_rows,
    verdict_on,
)
from nestrec.report.markup import GRAY, Markup, element
from nestrec.report.run_records import Record, RunRecords, best_evaluation, headline_evaluation


def results(run: RunRecords) -> Markup | None:
    """Return the section with tiles of the main metric, and the table of all metrics and systems."""
    evaluation = headline_evaluation(run)
    if evaluation is None:
        return element("p", "No evaluation yet.", class_="quiet")
    notes = [element("p", f"Note: {note}", class_="quiet") for note in evaluation.get("notes", ())]
    verdict = verdict_on(evaluation["metrics"], evaluation["headline"])
    warning = element("p", verdict.sentence, class_="problem") if verdict and verdict.outcome != "wins" else None
    parts = [_tiles(run, evaluation, verdict), _table(evaluation), _explanation(evaluation), _slices(evaluation)]
    return element("div", warning, *parts, *notes)


def _slices(evaluation: Record) -> Markup | None:
    """Return the metrics of slices of the users or events."""
    rows = slice_rows(evaluation)
    if not rows:
        return None
    head = element("thead", element("tr", [element("th", name) for name in rows[0]]))
    body = []
    for row in rows:
        cells = [element("th", row["slice"]), element("td", f"{row['members']:,}"), element("td", row["metric"])]
        body.append(element("tr", cells, [element("td", _figure(value)) for value in list(row.values())[3:]]))
    table = element("table", head, element("tbody", body), class_="results")
    return element("details", element("summary", SLICES_TITLE.capitalize()), element("div", table, class_="wide"))


def _tiles(run: RunRecords, evaluation: Record, verdict: BaselineVerdict | None) -> Markup:
    headline, metrics = evaluation["headline"], evaluation["metrics"]
    tiles = []
    for system in ("model", *(name for name in metrics if name != "model")):
        if headline in metrics.get(system, {}):
            mean, low, high = as_interval(metrics[system][headline])
            value = element("b", _figure(mean))
            tiles.append(_tile(f"{system}, {headline} ({evaluation['part']})", value, _interval(low, high)))
    if verdict is not None and math.isfinite(verdict.ratio):
        note = {"wins": "", "unclear": ", no clear lead", "loses": ", BEHIND"}[verdict.outcome]
        value = element("b", f"{verdict.ratio:.2f}x")
        tiles.insert(1, _tile(f"model over {verdict.baseline}, the best baseline", value, f"in {headline}{note}"))
    best = best_evaluation(run)
    if best is not None:
        score = mean_of_metric(best["metrics"], "model", best["headline"])
        where = f"epoch {best.get('epoch', '?')}, step {best['step']:,}"
        tiles.append(_tile(f"best {best['headline']} (valid)", element("b", _figure(score)), where))
    return element("div", tiles, class_="tiles")


def _table(evaluation: Record) -> Markup:
    metrics, headline = evaluation["metrics"], evaluation["headline"]
    names = metric_names(metrics, headline)
    with_ratio = has_baseline(metrics, headline)
    heads = ["", *names[:1], *([f"over {best_baseline(metrics, headline)}"] if with_ratio else []), *names[1:]]
    rows = []
    for system, values in metrics.items():
        cells = [_cell(values.get(name)) for name in names]
        ratio = [_ratio_cell(ratio_to_best(metrics, system, headline))] if with_ratio else []
        row = [element("th", system), *cells[:1], *ratio, *cells[1:]]
        rows.append(element("tr", row, class_="model" if system == "model" else None))
    head = element("thead", element("tr", [element("th", name) for name in heads]))
    return element("div", element("table", head, element("tbody", rows), class_="results"), class_="wide")


def _cell(value: Any) -> Markup:
    if value is None:
        return element("td", "-")
    mean, low, high = as_interval(value)
    return element("td", _figure(mean), element("small", _interval(low, high)))


def _ratio_cell(ratio: float) -> Markup:
    return element("td", f"{ratio:.2f}x" if math.isfinite(ratio) else "-")


def _explanation(evaluation: Record) -> Markup:
    when = f"step {evaluation['step']:,}, epoch {evaluation.get('epoch', '?')}"
    return element(
        "p", f"Evaluated on the {evaluation['part']} split at {when}. Brackets: 95% intervals.", class_="quiet"
    )


def _tile(label: str, value: Markup, note: str) -> Markup:
    return element("div", element("span", label), value, element("small", note), class_="tile")


def _figure(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "-"


def _interval(low: float, high: float) -> str:
    return f"[{low:.4f}, {high:.4f}]" if math.isfinite(low) and math.isfinite(high) else ""


@dataclass(frozen=True, slots=True)
class Sample:
    """Test user with recommendations, by ids of the dataset's source."""

    user: str
    history: Sequence[str]
    """Last items before the test event, oldest first."""
    recommended: Sequence[str]
    """Recommended items, best first."""
    target: str
    """Item of the test event."""


def samples(user_samples: Sequence[Sample], titles: Mapping[str, str]) -> Markup | None:
    """Return a table of sample recommendations; items without an entry in `titles` are shown by their id."""
    if not user_samples:
        return None
    rows = [_row(sample, titles) for sample in user_samples]
    head = element("tr", [element("th", name) for name in ("user", "history", "recommended", "next item")])
    table = element("table", element("thead", head), element("tbody", rows), class_="results words")
    note = "Users of the test split; the next item is marked if it was recommended."
    return element("div", element("div", table, class_="wide"), element("p", note, class_="quiet"))


def _row(sample: Sample, titles: Mapping[str, str]) -> Markup:
    def shown(item: str) -> Markup:
        text = titles.get(item) or item
        return element("b", f"{text} ✓") if item == sample.target else element("span", text)

    recommended = element("ol", [element("li", shown(item)) for item in sample.recommended])
    history = element("ul", [element("li", titles.get(item) or item) for item in sample.history])
    target = titles.get(sample.target) or sample.target
    return element(
        "tr", element("th", sample.user), element("td", history), element("td", recommended), element("td", target)
    )


_METRICS_AT_FIRST = 2


def training(run: RunRecords) -> Markup | None:
    """Return the section with charts of the loss over steps and of each metric over epochs."""
    metrics = _metric_charts(run.part("valid"))
    charts = [*_loss_chart(run.steps), *metrics[:_METRICS_AT_FIRST]]
    if not charts:
        return element("p", "No steps recorded yet.", class_="quiet")
    more = metrics[_METRICS_AT_FIRST:]
    folded = element("summary", f"{len(more)} more metrics"), element("div", more, class_="charts")
    return element("div", element("div", charts, class_="charts"), element("details", *folded) if more else None)


def _loss_chart(steps: list[Record]) -> list[Markup]:
    if not steps:
        return []
    x = [as_number(record["step"]) for record in steps]
    y = [as_number(record.get("loss")) for record in steps]
    raw = Line("as recorded", *downsample(x, y), color=GRAY, style="faint")
    return [
        line_chart("Training loss", [raw, Line("smoothed", *downsample(x, smooth(y, len(y) / 50)))], x_label="step")
    ]


def _metric_charts(evaluations: list[Record]) -> list[Markup]:
    if not evaluations:
        return []
    epochs = [as_number(record.get("epoch")) for record in evaluations]
    by_epoch = len(set(epochs)) == len(epochs)
    x = epochs if by_epoch else [as_number(record["step"]) for record in evaluations]
    names = metric_names(evaluations[-1]["metrics"], evaluations[-1]["headline"])
    return [_metric_chart(name, x, evaluations, "epoch" if by_epoch else "step") for name in names]


def _metric_chart(metric: str, x: list[float], evaluations: list[Record], x_label: str) -> Markup:
    """Return a chart of a metric: the model with its interval, and baselines, which do not train, as dashed lines."""
    lines = []
    for i, system in enumerate(dict.fromkeys(name for record in evaluations for name in record["metrics"])):
        values = [as_interval(record["metrics"].get(system, {}).get(metric)) for record in evaluations]
        mean, low, high = ([value[part] for value in values] for part in range(3))
        is_model = system.startswith("model")
        band = {"low": low, "high": high} if is_model else {}
        lines.append(Line(system, x, mean, color=i % GRAY, style="" if is_model else "dashed", **band))
    return line_chart(f"{metric} (valid)", lines, x_label=x_label, from_zero=True)


_DAY_MS = 86_400_000
_CHARTS_AT_FIRST = 4


def windows(run: RunRecords) -> Markup | None:
    """Return the section with charts of each metric over the event time."""
    if not run.windows:
        return None
    first_ms = as_number(run.windows[0].get("from_ms"))
    days = [(as_number(record.get("from_ms")) - first_ms) / _DAY_MS for record in run.windows]
    names = list(dict.fromkeys(name for record in run.windows for name in record["metrics"]))
    charts = [_chart(name, days, run.windows) for name in names]
    events = sum(as_number(record.get("events")) for record in run.windows)
    line = f"{len(run.windows)} windows with {events:,.0f} events, each evaluated before the model was trained on it."
    more = charts[_CHARTS_AT_FIRST:]
    folded = element("summary", f"{len(more)} more metrics"), element("div", more, class_="charts")
    return element(
        "div",
        element("p", line),
        element("div", charts[:_CHARTS_AT_FIRST], class_="charts"),
        element("details", *folded) if more else None,
    )


def _chart(metric: str, days: list[float], records: list[Record]) -> Markup:
    values = [as_interval(record["metrics"].get(metric)) for record in records]
    mean, low, high = ([value[part] for value in values] for part in range(3))
    return line_chart(f"{metric} (next window)", [Line("model", days, mean, low=low, high=high)], x_label="day")
