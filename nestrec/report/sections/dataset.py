"""The data: counts, lengths and popularity."""

from typing import Any

from nestrec.report.charts import histogram
from nestrec.report.formats import as_number, significant
from nestrec.report.markup import Markup, element
from nestrec.report.run_folder import RunRecords

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
