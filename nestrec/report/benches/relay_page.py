"""The result file of `nestrec bench relay` as one page: P99 over load, and the tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nestrec.report.benches.relay_tables import short_rows
from nestrec.report.charts import Line, line_chart
from nestrec.report.markup import Markup, element
from nestrec.report.style import STYLE


def write_page(path: Path, frame: Mapping[str, Any]) -> None:
    """Write the page; it needs no network and no other file."""
    head = element(
        "head", Markup('<meta charset="utf-8">'), element("title", "relay · nestrec"), element("style", Markup(STYLE))
    )
    about = element(
        "p", f"{frame['command']} · {frame['date']} · {frame['hardware']['cpu']} {frame['hardware']['gpus']}"
    )
    tables = [[element("h2", title), _table(rows)] for title, rows in short_rows(frame["rows"]).items()]
    body = element(
        "main", element("h1", "Relay"), about, *_charts(frame["rows"]), *(part for t in tables for part in t)
    )
    path.write_text(f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n", encoding="utf-8")


def _charts(rows: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """P99 over load, one chart a size; loads at which nobody was answered in time have no point."""
    curves = [row for row in rows if "load" in row]
    charts = []
    for history, candidates in dict.fromkeys((row["history"], row["candidates"]) for row in curves):
        own = [row for row in curves if (row["history"], row["candidates"]) == (history, candidates)]
        lines = []
        for colour, mode in enumerate(dict.fromkeys(row["mode"] for row in own)):
            points = [row for row in own if row["mode"] == mode and row["p99_ms"] is not None]
            lines.append(Line(mode, [100 * row["load"] for row in points], [row["p99_ms"] for row in points], colour))
        slo, loads = own[0]["slo_ms"], [100 * row["load"] for row in own]
        lines.append(Line("SLO", [min(loads), max(loads)], [slo, slo], len(lines), "dashed"))
        title = f"P99, ms: {history} events, {candidates} candidates"
        charts.append(line_chart(title, lines, x_label="% of each mode's largest rate", from_zero=True))
    return charts


def _table(rows: Sequence[Mapping[str, Any]]) -> Markup:
    head = element("tr", *(element("th", name) for name in rows[0]))
    body = [
        element("tr", *(element("td", "" if value is None else str(value)) for value in row.values())) for row in rows
    ]
    return element("table", head, *body)
