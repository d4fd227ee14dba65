"""Windows of time, each predicted before it was trained on: how well the model knew what came next."""

from nestrec.report.charts import Line, line_chart
from nestrec.report.evaluations import as_interval
from nestrec.report.formats import as_number
from nestrec.report.markup import Markup, element
from nestrec.report.run_folder import Record, RunRecords

_DAY_MS = 86_400_000
_CHARTS_AT_FIRST = 4


def windows(run: RunRecords) -> Markup | None:
    """Each metric over the time of the events."""
    if not run.windows:
        return None
    first_ms = as_number(run.windows[0].get("from_ms"))
    days = [(as_number(record.get("from_ms")) - first_ms) / _DAY_MS for record in run.windows]
    names = list(dict.fromkeys(name for record in run.windows for name in record["metrics"]))
    charts = [_chart(name, days, run.windows) for name in names]
    events = sum(as_number(record.get("events")) for record in run.windows)
    line = f"{len(run.windows)} windows with {events:,.0f} events, each predicted before the model was trained on it."
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
