"""Rows of `nestrec bench relay` for people: what of them fits a line, and what a terminal's width."""

from collections.abc import Mapping, Sequence
from typing import Any

_SIZE = ("mode", "history", "candidates", "returning", "slo_ms")
_COLUMNS = {
    "max_qps": ("largest rate", (*_SIZE, "max_qps", "speedup", "bound_qps", "p99_ms", "hit_rate", "admitted")),
    "longest_history": ("longest history", ("mode", "returning", "slo_ms", "rate", "longest_history", "of_first_mode")),
    "load": ("latency over load", (*_SIZE, "load", "rate", "p50_ms", "p99_ms", "refused")),
}


def kind_of(row: Mapping[str, Any]) -> str:
    """What a row is about: the column that only its kind has."""
    return next(name for name in _COLUMNS if name in row)


def summary(row: Mapping[str, Any]) -> str:
    """A row while the bench goes on."""
    return ", ".join(f"{name} {row[name]}" for name in _COLUMNS[kind_of(row)][1])


def short_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Tables by title."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        title, columns = _COLUMNS[kind_of(row)]
        tables.setdefault(title, []).append({name: row[name] for name in columns})
    return tables
