"""HTML page and console tables of `nestrec bench relay`: charts of P99 over load, and tables of the main columns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nestrec.report.charts import Line, line_chart
from nestrec.report.markup import STYLE, Markup, element

_SIZE = ("mode", "history", "candidates", "returning", "slo_ms")
_COLUMNS = {
    "max_qps": ("largest rate", (*_SIZE, "max_qps", "speedup", "bound_qps", "p99_ms", "hit_rate", "admitted")),
    "longest_history": ("longest history", ("mode", "returning", "slo_ms", "rate", "longest_history", "of_first_mode")),
    "load": ("latency over load", (*_SIZE, "load", "rate", "p50_ms", "p99_ms", "refused")),
}


def kind_of(row: Mapping[str, Any]) -> str:
    """Return the kind of a row, which is the name of the column that only rows of this kind have."""
    return next(name for name in _COLUMNS if name in row)


def summary(row: Mapping[str, Any]) -> str:
    """Return a row as one line of progress output."""
    return ", ".join(f"{name} {row[name]}" for name in _COLUMNS[kind_of(row)][1])


def short_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the main columns of the rows as tables, by title."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        title, columns = _COLUMNS[kind_of(row)]
        tables.setdefault(title, []).append({name: row[name] for name in columns})
    return tables


_MAX_DRAWN = 2.5
"""Top of a chart, as a multiple of the SLO; higher latencies are drawn there."""


def write_page(path: Path, frame: Mapping[str, Any]) -> None:
    """Write the page, which works without a network and without other files."""
    head = element(
        "head", Markup('<meta charset="utf-8">'), element("title", "relay · nestrec"), element("style", Markup(STYLE))
    )
    about = element(
        "p", f"{frame['command']} · {frame['date']} · {frame['hardware']['cpu']} {frame['hardware']['gpus']}"
    )
    tables = [[element("h2", title), _table(rows)] for title, rows in short_rows(frame["rows"]).items()]
    charts = [*_charts(frame["rows"]), *_tried_charts(frame["rows"])]
    body = element("main", element("h1", "Relay"), about, *charts, *(part for t in tables for part in t))
    path.write_text(f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n", encoding="utf-8")


def _charts(rows: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """Return charts of P99 over load, one per size; loads without a response in time have no point."""
    curves = [row for row in rows if "load" in row]
    charts = []
    for history, candidates in dict.fromkeys((row["history"], row["candidates"]) for row in curves):
        own = [row for row in curves if (row["history"], row["candidates"]) == (history, candidates)]
        lines = []
        for color, mode in enumerate(dict.fromkeys(row["mode"] for row in own)):
            points = [row for row in own if row["mode"] == mode and row["p99_ms"] is not None]
            lines.append(Line(mode, [100 * row["load"] for row in points], [row["p99_ms"] for row in points], color))
        slo = own[0]["slo_ms"]
        loads = [100 * row["load"] for row in own]
        lines.append(Line("SLO", [min(loads), max(loads)], [slo, slo], len(lines), "dashed"))
        title = f"P99, ms: {history} events, {candidates} candidates"
        charts.append(line_chart(title, lines, x_label="% of each mode's largest rate", from_zero=True))
    return charts


def _tried_charts(rows: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """Return charts of P99 over requests/s, one per model and size, with all rates that searches tried over HTTP."""
    found = [row for row in rows if row.get("tried") and row.get("in_process") is False]
    sizes = dict.fromkeys(_size_of(row) for row in found)
    return [_tried_chart([row for row in found if _size_of(row) == size]) for size in sizes]


def _size_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row.get("run"), row["biases"], str(row["history"]), row["candidates"]


def _tried_chart(rows: Sequence[Mapping[str, Any]]) -> Markup:
    first = rows[0]
    slo = float(rows[0]["slo_ms"])
    lines: list[Line] = []
    for row in {(row["mode"], row["returning"] if row["mode"] != "full" else 0): row for row in rows}.values():
        points = [(one["rate"], min(one["p99_ms"] or _MAX_DRAWN * slo, _MAX_DRAWN * slo)) for one in row["tried"]]
        name = row["mode"] if row["mode"] == "full" else f"{row['mode']}, {100 * row['returning']:.0f}% return"
        lines.append(Line(name, [rate for rate, _ in points], [p99 for _, p99 in points], len(lines)))
    rates = [rate for line in lines for rate in line.x]
    lines.append(Line("SLO", [min(rates), max(rates)], [slo, slo], len(lines), "dashed"))
    title = f"P99, ms: {first['history']} events, {first['candidates']} candidates, biases {first['biases']}"
    title += f" (at the top: {_MAX_DRAWN:g} times the SLO or more, and rejected requests)"
    return line_chart(title, lines, x_label="requests/s", from_zero=True)


def _table(rows: Sequence[Mapping[str, Any]]) -> Markup:
    head = element("tr", *(element("th", name) for name in rows[0]))
    body = [
        element("tr", *(element("td", "" if value is None else str(value)) for value in row.values())) for row in rows
    ]
    return element("table", head, *body)
