"""Quality rows as a Markdown page."""

from collections.abc import Mapping, Sequence
from typing import Any

from nestrec.base.errors import UserError
from nestrec.report.quality import METRICS

Row = Mapping[str, Any]


FIRST, LAST = "<!-- tables -->", "<!-- end of tables -->"
"""The lines between which the tables of a page stand; what people write around them is kept."""


def quality_page(frame: Mapping[str, Any], page: str | None = None) -> str:
    """The text of docs/results/quality.md, from the frame of docs/results/quality.json.

    page: the page as it is, whose tables are replaced; none makes a new one.
    """
    before, after = ("# Quality\n\n", "\n") if page is None else around_tables(page)
    return f"{before}{FIRST}\n{quality_tables(frame)}\n{LAST}{after}"


def quality_tables(frame: Mapping[str, Any]) -> str:
    """Rows, baselines and comparisons as Markdown tables."""
    rows, metrics = frame["rows"], _metrics(frame["rows"])
    heads = ["recipe", "dataset", "model", "seeds", "best epoch / epochs", "users", "trained on", *metrics]
    paragraphs = [
        f"Written on {frame['date']} by `{frame['command']}`. Values are means over users of each user's average over "
        "seeds; brackets are 95% bootstrap intervals over users, ± is the standard deviation between seeds.",
        _table(heads, [_row(row, metrics) for row in rows]),
    ]
    if any(row.get("baselines") for row in rows):
        paragraphs += ["### Baselines", _table(["dataset", "system", *metrics], _baselines(rows))]
    comparisons = frame.get("comparisons", ())
    if comparisons:
        names = [name for name in METRICS if any(f"{name}_difference" in row for row in comparisons)]
        heads = ["recipe", "against", "dataset", "seeds", "users", *names]
        legend = (
            "First minus second, paired over users; ± is the standard error that comes from seeds alone, paired over "
            "seeds where both have the same."
        )
        table = _table(heads, [_difference(row, names) for row in comparisons])
        paragraphs += ["### Paired differences", legend, table]
    return "\n\n".join(paragraphs)


def around_tables(page: str) -> tuple[str, str]:
    """What stands before and after the tables of a page."""
    before, first, rest = page.partition(FIRST)
    _, last, after = rest.partition(LAST)
    if not (first and last):
        remedy = f"add the lines {FIRST} and {LAST}, or name a page that does not exist yet"
        raise UserError("has no place for the tables", field="page", value=before[:40], remedy=remedy)
    return before, after


def _metrics(rows: Sequence[Row]) -> list[str]:
    return [name for name in METRICS if any(name in row for row in rows)]


def _row(row: Row, metrics: Sequence[str]) -> list[str]:
    about = [row["recipe"], row["dataset"], row["model"], _seeds(row["seeds"]), _epochs(row), f"{row['users']:,}"]
    return [*about, row["device"], *(_value(row, name) for name in metrics)]


def _value(row: Row, name: str) -> str:
    if name not in row:
        return "-"
    low, high = row[f"{name}_interval"]
    spread = row.get(f"{name}_seed_sd")
    return f"{row[name]:.4f} [{low:.4f}, {high:.4f}]" + (f" ± {spread:.4f}" if spread is not None else "")


def _baselines(rows: Sequence[Row]) -> list[list[str]]:
    """Baselines do not depend on the recipe: each once for a dataset."""
    found: dict[tuple[str, str], list[str]] = {}
    metrics = _metrics(rows)
    for row in rows:
        for system, values in row.get("baselines", {}).items():
            shown = [f"{values[name]:.4f}" if name in values else "-" for name in metrics]
            found.setdefault((row["dataset"], system), [row["dataset"], system, *shown])
    return list(found.values())


def _difference(row: Row, metrics: Sequence[str]) -> list[str]:
    seeds = f"{_seeds(row['seeds'])} / {_seeds(row['against_seeds'])}"
    about = [row["recipe"], row["against"], row["dataset"], seeds, f"{row['users']:,}"]
    return [*about, *(_difference_cell(row, f"{name}_difference") for name in metrics)]


def _difference_cell(row: Row, name: str) -> str:
    if name not in row:
        return "-"
    low, high = row[f"{name}_interval"]
    error = row.get(f"{name}_seed_error")
    return f"{row[name]:+.4f} [{low:+.4f}, {high:+.4f}]" + (f" ± {error:.4f}" if error is not None else "")


def _epochs(row: Row) -> str:
    pairs = zip(row["best_epochs"], row["epochs"], strict=True)
    return ", ".join("-" if best is None else f"{best} / {made}" for best, made in pairs)


def _seeds(seeds: Sequence[int]) -> str:
    return ", ".join(str(seed) for seed in seeds)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
