"""The summary of a comparison of methods to keep a model up to date."""

from pathlib import Path
from typing import Any

import pytest

from nestrec.base.errors import UserError
from nestrec_bench.quality.fresh_comparison import FreshComparison, compare, summary


def row(way: str, seed: int, window: int, *, value: float, events: int) -> dict[str, Any]:
    same = {"recipe": "mine", "replay_share": 0.2, "metric": "auc", "from": f"day {window}", "events": 10}
    bounds = {"low": value - 0.1, "high": value + 0.1}
    return {**same, **bounds, "way": way, "seed": seed, "window": window, "value": value, "train_s": events / 10,
            "events_trained": events}  # fmt: skip


def test_fresh_comparison_excludes_first_window() -> None:
    values = {"frozen": (0.6, 0.6, 0.5), "anew": (0.6, 0.7, 0.6), "followed": (0.6, 0.8, 0.9)}
    trained = {"frozen": (100, 0, 0), "anew": (100, 110, 120), "followed": (10, 10, 10)}
    rows = [
        row(way, seed, window, value=value + seed / 100, events=trained[way][window])
        for way in values
        for seed in (1, 2)
        for window, value in enumerate(values[way])
    ]
    found = list(summary(rows))
    windows = {(r["way"], r["window"]): r for r in found if r["what"] == "quality_of_window"}
    assert len(windows) == 9
    assert windows["anew", 1]["value"] == pytest.approx(0.715)
    assert windows["anew", 1]["low"] == pytest.approx(0.615)
    ways = {r["way"]: r for r in found if r["what"] == "quality_in_all"}
    assert {way: (r["windows"], r["seeds"]) for way, r in ways.items()} == dict.fromkeys(values, (2, 2))
    assert ways["frozen"]["ahead"] == ways["frozen"]["ahead_high"] == 0
    assert ways["anew"]["ahead"] == pytest.approx(0.1)
    assert ways["followed"]["ahead"] == pytest.approx(0.3)
    assert 0.2 <= ways["followed"]["ahead_low"] < 0.3 < ways["followed"]["ahead_high"] <= 0.4 + 1e-9
    assert {way: r["events_trained"] for way, r in ways.items()} == {"frozen": 100, "anew": 330, "followed": 130}
    assert ways["followed"]["train_s"] == pytest.approx(13)


def test_fresh_comparison_without_windows_has_no_summary() -> None:
    assert list(summary([])) == []
    first = list(summary([row(way, 1, 0, value=0.5, events=10) for way in ("frozen", "anew", "followed")]))
    assert {found["what"] for found in first} == {"quality_of_window"}


def test_fresh_comparison_requires_seeds(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one seed is required"):
        next(compare(FreshComparison(seeds=()), tmp_path))
