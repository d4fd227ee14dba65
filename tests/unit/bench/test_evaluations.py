"""Evaluations benchmark: rows of evaluated runs of any task."""

import json

import pytest

from nestrec.base.errors import UserError
from nestrec_bench.quality.evaluations_bench import evaluation_rows


def test_evaluations_bench_rows_contain_every_system(tmp_path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"name": "r", "training": {"seed": 7}}))
    (tmp_path / "card.json").write_text(json.dumps({"name": "d"}))
    metrics = {
        "model": {"auc": [0.7, 0.6, 0.8], "ne": [0.9, float("nan"), float("nan")]},
        "logistic": {"auc": [0.6, 0.5, 0.7]},
    }
    (tmp_path / "eval" / "test.json").write_text(json.dumps({"metrics": metrics}))
    common = {"recipe": "r", "dataset": "d", "seed": 7}
    assert evaluation_rows([tmp_path]) == [
        {**common, "system": "model", "auc": 0.7, "auc_interval": [0.6, 0.8], "ne": 0.9},
        {**common, "system": "logistic", "auc": 0.6, "auc_interval": [0.5, 0.7]},
    ]


def test_evaluations_bench_names_run_without_test_result(tmp_path):
    with pytest.raises(UserError, match="nestrec eval"):
        evaluation_rows([tmp_path])
