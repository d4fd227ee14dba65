import math
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from nestrec.report import bench_table, evaluation_table, print_rows
from nestrec.report.formatting import slice_rows, verdict_on


def render(table: Table, width: int = 160) -> str:
    console = Console(file=StringIO(), width=width, force_terminal=False)
    console.print(table)
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def line_with(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if start in line)


def make_evaluation(**extra: Any) -> dict[str, Any]:
    metrics = {
        "model": {"hr@10": [0.3, 0.29, 0.31], "ndcg@10": [0.2, 0.19, 0.21]},
        "popularity": {"hr@10": [0.1, 0.09, 0.11], "ndcg@10": [0.05, 0.04, 0.06]},
        **extra,
    }
    return {"part": "test", "headline": "ndcg@10", "metrics": metrics}


def test_evaluation_table_has_row_per_system() -> None:
    text = render(evaluation_table(make_evaluation()))
    head = line_with(text, "hr@10")
    assert head.index("ndcg@10") < head.index("hr@10")
    assert "4.00x" in line_with(text, "model")
    assert "1.00x" in line_with(text, "popularity   0.05")
    assert "±0.0100" in text


def test_evaluation_table_separates_protocols() -> None:
    text = render(evaluation_table(make_evaluation(**{"model, sampled": {"ndcg@10": [0.6, 0.5, 0.7]}})))
    row = line_with(text, "model, sampled")
    assert "0.6000" in row
    assert "x" not in row


def test_evaluation_table_fits_80_columns() -> None:
    values = {f"{name}@{k}": [0.1234, 0.1134, 0.1334] for k in (10, 50, 200) for name in ("hr", "ndcg", "mrr")}
    metrics = dict.fromkeys(("model", "popularity", "last item"), values)
    text = render(evaluation_table({"part": "test", "headline": "ndcg@10", "metrics": metrics}), width=80)
    assert "…" not in text
    assert line_with(text, "model").count("0.1234") == 6
    assert "not shown: hr@200, ndcg@200, mrr@200" in text


def test_evaluation_ratio_is_relative_to_best_baseline() -> None:
    text = render(evaluation_table(make_evaluation(**{"last item": {"ndcg@10": [0.25, 0.24, 0.26]}})))
    assert "ndcg@10  last item" in text
    assert "0.80x" in line_with(text, "model")
    assert "0.20x" in line_with(text, "popularity   0.05")


def test_evaluation_ratio_requires_baseline() -> None:
    evaluation = {
        "part": "test",
        "headline": "auc",
        "metrics": {"model": {"auc": [0.7, 0.6, 0.8]}, "model, [b]": {"auc": 0.6}},
    }
    text = render(evaluation_table(evaluation))
    assert "over" not in text
    assert "[b]" in text


@pytest.mark.parametrize(
    ("best", "outcome", "phrase"),
    [
        ([0.15, 0.14, 0.16], "wins", "leads its best baseline: ndcg@10 0.2000 against 0.1500 of 'last item'"),
        ([0.199, 0.18, 0.21], "unclear", "NO CLEAR LEAD"),
        ([0.15, math.nan, math.nan], "unclear", "NO CLEAR LEAD over the best baseline: ndcg@10 0.2000 against 0.1500"),
        ([0.25, 0.24, 0.26], "loses", "DOES NOT BEAT ITS BEST BASELINE: ndcg@10 0.2000 against 0.2500"),
    ],
)
def test_baseline_verdict_uses_best_baseline(best: list[float], outcome: str, phrase: str) -> None:
    evaluation = make_evaluation(**{"last item": {"ndcg@10": best}})
    verdict = verdict_on(evaluation["metrics"], "ndcg@10")
    assert verdict is not None
    assert (verdict.outcome, verdict.baseline) == (outcome, "last item")
    assert phrase in verdict.sentence


def test_bench_table_rows_may_differ_in_fields() -> None:
    rows = [{"name": "[red]a", "ms": 1.23456, "n": 1000}, {"name": "b", "ms": None, "parts": {"x": 1}}]
    text = render(bench_table(rows, title="bench"))
    assert "[red]a" in text
    assert "1.235" in text
    assert "1,000" in text
    assert '{"x": 1}' in line_with(text, "b    ")
    assert render(bench_table([])).strip() == ""


def test_wide_result_rows_are_not_truncated() -> None:
    rows = [{"mode": f"mode {i}", **{f"a_long_name_{j}": f"value {i}.{j}" for j in range(9)}} for i in range(2)]
    texts = {}
    for is_terminal in (True, False):
        file = StringIO()
        print_rows(
            rows, title="wide", console=Console(file=file, width=60, force_terminal=is_terminal, color_system=None)
        )
        texts[is_terminal] = file.getvalue()
        for cell in [name for row in rows for name in (*row, *row.values())]:
            assert cell in texts[is_terminal]
    assert max(len(line) for line in texts[True].splitlines()) <= 60
    assert len([line for line in texts[True].splitlines() if "mode 1" in line]) > 1
    assert len([line for line in texts[False].splitlines() if "mode 1" in line]) == 1


def test_slice_rows_have_main_metric_of_every_system() -> None:
    metrics = {"model": {"ndcg@10": [0.1, 0.0, 0.2]}, "popularity": {"ndcg@10": [0.0, 0.0, 0.0]}}
    evaluation = {**make_evaluation(), "slices": {"new items": {"count": 12, "metrics": metrics}}}
    row = {"slice": "new items", "members": 12, "metric": "ndcg@10", "model": 0.1, "popularity": 0.0}
    assert slice_rows(evaluation) == [row]
    assert slice_rows(make_evaluation()) == []
