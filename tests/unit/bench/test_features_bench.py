"""Rows of `nestrec bench features`: means over seeds, by slices, beside systems without a model."""

from nestrec.library.input_comparison import EXPERIMENTS, rows_of


def evaluation(value: float, of_new: float) -> dict[str, object]:
    metrics = {"model": {"ndcg@10": [value, value - 0.1, value + 0.1]}, "popularity": {"ndcg@10": [0.1, 0.0, 0.2]}}
    new = {
        "count": 12,
        "metrics": {"model": {"ndcg@10": [of_new, 0.0, 0.5]}, "popularity": {"ndcg@10": [0.0, 0.0, 0.0]}},
    }
    return {
        "task": "retrieval",
        "headline": "ndcg@10",
        "metrics": metrics,
        "slices": {"new items": new, "history 1-4": new},
    }


def test_rows_are_means_over_seeds() -> None:
    found = {"ids": [evaluation(0.2, 0.0), evaluation(0.4, 0.0)], "attributes": [evaluation(0.5, 0.3)] * 2}
    rows = list(rows_of("beauty", EXPERIMENTS["beauty"], found))
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
