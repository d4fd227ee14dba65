"""Features benchmark: means over seeds by slice, for models and baselines."""

import json
from collections.abc import Generator
from pathlib import Path

from nestrec.base.config_overrides import apply_overrides
from nestrec.training.recipes import recipe
from nestrec_bench.bench import ExtraFields, Row
from nestrec_bench.quality.features_bench import BENCH
from nestrec_bench.quality.input_comparison import EXPERIMENTS, Experiment, InputComparison, _config, evaluation_rows
from support.featured_log import write_featured_log


def evaluation(value: float, new_item_value: float) -> dict[str, object]:
    metrics = {"model": {"ndcg@10": [value, value - 0.1, value + 0.1]}, "popularity": {"ndcg@10": [0.1, 0.0, 0.2]}}
    new = {
        "count": 12,
        "metrics": {"model": {"ndcg@10": [new_item_value, 0.0, 0.5]}, "popularity": {"ndcg@10": [0.0, 0.0, 0.0]}},
    }
    return {
        "task": "retrieval",
        "headline": "ndcg@10",
        "metrics": metrics,
        "slices": {"new items": new, "history 1-4": new},
    }


def test_features_bench_rows_are_means_over_seeds() -> None:
    found = {"ids": [evaluation(0.2, 0.0), evaluation(0.4, 0.0)], "attributes": [evaluation(0.5, 0.3)] * 2}
    rows = list(evaluation_rows("beauty", EXPERIMENTS["beauty"], found))
    values = {(row["inputs"], row["part"]): (row["value"], row["low"], row["high"], row["seeds"]) for row in rows}
    assert values == {
        ("ids", "all"): (0.3, 0.2, 0.4, 2),
        ("ids", "new items"): (0.0, 0.0, 0.5, 2),
        ("attributes", "all"): (0.5, 0.4, 0.6, 2),
        ("attributes", "new items"): (0.3, 0.0, 0.5, 2),
        ("popularity", "all"): (0.1, 0.0, 0.2, 2),
        ("popularity", "new items"): (0.0, 0.0, 0.0, 2),
    }
    assert {row["task"] for row in rows} == {"retrieval"}


def test_features_bench_reuses_existing_runs(tmp_path, monkeypatch) -> None:
    data = write_featured_log(tmp_path / "log")
    both = {"ids": {}, "brands": {"task.inputs.item_features": ("brand",)}}
    monkeypatch.setitem(EXPERIMENTS, "tiny", Experiment("demo", both, ("ndcg@10",), folder=data.name))
    small = "task.encoder.dim=8+task.encoder.head_dim=4+task.negatives.num_negatives=4+training.max_steps=2"
    small += "+training.device=cpu"
    options = {
        "what": "tiny",
        "data": str(data.parent),
        "output": str(tmp_path / "runs"),
        "seeds": "1",
        "options": small,
    }
    for inputs in both:
        list(BENCH.measure(apply_overrides(InputComparison(), {**options, "inputs": inputs})))
    modified_ns = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/eval/test.json")}
    rows, more = _collect(BENCH.measure(apply_overrides(InputComparison(), options)))
    assert len(modified_ns) == 2
    assert modified_ns == {path: path.stat().st_mtime_ns for path in modified_ns}
    assert {row["inputs"] for row in rows} >= {"ids", "brands", "popularity", "last item"}
    found, rare = more["comparisons"]
    assert (found["recipe"], found["against"], found["what"]) == ("demo_brands", "demo_ids", "tiny")
    assert (rare["part"], found["part"]) == ("at most 5 events", "all")
    assert rare["users"] == found["users"] - sum(_other_items(path) for path in modified_ns) / 2
    assert [row["inputs"] for row in more["verdicts"]] == ["ids", "brands"]
    assert all("baseline" in row["said"].lower() for row in more["verdicts"])


def _other_items(file: Path) -> int:
    return int(json.loads(file.read_text())["slices"]["other items"]["count"])


def _collect(measured: Generator[Row, None, ExtraFields]) -> tuple[list[Row], ExtraFields]:
    rows = []
    while True:
        try:
            rows.append(next(measured))
        except StopIteration as end:
            return rows, end.value


def test_features_bench_compares_recipe_with_auto(tmp_path) -> None:
    data = write_featured_log(tmp_path / "log")
    experiment = Experiment("demo", {"auto": {"task.kind": "retrieval"}, "recipe": {}}, folder=data.name)
    cfg = apply_overrides(InputComparison(), {"data": str(data.parent)})
    automatic, by_hand = (_config(cfg, experiment, inputs, 1) for inputs in ("auto", "recipe"))
    assert by_hand.task.evaluation == automatic.task.evaluation != recipe("demo").task.evaluation
    assert by_hand.task.split == automatic.task.split
    assert by_hand.task.encoder == recipe("demo").task.encoder
