"""Console tables of `nestrec bench balance`: predicted balance, balance measured on real ranks, and unique keys."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
NUMBER_COLUMNS = (
    "imbalance", "10% uniform", "floor", "10% gaussian", "floor", "token gap", "window", "partition ms", "CPU ms",
)  # fmt: skip
LEGEND = """imbalance: (max - mean) / max of the predicted cost; in published rows, the waiting that authors measured.
uniform, gaussian: imbalance if the true cost of each sample has noise that policies cannot predict; floor: approximate
minimum that any policy could reach then.
window: upper bound of the waiting inside a frozen window, reached if all ranks computed micro-batches in step."""
MEASURED_LEGEND = """waiting: time in collectives before the last rank enters them, mean over ranks, over the step.
CPU: processor time of forward and backward passes; speed-up, CPU: that of the slowest rank in processor time, as if
each rank had its own core.
data wait: time that the step waited for its batch, which the data lanes distribute. Values are medians [quartiles];
policies take turns on the same batches."""
LEAST_BASELINE = {"turbogr-kuai": (0.35, 6000.0), "freescale": (0.20, 0.0)}
"""Minimum imbalance and token gap of `fixed`, by length distribution; below them, a comparison is void."""


def show_balance(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print the rows, one table per setting."""
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    predicted = [row for row in rows if "partition_ms" in row and "step_ms" not in row]
    for (lengths, ranks), part in _by_setting(predicted).items():
        title = f"balance: {lengths}, {ranks} ranks, {part[0]['batch']} samples each"
        table = Table(title=title, title_justify="left")
        for name in ("cost", "policy"):
            table.add_column(name)
        for name in NUMBER_COLUMNS:
            table.add_column(name, justify="right")
        for cells in _table_rows(part):
            table.add_row(*cells)
        console.print(table)
    console.print(LEGEND, markup=False, highlight=False)
    for line in void_lines(predicted):
        console.print(line, style="red")
    for (lengths, ranks), part in _by_setting([row for row in rows if "unique_keys_ranks" in row]).items():
        console.print(_keys_table(f"unique keys: {lengths}, {ranks} ranks, {part[0]['batch']} samples each", part))
    measured = [row for row in rows if "step_ms" in row]
    if measured:
        _show_measured(measured, console)


def void_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line for each setting whose baseline is too balanced for a meaningful comparison."""
    lines = []
    for row in rows:
        if row["measured"] or row["policy"] != "fixed" or row["noise"] != "none":
            continue
        least, least_gap = LEAST_BASELINE.get(row["lengths"], (0.0, 0.0))
        if row["imbalance"] < least or row["max_token_gap"] < least_gap:
            setting = f"{row['lengths']} {row['ranks']} x {row['batch']}, cost {row['cost']}"
            found = f"{row['imbalance']:.1%} and a token gap of {row['max_token_gap']:.0f}"
            lines.append(
                f"void: {setting}: the fixed baseline shows {found}, less than {least:.0%} and {least_gap:.0f}"
            )
    return lines


def _show_measured(rows: Sequence[Row], console: Console) -> None:
    """Print the rows that real ranks measured, as medians with quartiles."""
    for (lengths, ranks), part in _by_setting(rows).items():
        title = (
            f"balance, measured: {lengths}, {ranks} ranks on {part[0]['cores']} cores, {part[0]['batch']} samples each"
        )
        table = Table(title=title, title_justify="left")
        table.add_column("policy")
        for name in ("waiting", "CPU imbalance", "predicted", "step ms", "speed-up", "speed-up, CPU", "data wait ms"):
            table.add_column(name, justify="right")
        for row in part:
            table.add_row(
                row["policy"],
                _with_quartiles(row, "imbalance", ".1%"),
                _with_quartiles(row, "cpu_imbalance", ".1%"),
                f"{row['predicted_imbalance']:.1%}",
                _with_quartiles(row, "step_ms", ".0f"),
                _with_quartiles(row, "speedup", ".2f"),
                _with_quartiles(row, "speedup_cpu", ".2f"),
                _with_quartiles(row, "data_wait_ms", ".2f"),
            )
        console.print(table)
    console.print(MEASURED_LEGEND, markup=False, highlight=False)


def _by_setting(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    settings: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        settings.setdefault((row["lengths"], row["ranks"]), []).append(row)
    return settings


def _table_rows(rows: Sequence[Row]) -> Iterator[list[str]]:
    by_policy: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        name = row.get("cost") or row["system"]
        by_policy.setdefault((name, row["policy"]), {})[row["noise"]] = row
    for (name, policy), noises in by_policy.items():
        first = next(iter(noises.values()))
        yield [
            name,
            policy,
            _percent(first["straggler"] if first["imbalance"] is None else first["imbalance"]),
            *(
                _percent(noises[noise][field]) if noise in noises else ""
                for noise in ("uniform", "gaussian")
                for field in ("imbalance", "noise_floor")
            ),
            _number(first["max_token_gap"], ",.0f"),
            _percent(first.get("window_imbalance")),
            _number(first["partition_ms"], ".2f"),
            _number(first.get("partition_cpu_ms"), ".2f"),
        ]


def _keys_table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for name in ("batch", "ranks", "over fixed", "micro-batches", "over fixed, in order", "clustered", "over fixed"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["policy"],
            _number(row["unique_keys_batch"], ",.0f"),
            _number(row["unique_keys_ranks"], ",.0f"),
            _number(row["over_fixed_ranks"], "+.2%"),
            _number(row["unique_keys_micro_batches"], ",.0f"),
            _number(row["over_fixed_micro_batches"], "+.2%"),
            _number(row["unique_keys_clustered"], ",.0f"),
            _number(row["over_fixed_clustered"], "+.2%"),
        )
    return table


def _percent(part: float | None) -> str:
    return _number(part, ".2%")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _with_quartiles(row: Row, name: str, form: str) -> str:
    low, high = row[f"{name}_quartiles"]
    return f"{row[name]:{form}} [{low:{form}}, {high:{form}}]"
