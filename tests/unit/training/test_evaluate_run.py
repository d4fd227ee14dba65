"""`nestrec eval` on a run that was stopped before it measured itself."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nestrec.base.errors import DamagedError
from nestrec.bench.quality.evaluations import evaluation_rows
from nestrec.cli.app import app
from nestrec.cli.report import sample_recommendations
from nestrec.cli.training import evaluate_run
from nestrec.data.prepare.preparation import prepare
from nestrec.distributed import Topology
from nestrec.library import input_comparison
from nestrec.report.run_folder import best_evaluation, load_run
from nestrec.tasks.metrics import Interval
from nestrec.tasks.task import Evaluation
from nestrec.testing.tiny_runs import config_of
from nestrec.training.run_folder import RunFolder
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


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def test_evaluation_without_a_value_is_standard_json(tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"name": "r", "task": {"kind": "ranking"}, "training": {"seed": 7}})
    )
    (tmp_path / "card.json").write_text(json.dumps({"name": "d"}))
    auc = Interval(float("nan"), float("nan"), float("inf"))
    hit = Interval(0.5, float("nan"), float("nan"))
    folder = RunFolder(tmp_path)
    for part in ("valid", "test"):
        folder.write_evaluation(Evaluation(part, "auc", {"model": {"auc": auc, "hr@1": hit}}), 3, 1)
    for text in [(tmp_path / "eval" / "test.json").read_text(), *(tmp_path / "metrics.jsonl").read_text().splitlines()]:
        metrics = json.loads(text, parse_constant=refuse)["metrics"]["model"]
        assert metrics == {"auc": [None, None, None], "hr@1": [0.5, None, None]}
    mean, low, high = input_comparison.tested(tmp_path)["metrics"]["model"]["hr@1"]
    assert mean == 0.5
    assert np.isnan([low, high, *input_comparison.tested(tmp_path)["metrics"]["model"]["auc"]]).all()
    assert best_evaluation(load_run(tmp_path)) is not None
    (row,) = evaluation_rows([tmp_path])
    assert row["hr@1"] == 0.5
    assert not [name for name in row if name.endswith("_interval")]


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
