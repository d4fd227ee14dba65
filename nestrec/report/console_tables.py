"""Tables for the terminal."""

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
    """Systems as rows and metrics as columns; beside the headline metric, how many times that of the best baseline.

    `evaluation` is plain data: `part`, `headline` and `metrics` of system to metric to [mean, low, high]. As many
    metrics as fit into 80 columns, six at most; those left out are named below the table.
    """
    metrics, headline = evaluation["metrics"], evaluation["headline"]
    names = metric_names(metrics, headline)
    with_ratio = has_baseline(metrics, headline)
    if max_metrics is not None:
        room = (
            _TABLE_WIDTH
            - max((len(system) for system in metrics), default=0)
            - (_least_width(best_baseline(metrics, headline)) if with_ratio else 0)
        )
        widths = np.cumsum([_least_width(name) for name in names])
        max_metrics = max(1, min(max_metrics, int(np.searchsorted(widths, room, side="right"))))
    names, left_out = names[:max_metrics], names[len(names[:max_metrics]) :]
    table = Table(
        title=Text(title or f"{evaluation['part']} part (± half of the 95% interval)"),
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


def _least_width(head: str | None) -> int:
    """Of a column: its head or a figure with its sign, and a blank."""
    return max(len(head or ""), len("±0.0000")) + 1


def print_rows(rows: Sequence[Mapping[str, Any]], *, title: str | None = None, console: Console | None = None) -> None:
    """Print a `bench_table` of which nothing is cut off.

    A terminal gets several where one is too wide for it, each with the first column; a file or a pipe gets one.
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
    """Any rows of plain data: a column for each field in the order in which fields first appear."""
    table = Table(title=Text(title) if title else None, title_justify="left")
    names = _names(rows)
    for name in names:
        values = [row[name] for row in rows if row.get(name) is not None]
        is_numeric = bool(values) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        table.add_column(Text(name), justify="right" if is_numeric else "left")
    for row in rows:
        table.add_row(*(Text(_shown(row.get(name))) for name in names))
    return table


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _column_width(name: str, rows: Sequence[Mapping[str, Any]]) -> int:
    """With its padding and border."""
    return 3 + max(cell_len(name), *(cell_len(_shown(row.get(name))) for row in rows))


def _groups(widths: Mapping[str, int], width: int) -> Iterator[list[str]]:
    """Names of columns that fit beside each other, the first column in every group."""
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


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return significant(value) if isinstance(value, float) else json.dumps(value, default=str)
