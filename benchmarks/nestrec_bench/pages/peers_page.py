"""Markdown page of the comparison with other systems."""

from collections.abc import Mapping, Sequence
from typing import Any

from nestrec_bench.pages.quality_page import FIRST, LAST, around_tables

Row = Mapping[str, Any]
_LEGEND = (
    "Brackets are quartiles over rounds. CPU ms: processor time per step and rank, in all threads. Ratio: samples/s of "
    "nestrec divided by those of the row, as the median of the ratios within rounds."
)
_PARTS = "Parts of nestrec's step on rank 0, in the training thread."


def peers_page(frame: Mapping[str, Any], page: str | None = None) -> str:
    """Return the text of docs/results/peers.md.

    Args:
        frame: Content of docs/results/peers.json.
        page: Present text of the page, in which the tables are replaced. None: return a new page.
    """
    before, after = ("# Peers\n\n", "\n") if page is None else around_tables(page)
    return f"{before}{FIRST}\n{peers_tables(frame)}\n{LAST}{after}"


def peers_tables(frame: Mapping[str, Any]) -> str:
    """Return the origin of the measurements, the table of systems, and the parts of nestrec's step, as Markdown."""
    hardware, rows = frame["hardware"], frame["rows"]
    versions = ", ".join(sorted({f"{row['system']} {row['version']}" for row in rows}))
    paragraphs = [
        f"Written on {frame['date']} by `{frame['command']}` on {hardware['cores']} cores of {hardware['cpu']}, torch "
        f"{hardware['torch']}, {versions}. {_LEGEND}",
        _table(["dense", "system", "samples/s", "CPU ms", "ratio", "rounds", "losses"], [_row(row) for row in rows]),
    ]
    for row in rows:
        if row.get("parts_ms"):
            parts = [[name, *(f"{time:.2f}" for time in times)] for name, times in row["parts_ms"].items()]
            paragraphs += [
                f"{_PARTS} Mode `{row['mode']}`, dense part `{row['dense']}`.",
                _table(["part", "ms", "of processor time"][: len(parts[0])], parts),
            ]
    return "\n\n".join(paragraphs)


def _row(row: Row) -> list[str]:
    rate = "{:,.0f} [{:,.0f}, {:,.0f}]".format(row["samples_per_s"], *row["samples_per_s_spread"])
    ratio = "{:.2f} [{:.2f}, {:.2f}]".format(row["paired_ratio"], *row["paired_ratio_spread"])
    losses = " ".join(f"{loss:.6f}" for loss in row["losses"])
    system = f"{row['system']} {row['mode']}"
    return [row["dense"], system, rate, f"{row['cpu_ms']:.1f}", ratio, str(len(row["samples_per_s_rounds"])), losses]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
