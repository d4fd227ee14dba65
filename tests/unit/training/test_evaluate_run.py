"""`nestrec eval` on a run that was stopped before it measured itself."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nestrec.base.errors import DamagedError
from nestrec.cli.app import app
from nestrec.cli.report import sample_recommendations
from nestrec.cli.training import evaluate_run
from nestrec.data.prepare.preparation import prepare
from nestrec.distributed import Topology
from nestrec.testing.tiny_runs import config_of
from nestrec.training.trainer import Trainer


def test_eval_keeps_the_result_of_the_best_epoch_as_train_does(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Nothing is learned, so the first epoch stays the best one, and is not the last.
    cfg = config_of("hstu", tiny_data, {"training.epochs": 3, "optimizer.learning_rate": 0.0})
    trainer = Trainer(cfg, tmp_path, Topology.single("cpu"))
    state = trainer.train()
    assert state.best_step is not None
    assert state.best_step < state.step
    evaluate_run(tmp_path, "test", best=False)
    assert not (tmp_path / "eval" / "test.npz").exists()
    evaluate_run(tmp_path, "test", best=True)
    assert "BEST BASELINE: ndcg@10 " in capsys.readouterr().out.upper().replace("NDCG", "ndcg"), "or that it leads it"
    assert json.loads((tmp_path / "eval" / "test.json").read_text())["step"] == state.best_step
    with np.load(tmp_path / "eval" / "test.npz") as kept:
        by_eval = kept["rank/model"]
    expected = trainer.evaluate("test").details["rank/model"]
    assert np.array_equal(by_eval, expected)


def test_damaged_best_weights_name_the_last_ones_that_could_serve(tiny_data: Path, tmp_path: Path) -> None:
    # Nothing is learned, so the first epoch stays the best one; its checkpoint is deleted after the second.
    more = {"training.epochs": 2, "training.keep_checkpoints": 1, "optimizer.learning_rate": 0.0}
    Trainer(config_of("hstu", tiny_data, more), tmp_path, Topology.single("cpu")).train()
    for file in (tmp_path / "best").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            file.unlink()  # the last ones share it
            file.write_bytes(content[:-1])
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


def test_the_report_of_a_log_with_titles_recommends_by_title(tmp_path: Path) -> None:
    rows = [f"{user},{(user * event) % 30}" for user in range(40) for event in range(1, 7)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item", *rows]))
    (tmp_path / "items.csv").write_text("item,title\n" + "".join(f"{i},Title of {i}\n" for i in range(30)))
    prepare("log", tmp_path / "log.csv", tmp_path / "sequences", items=str(tmp_path / "items.csv"))
    more = {"task.encoder.time_bias": "false", "training.epochs": 1}
    trainer = Trainer(config_of("hstu", tmp_path, more), tmp_path / "run", Topology.single("cpu"))
    trainer.train()
    trainer.evaluate("test")
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    page = (tmp_path / "run" / "report.html").read_text()
    section = page[page.index("<h2>Sample recommendations") :]
    assert section.count("Title of ") >= 4 * 5, "of five recommendations to each of four users at least"
