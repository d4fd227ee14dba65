"""The model: how many parameters it has and where they are."""

from typing import Any

from nestrec.report.markup import Markup, element
from nestrec.report.run_folder import RunRecords
from nestrec.report.sections.dataset import facts_table


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
