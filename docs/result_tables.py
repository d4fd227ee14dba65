"""Writes the tables of pages anew from the result files that they name: `make results`.

    <!-- table overload.json: load, rate, goodput, p99_ms where load=2x -->
    ... replaced by the rows ...
    <!-- /table -->

`results/` is where files are looked for. A column may be renamed: `of_peak as of peak`.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"(<!-- table (\S+?): (.*?) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)


def rewritten(text: str) -> str:
    """A page with its tables as the result files have them now."""
    return BLOCK.sub(lambda found: found[1] + _table(found[2], " ".join(found[3].split())) + found[5], text)


def _table(file: str, wanted: str) -> str:
    columns, _, condition = wanted.partition(" where ")
    names = [tuple(part.strip().partition(" as ")[::2]) for part in columns.split(",")]
    frame = json.loads((DOCS / "results" / file).read_text())
    rows = [row for row in frame["rows"] if _is_chosen(row, condition)]
    head = [label or name for name, label in names]
    lines = [head, ["---"] * len(head), *([_cell(row.get(name)) for name, _ in names] for row in rows)]
    origin = f"`{frame['command']}`, {frame['date'][:16].replace('T', ' ')} UTC, {_machine(frame['hardware'])}\n"
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in lines] + ["", origin])


def _is_chosen(row: dict[str, Any], condition: str) -> bool:
    pairs = [part.partition("=")[::2] for part in condition.split(" and ") if part]
    return all(str(row.get(name.strip())) == value.strip() for name, value in pairs)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else f"{value:,}" if type(value) is int else str(value)


def _machine(hardware: dict[str, Any]) -> str:
    return ", ".join([*(hardware.get("gpus") or []), f"{hardware.get('cores', '?')} cores"])


if __name__ == "__main__":
    pages = [Path(name) for name in sys.argv[1:]] or [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    for page in pages:
        text = page.read_text()
        if (new := rewritten(text)) != text:
            page.write_text(new)
            print(f"written anew: {page.relative_to(DOCS.parent)}")
