"""Console tables of evaluations and of rows of plain data."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nestrec.report.formatting import as_interval, best_baseline, has_baseline, metric_names, ratio_to_best, significant

_TABLE_WIDTH = 80


def evaluation_table(evaluation: Mapping[str, Any], *, title: str | None = None, max_metrics: int | None = 6) -> Table:
    """Return a table with one row per system and one column per metric.

    Next to the main metric is its ratio to the best baseline. Metrics that do not fit into 80 columns are left out, and
    the caption lists them.

    Args:
        evaluation: Plain data with `part`, `headline` (the main metric) and `metrics`.
        title: Title of the table.
        max_metrics: Maximum number of metrics; None shows all, regardless of the width.
    """
    metrics, headline = evaluation["metrics"], evaluation["headline"]
    names = metric_names(metrics, headline)
    with_ratio = has_baseline(metrics, headline)
    if max_metrics is not None:
        available_width = (
            _TABLE_WIDTH
            - max((len(system) for system in metrics), default=0)
            - (_min_column_width(best_baseline(metrics, headline)) if with_ratio else 0)
        )
        widths = np.cumsum([_min_column_width(name) for name in names])
        max_metrics = max(1, min(max_metrics, int(np.searchsorted(widths, available_width, side="right"))))
    names, left_out = names[:max_metrics], names[len(names[:max_metrics]) :]
    table = Table(
        title=Text(title or f"{evaluation['part']} split (± half of the 95% interval)"),
        title_justify="left",
        caption=Text(f"not shown: {', '.join(left_out)}") if left_out else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("", overflow="fold")
    for head in [*names[:1], *([f"over\n{best_baseline(metrics, headline)}"] if with_ratio else []), *names[1:]]:
        table.add_column(Text(head), justify="right", no_wrap=True)
    for system, values in metrics.items():
        cells = [_interval_cell(values.get(name)) for name in names]
        ratio = [_ratio_cell(ratio_to_best(metrics, system, headline))] if with_ratio else []
        table.add_row(Text(system), *cells[:1], *ratio, *cells[1:], style="bold" if system == "model" else None)
    return table


def _min_column_width(head: str | None) -> int:
    """Return the width of a column: its head or a number with a sign, and a space."""
    return max(len(head or ""), len("±0.0000")) + 1


def print_rows(rows: Sequence[Mapping[str, Any]], *, title: str | None = None, console: Console | None = None) -> None:
    """Print rows as a `bench_table` without truncation.

    If the table is too wide for the terminal, it is split into several tables that repeat the first column. A file or a
    pipe gets one wide table.
    """
    console = console or Console()
    widths = {name: _column_width(name, rows) for name in _names(rows)}
    if not console.is_terminal:
        wide = Console(file=console.file, width=max(80, sum(widths.values()) + 1))
        wide.print(bench_table(rows, title=title))
        return
    for i, names in enumerate(_groups(widths, console.width)):
        console.print(bench_table([{n: row.get(n) for n in names} for row in rows], title=title if i == 0 else None))


def bench_table(rows: Sequence[Mapping[str, Any]], *, title: str | None = None) -> Table:
    """Return a table of rows of plain data, with one column per field in the order of first appearance."""
    table = Table(title=Text(title) if title else None, title_justify="left")
    names = _names(rows)
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        is_numeric = bool(values) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        table.add_column(Text(name), justify="right" if is_numeric else "left")
    for row in rows:
        table.add_row(*(Text(_format(row.get(name))) for name in names))
    return table


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _column_width(name: str, rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the width of a column with padding and border."""
    return 3 + max(cell_len(name), *(cell_len(_format(row.get(name))) for row in rows))


def _groups(widths: Mapping[str, int], width: int) -> Iterator[list[str]]:
    """Yield groups of columns that fit next to each other; every group starts with the first column."""
    first, *others = widths or {"": 0}
    group = [first]
    used = widths.get(first, 0) + 1
    for name in others:
        if used + widths[name] > width and len(group) > 1:
            yield group
            group = [first]
            used = widths[first] + 1
        group.append(name)
        used += widths[name]
    yield group


def _interval_cell(value: Any) -> Text:
    if value is None:
        return Text("-")
    mean, low, high = as_interval(value)
    interval = f"\n±{(high - low) / 2:.4f}" if math.isfinite(low) and math.isfinite(high) else ""
    return Text.assemble(f"{mean:.4f}", (interval, "dim not bold"))


def _ratio_cell(ratio: float) -> Text:
    return Text(f"{ratio:.2f}x" if math.isfinite(ratio) else "-")


def _format(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return significant(value) if isinstance(value, float) else json.dumps(value, default=str)
