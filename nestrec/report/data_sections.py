"""Sections of the run page about data, model and configuration.

The data: counts, lengths and popularity.

What is needed to repeat the run: versions, config and what happened.

The model: how many parameters it has and where they are.
"""

import json
from typing import Any

from nestrec.report.charts import histogram
from nestrec.report.formatting import as_number, significant
from nestrec.report.markup import Markup, element
from nestrec.report.run_records import RunRecords

_HISTOGRAMS = {
    "length_histogram": ("Users by number of events", "events of a user", "users"),
    "popularity_histogram": ("Items by number of events", "events of an item", "items"),
}


def dataset(run: RunRecords) -> Markup | None:
    """From the dataset card."""
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
        facts_table("Bad rows set aside", bad),
        facts_table("Events of a user", card.get("lengths", {})),
        facts_table("Popularity", card.get("popularity", {})),
    ]
    return element("div", element("div", charts, class_="charts"), element("div", tables, class_="tables"))


def facts_table(title: str, facts: dict[str, Any]) -> Markup | None:
    """Names and values; empty values are left out."""
    rows = [
        element("tr", element("td", name.replace("_", " ")), element("td", _shown(value)))
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


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(inner)}" for name, inner in value.items())
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return significant(as_number(value)) if isinstance(value, float) else str(value)


def versions(run: RunRecords) -> Markup | None:
    """Software, machine and command."""
    command = run.versions.get("command")
    table = facts_table("Software and machine", {name: str(v) for name, v in run.versions.items() if name != "command"})
    shown = element("pre", str(command)) if command else None
    return element("div", shown, element("div", table, class_="tables")) if run.versions else None


def configuration(run: RunRecords) -> Markup | None:
    """The resolved config, folded away."""
    text = json.dumps(run.config, indent=2, ensure_ascii=False)
    return element("details", element("summary", "Show"), element("pre", text)) if run.config else None


def events(run: RunRecords) -> Markup | None:
    """Resumptions, warnings and the like."""
    rows = [element("li", element("b", f"step {event['step']:,}"), " ", event["text"]) for event in run.events]
    return element("ul", rows) if rows else None


def model(run: RunRecords) -> Markup | None:
    """From what the run counted when it started."""
    parameters: dict[str, Any] = run.parameters
    if not parameters:
        return None
    tables = {
        name: f"{table['rows']:,} rows of {table['dim']:,}" if table.get("rows") else f"rows of {table['dim']:,}"
        for name, table in parameters.get("tables", {}).items()
    }
    in_tables = sum((table.get("rows") or 0) * table["dim"] for table in parameters.get("tables", {}).values())
    encoder = run.config.get("task", {}).get("encoder", {})
    of_model = {name: encoder.get(name) for name in ("kind", "dim", "num_layers", "num_heads", "max_length")}
    counts = {"dense parameters": parameters.get("dense"), "parameters in tables": in_tables or None}
    facts = [facts_table("Parameters", {**of_model, **counts}), facts_table("Tables", tables)]
    note = "A table without a number of rows grows with the keys that it meets." if _grows(parameters) else None
    return element("div", element("div", facts, class_="tables"), element("p", note, class_="quiet") if note else None)


def _grows(parameters: dict[str, Any]) -> bool:
    return any(not table.get("rows") for table in parameters.get("tables", {}).values())
