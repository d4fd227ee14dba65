"""Curves of the loss and of the metrics."""

from nestrec.report.charts import Line, line_chart
from nestrec.report.curves import smoothed, thinned
from nestrec.report.evaluations import as_interval, metric_names
from nestrec.report.formats import as_number
from nestrec.report.markup import Markup, element
from nestrec.report.run_folder import Record, RunRecords
from nestrec.report.style import GREY

_METRICS_AT_FIRST = 2


def training(run: RunRecords) -> Markup | None:
    """The loss over steps and each metric over epochs."""
    metrics = _metric_charts(run.part("valid"))
    charts = [*_loss_chart(run.steps), *metrics[:_METRICS_AT_FIRST]]
    if not charts:
        return element("p", "No step recorded yet.", class_="quiet")
    more = metrics[_METRICS_AT_FIRST:]
    folded = element("summary", f"{len(more)} more metrics"), element("div", more, class_="charts")
    return element("div", element("div", charts, class_="charts"), element("details", *folded) if more else None)


def _loss_chart(steps: list[Record]) -> list[Markup]:
    if not steps:
        return []
    x = [as_number(record["step"]) for record in steps]
    y = [as_number(record.get("loss")) for record in steps]
    raw = Line("as recorded", *thinned(x, y), colour=GREY, style="faint")
    return [line_chart("Training loss", [raw, Line("smoothed", *thinned(x, smoothed(y, len(y) / 50)))], x_label="step")]


def _metric_charts(evaluations: list[Record]) -> list[Markup]:
    if not evaluations:
        return []
    epochs = [as_number(record.get("epoch")) for record in evaluations]
    by_epoch = len(set(epochs)) == len(epochs)
    x = epochs if by_epoch else [as_number(record["step"]) for record in evaluations]
    names = metric_names(evaluations[-1]["metrics"], evaluations[-1]["headline"])
    return [_metric_chart(name, x, evaluations, "epoch" if by_epoch else "step") for name in names]


def _metric_chart(metric: str, x: list[float], evaluations: list[Record], x_label: str) -> Markup:
    """The model with its interval; baselines, which do not learn, as dashed lines."""
    lines = []
    for i, system in enumerate(dict.fromkeys(name for record in evaluations for name in record["metrics"])):
        values = [as_interval(record["metrics"].get(system, {}).get(metric)) for record in evaluations]
        mean, low, high = ([value[part] for value in values] for part in range(3))
        is_model = system.startswith("model")
        band = {"low": low, "high": high} if is_model else {}
        lines.append(Line(system, x, mean, colour=i % GREY, style="" if is_model else "dashed", **band))
    return line_chart(f"{metric} (valid)", lines, x_label=x_label, from_zero=True)
