"""Sections of the run page about the dataset, the model, software versions, configuration and events of the run."""

import json
from typing import Any

from nestrec.report.charts import histogram
from nestrec.report.formatting import as_number, significant
from nestrec.report.markup import Markup, element
from nestrec.report.run_records import RunRecords

_HISTOGRAMS = {
    "length_histogram": ("Users by number of events", "events per user", "users"),
    "popularity_histogram": ("Items by number of events", "events per item", "items"),
}


def dataset(run: RunRecords) -> Markup | None:
    """Return the section with statistics of the dataset card."""
    card = run.card
    if not card:
        return None
    charts = [_histogram(card, name) for name in _HISTOGRAMS]
    counts = dict(card.get("counts", {}))
    removed, bad = counts.pop("filtered", {}), counts.pop("quarantined", {})
    facts = {"name": card.get("name"), "source": card.get("source_format"), **counts}
    tables = [
        facts_table("Counts", facts),
        facts_table("Events removed by filters", removed),
        facts_table("Quarantined rows", bad),
        facts_table("Events per user", card.get("lengths", {})),
        facts_table("Popularity", card.get("popularity", {})),
    ]
    return element("div", element("div", charts, class_="charts"), element("div", tables, class_="tables"))


def facts_table(title: str, facts: dict[str, Any]) -> Markup | None:
    """Return a table of names and values, without empty values; None if all are empty."""
    rows = [
        element("tr", element("td", name.replace("_", " ")), element("td", _format(value)))
        for name, value in facts.items()
        if value not in (None, "", {}, [])
    ]
    return element("div", element("h3", title), element("table", rows, class_="numbers facts")) if rows else None


def _histogram(card: dict[str, Any], name: str) -> Markup | None:
    edges, counts = card.get(name, {}).get("edges", []), card.get(name, {}).get("counts", [])
    if not counts or len(edges) != len(counts) + 1 or edges[0] <= 0:
        return None
    title, x_label, y_label = _HISTOGRAMS[name]
    return histogram(title, edges, counts, x_label=x_label, y_label=y_label)


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_format(inner)}" for name, inner in value.items())
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return significant(as_number(value)) if isinstance(value, float) else str(value)


def versions(run: RunRecords) -> Markup | None:
    """Return the section with versions of the software, the machine and the command."""
    command = run.versions.get("command")
    table = facts_table("Software and machine", {name: str(v) for name, v in run.versions.items() if name != "command"})
    shown = element("pre", str(command)) if command else None
    return element("div", shown, element("div", table, class_="tables")) if run.versions else None


def configuration(run: RunRecords) -> Markup | None:
    """Return the section with the resolved config, collapsed by default."""
    text = json.dumps(run.config, indent=2, ensure_ascii=False)
    return element("details", element("summary", "Show"), element("pre", text)) if run.config else None


def events(run: RunRecords) -> Markup | None:
    """Return the section with resumes, warnings and other events of the run."""
    rows = [element("li", element("b", f"step {event['step']:,}"), " ", event["text"]) for event in run.events]
    return element("ul", rows) if rows else None


def model(run: RunRecords) -> Markup | None:
    """Return the section with the numbers of parameters of the model and its tables."""
    parameters: dict[str, Any] = run.parameters
    if not parameters:
        return None
    tables = {
        name: f"{table['rows']:,} rows of {table['dim']:,}" if table.get("rows") else f"rows of {table['dim']:,}"
        for name, table in parameters.get("tables", {}).items()
    }
    num_table_parameters = sum(
        (table.get("rows") or 0) * table["dim"] for table in parameters.get("tables", {}).values()
    )
    encoder = run.config.get("task", {}).get("encoder", {})
    sizes = {name: encoder.get(name) for name in ("kind", "dim", "num_layers", "num_heads", "max_length")}
    counts = {"dense parameters": parameters.get("dense"), "parameters in tables": num_table_parameters or None}
    facts = [facts_table("Parameters", {**sizes, **counts}), facts_table("Tables", tables)]
    note = "A table without a number of rows grows with its keys." if _grows(parameters) else None
    return element("div", element("div", facts, class_="tables"), element("p", note, class_="quiet") if note else None)


def _grows(parameters: dict[str, Any]) -> bool:
    return any(not table.get("rows") for table in parameters.get("tables", {}).values())
