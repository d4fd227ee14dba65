"""`nestrec eval` on a run that was stopped before it measured itself."""

import json
from pathlib import Path

import numpy as np
import pytest

from nestrec.base.errors import DamagedError
from nestrec.cli.report import sample_recommendations
from nestrec.cli.training import evaluate_run
from nestrec.distributed import Topology
from nestrec.testing.tiny_runs import config_of
from nestrec.training.trainer import Trainer


def test_eval_keeps_the_result_of_the_best_epoch_as_train_does(tiny_data: Path, tmp_path: Path) -> None:
    # Nothing is learned, so the first epoch stays the best one, and is not the last.
    cfg = config_of("hstu", tiny_data, {"training.epochs": 3, "optimizer.learning_rate": 0.0})
    trainer = Trainer(cfg, tmp_path, Topology.single("cpu"))
    state = trainer.train()
    assert state.best_step is not None
    assert state.best_step < state.step
    evaluate_run(tmp_path, "test", best=False)
    assert not (tmp_path / "eval" / "test.npz").exists()
    evaluate_run(tmp_path, "test", best=True)
    assert json.loads((tmp_path / "eval" / "test.json").read_text())["step"] == state.best_step
    with np.load(tmp_path / "eval" / "test.npz") as kept:
        by_eval = kept["rank/model"]
    expected = trainer.evaluate("test").details["rank/model"]
    assert np.array_equal(by_eval, expected)


def test_damaged_best_weights_name_the_last_ones_that_could_serve(tiny_data: Path, tmp_path: Path) -> None:
    cfg = config_of("hstu", tiny_data, {"training.epochs": 1})
    Trainer(cfg, tmp_path, Topology.single("cpu")).train()
    for file in (tmp_path / "best").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedError) as refused:
        evaluate_run(tmp_path, "test", best=True)
    assert "--last" in str(refused.value.remedy)
    evaluate_run(tmp_path, "test", best=False)


def test_the_report_recommends_to_users_of_the_test(tiny_data: Path, tmp_path: Path) -> None:
    assert sample_recommendations(tmp_path / "nowhere") == {}
    run = tmp_path / "run"
    trainer = Trainer(config_of("hstu", tiny_data, {"training.epochs": 1}), run, Topology.single("cpu"))
    trainer.train()
    assert sample_recommendations(run) == {}, "nothing was tested yet"
    users = trainer.evaluate("test").details["users"]
    page = str(sample_recommendations(run)["Sample recommendations"])
    assert page.count("<ol>") == 4
    assert all(f"<th>{user}</th>" in page for user in trainer.session.dataset.user_keys(np.sort(users)[:1]))
