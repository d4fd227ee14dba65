"""`nestrec eval` on a run that was stopped before it measured itself."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from nestrec.api import configured, train
from nestrec.base.errors import CorruptFileError, UserError
from nestrec.cli.app import app
from nestrec.cli.plan_output import sample_recommendations
from nestrec.cli.training_output import evaluate_run, train_run
from nestrec.data.formats.format_registry import prepare
from nestrec.distributed import Topology
from nestrec.report.run_records import best_evaluation, load_run
from nestrec.tasks.metrics import ConfidenceInterval
from nestrec.tasks.task import Evaluation
from nestrec.training.callbacks import TrainingCallback
from nestrec.training.run_folder import RunFolder
from nestrec.training.trainer import Trainer
from nestrec_bench.quality import input_comparison
from nestrec_bench.quality.evaluations_bench import evaluation_rows
from support.tiny_runs import config_of


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
    auc = ConfidenceInterval(float("nan"), float("nan"), float("inf"))
    hit = ConfidenceInterval(0.5, float("nan"), float("nan"))
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
    with pytest.raises(CorruptFileError) as refused:
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


SHORT = {"training.epochs": 1, "training.max_steps": 2, "optimizer.learning_rate": 0.0}


@pytest.mark.parametrize(
    ("changes", "weights"), [({}, "best validation epoch"), ({"training.evaluate_every_epochs": 0}, "last weights")]
)
def test_result_table_names_its_weights(tiny_data, tmp_path, capsys, changes, weights):
    cfg = config_of("hstu", tiny_data, {**SHORT, "training.max_steps": "none", **changes})
    train_run(cfg, tmp_path / "run")
    evaluate_run(tmp_path / "run", "test", best=True)
    by_train, by_eval = re.findall(r"test part, ([a-z ]+)", " ".join(capsys.readouterr().out.split()))
    assert (by_train.strip(), by_eval.strip()) == (weights, weights)


def test_train_run_prints_its_training_time(tiny_data, tmp_path, capsys):
    train_run(config_of("hstu", tiny_data, SHORT), tmp_path / "run")
    *_, trained, following = capsys.readouterr().out.splitlines()
    assert re.match(r"trained to step 2 in \d+\.\d s; run folder: ", trained)
    run = tmp_path / "run"
    assert following == f"next: nestrec report {run}; nestrec export {run} models/run"


def test_train_only_measures_nothing(tiny_data, tmp_path, capsys):
    cfg = config_of("hstu", tiny_data, {**SHORT, "training.train_only": True})
    train_run(cfg, tmp_path / "run")
    shown = capsys.readouterr().out
    assert "valid after" not in shown
    assert "test after" not in shown
    assert f"nestrec eval {tmp_path / 'run'}" in shown
    assert not list((tmp_path / "run" / "eval").glob("*"))
    assert train(cfg, output=tmp_path / "again").evaluation is None


@pytest.mark.parametrize("family", ["hstu", "ranking"])
def test_split_none_trains_on_all_events(tiny_data, tmp_path, family):
    changes = {"task.split.kind": "none", **SHORT}  # dates of the split of the recipe are of no account
    trainer = Trainer(config_of(family, tiny_data, changes), tmp_path, Topology.single("cpu"))
    trainer.train()
    assert not trainer.ends_with_test
    lengths = trainer.session.dataset.lengths.astype(np.int64)
    assert trainer.session.task._split.train_end.tolist() == lengths.tolist()
    with pytest.raises(UserError, match=r"task\.split\.kind=none: holds no events out"):
        trainer.evaluate("test")


def test_shares_of_zero_name_the_options_to_train_on_all(tiny_data, tmp_path):
    cut = {"task.split.valid_from": "none", "task.split.test_from": "none"}
    shares = {"task.split.valid_share": 0, "task.split.test_share": 0}
    refused = {"ranking": {**cut, **shares}, "rows": {"task.valid_share": 0, "task.test_share": 0}}
    for family, changes in refused.items():
        with pytest.raises(UserError, match=r"valid_share=0\.0: holds out no events, so there is no valid") as error:
            Trainer(config_of(family, tiny_data, changes), tmp_path, Topology.single("cpu"))
        option, value = re.findall(r"--(\S+) (\S+)", str(error.value))[-1]
        cfg = config_of(family, tiny_data, {**changes, option: value, **SHORT})
        assert train(cfg, output=tmp_path / family).evaluation is None


def test_advice_of_a_losing_run_can_be_followed(tiny_data, tmp_path, capsys):
    cfg = config_of("hstu", tiny_data, {**SHORT, "training.max_steps": "none"})
    for name in ("demo", "auto"):
        train_run(replace(cfg, name=name, data=replace(cfg.data, synthetic=None)), tmp_path / name)
        said = capsys.readouterr().err
        assert "DOES NOT BEAT" in said
        assert "serve the baseline" not in said
        assert ("train auto" in said) == (name == "demo")
        commands = [shlex.split(line.partition("nestrec ")[2]) for line in said.splitlines() if "nestrec " in line]
        for command, recipe, *options in commands:
            assert command in {"tune", "train"}
            given = {"data.folder": str(cfg.data.folder)} if recipe == "auto" else {}
            assert configured(recipe, given).data.folder == cfg.data.folder
            assert "--output" in options


def test_num_threads_holds_for_the_run_alone(tiny_data, tmp_path):
    before = torch.get_num_threads()

    class ThreadCount(TrainingCallback):
        def started(self, total_steps: int | None, first_step: int) -> None:
            self.threads = torch.get_num_threads()

    heard = ThreadCount()
    wanted = before + 1
    cfg = config_of("hstu", tiny_data, {**SHORT, "training.num_threads": wanted, "training.train_only": True})
    train(cfg, output=tmp_path / "run", listener=heard)
    assert heard.threads == wanted
    assert torch.get_num_threads() == before
