"""`nestrec eval`: results, reports and advice of trained runs."""

import contextlib
import importlib.util
import io
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from nestrec.api import resolve_config, train
from nestrec.base.errors import CorruptFileError, UserError
from nestrec.cli import training_output
from nestrec.cli.app import app
from nestrec.cli.plan_output import sample_recommendations
from nestrec.cli.training_output import evaluate_run, train_run
from nestrec.data.formats.format_registry import prepare
from nestrec.distributed import Topology
from nestrec.report.run_records import best_evaluation, load_run
from nestrec.tasks.metrics import ConfidenceInterval
from nestrec.tasks.task import Evaluation
from nestrec.training.callbacks import TrainingCallback
from nestrec.training.recipes import RECIPES
from nestrec.training.run_folder import RunFolder
from nestrec.training.state import TrainState
from nestrec.training.trainer import Trainer
from nestrec_bench.quality import input_comparison
from nestrec_bench.quality.evaluations_bench import evaluation_rows
from support.tiny_runs import config_of


def test_eval_stores_the_result_of_the_best_epoch(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The learning rate is 0, so the first epoch stays the best one and is not the last one.
    cfg = config_of("hstu", tiny_data, {"training.epochs": 3, "optimizer.learning_rate": 0.0})
    trainer = Trainer(cfg, tmp_path, Topology.single("cpu"))
    state = trainer.train()
    assert state.best_step is not None
    assert state.best_step < state.step
    evaluate_run(tmp_path, "test", best=False)
    assert not (tmp_path / "eval" / "test.npz").exists()
    evaluate_run(tmp_path, "test", best=True)
    assert "BEST BASELINE: ndcg@10 " in capsys.readouterr().out.upper().replace("NDCG", "ndcg"), (
        "the summary names the best baseline"
    )
    assert json.loads((tmp_path / "eval" / "test.json").read_text())["step"] == state.best_step
    with np.load(tmp_path / "eval" / "test.npz") as arrays:
        by_eval = arrays["rank/model"]
    expected = trainer.evaluate("test").details["rank/model"]
    assert np.array_equal(by_eval, expected)


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def test_evaluation_without_values_is_standard_json(tiny_data: Path, tmp_path: Path) -> None:
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
    mean, low, high = input_comparison.load_evaluation(tmp_path)["metrics"]["model"]["hr@1"]
    assert mean == 0.5
    assert np.isnan([low, high, *input_comparison.load_evaluation(tmp_path)["metrics"]["model"]["auc"]]).all()
    assert best_evaluation(load_run(tmp_path)) is not None
    (row,) = evaluation_rows([tmp_path])
    assert row["hr@1"] == 0.5
    assert not [name for name in row if name.endswith("_interval")]


def test_eval_with_corrupt_best_weights_suggests_the_last_ones(tiny_data: Path, tmp_path: Path) -> None:
    # The learning rate is 0, so the first epoch stays the best one; its checkpoint is deleted after the second.
    overrides = {"training.epochs": 2, "training.max_checkpoints": 1, "optimizer.learning_rate": 0.0}
    Trainer(config_of("hstu", tiny_data, overrides), tmp_path, Topology.single("cpu")).train()
    for file in (tmp_path / "best").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            file.unlink()  # a new file, because the last weights may be hard links to the old one
            file.write_bytes(content[:-1])
    with pytest.raises(CorruptFileError) as raised:
        evaluate_run(tmp_path, "test", best=True)
    assert "--last" in str(raised.value.remedy)
    evaluate_run(tmp_path, "test", best=False)


def test_report_shows_recommendations_to_test_users(tiny_data: Path, tmp_path: Path) -> None:
    assert sample_recommendations(tmp_path / "nowhere") == {}
    run = tmp_path / "run"
    trainer = Trainer(config_of("hstu", tiny_data, {"training.epochs": 1}), run, Topology.single("cpu"))
    trainer.train()
    assert sample_recommendations(run) == {}, "the run has no test evaluation yet"
    users = trainer.evaluate("test").details["users"]
    page = str(sample_recommendations(run)["Sample recommendations"])
    assert page.count("<ol>") == 4
    assert all(f"<th>{user}</th>" in page for user in trainer.session.dataset.user_keys(np.sort(users)[:1]))


def test_report_shows_recommendations_by_title(tmp_path: Path) -> None:
    rows = [f"{user},{(user * event) % 30}" for user in range(40) for event in range(1, 7)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item", *rows]))
    (tmp_path / "items.csv").write_text("item,title\n" + "".join(f"{i},Title of {i}\n" for i in range(30)))
    prepare("log", tmp_path / "log.csv", tmp_path / "sequences", items=str(tmp_path / "items.csv"))
    overrides = {"task.encoder.time_bias": "false", "training.epochs": 1}
    trainer = Trainer(config_of("hstu", tmp_path, overrides), tmp_path / "run", Topology.single("cpu"))
    trainer.train()
    trainer.evaluate("test")
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    page = (tmp_path / "run" / "report.html").read_text()
    section = page[page.index("<h2>Sample recommendations") :]
    assert section.count("Title of ") >= 4 * 5, "there are at least five recommendations to each of four users"


SHORT = {"training.epochs": 1, "training.max_steps": 2, "optimizer.learning_rate": 0.0}


@pytest.mark.parametrize(
    ("changes", "weights"), [({}, "best validation epoch"), ({"training.eval_every_epochs": 0}, "last weights")]
)
def test_eval_result_table_names_its_weights(tiny_data, tmp_path, capsys, changes, weights):
    cfg = config_of("hstu", tiny_data, {**SHORT, "training.max_steps": "none", **changes})
    train_run(cfg, tmp_path / "run")
    evaluate_run(tmp_path / "run", "test", best=True)
    by_train, by_eval = re.findall(r"test split, ([a-z ]+)", " ".join(capsys.readouterr().out.split()))
    assert (by_train.strip(), by_eval.strip()) == (weights, weights)


def test_train_run_prints_its_training_time(tiny_data, tmp_path, capsys):
    train_run(config_of("hstu", tiny_data, SHORT), tmp_path / "run")
    *_, trained, following = capsys.readouterr().out.splitlines()
    assert re.match(r"trained to step 2 in \d+\.\d s; run folder: ", trained)
    run = tmp_path / "run"
    assert following == f"next: nestrec report {run}; nestrec export {run} models/run"


def test_train_only_evaluates_nothing(tiny_data, tmp_path, capsys):
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
    changes = {"task.split.kind": "none", **SHORT}  # the split dates of the recipe are ignored
    trainer = Trainer(config_of(family, tiny_data, changes), tmp_path, Topology.single("cpu"))
    trainer.train()
    assert not trainer.ends_with_test
    lengths = trainer.session.dataset.lengths.astype(np.int64)
    assert trainer.session.task._split.train_end.tolist() == lengths.tolist()
    with pytest.raises(UserError, match=r"task\.split\.kind=none: no events are held out"):
        trainer.evaluate("test")


def test_split_fractions_of_zero_suggest_split_none(tiny_data, tmp_path):
    cut = {"task.split.valid_from": "none", "task.split.test_from": "none"}
    shares = {"task.split.valid_fraction": 0, "task.split.test_fraction": 0}
    raised = {"ranking": {**cut, **shares}, "rows": {"task.split.valid_fraction": 0, "task.split.test_fraction": 0}}
    for family, changes in raised.items():
        with pytest.raises(
            UserError, match=r"valid_fraction=0\.0: no events are held out, so the valid split is empty"
        ) as error:
            Trainer(config_of(family, tiny_data, changes), tmp_path, Topology.single("cpu"))
        option, value = re.findall(r"--(\S+) (\w+)", str(error.value))[-1]
        cfg = config_of(family, tiny_data, {**changes, option: value, **SHORT})
        assert train(cfg, output=tmp_path / family).evaluation is None


def test_training_advice_below_baseline_gives_valid_commands(tiny_data, tmp_path, capsys):
    cfg = config_of("hstu", tiny_data, {**SHORT, "training.max_steps": "none"})
    for name in ("demo", "auto"):
        train_run(replace(cfg, name=name, data=replace(cfg.data, synthetic=None)), tmp_path / name)
        printed = capsys.readouterr().err
        assert "DOES NOT BEAT" in printed
        assert "serve the baseline" not in printed
        assert ("train auto" in printed) == (name == "demo")
        commands = [shlex.split(line.partition("nestrec ")[2]) for line in printed.splitlines() if "nestrec " in line]
        for command, recipe, *options in commands:
            assert command in {"tune", "train"}
            overrides = {"data.folder": str(cfg.data.folder)} if recipe == "auto" else {}
            assert resolve_config(recipe, overrides).data.folder == cfg.data.folder
            assert "--output" in options


@pytest.mark.parametrize("is_installed", [True, False])
def test_training_advice_names_extra_only_if_missing(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if is_installed else None)
    advice = " ".join(training_output._suggestions(tmp_path, RECIPES["demo"](), suggests_longer=False))
    assert f"nestrec tune {tmp_path}/config.json" in advice
    assert ("(in a clone of the repository: pip install '.[tune]')" in advice) == (not is_installed)


@pytest.mark.parametrize(
    ("limits", "validations", "ending"),
    [
        ({"training.epochs": 2}, [0.1, 0.2], "epochs=2"),
        ({"training.epochs": 9, "training.max_steps": 7}, [0.1, 0.2], "max_steps=7"),
        ({"training.epochs": 2}, [0.2, 0.1], None),
        ({"training.epochs": 1}, [0.2], None),
    ],
)
def test_training_advice_if_metric_still_improves(tiny_data, tmp_path, limits, validations, ending):
    scores = iter(validations)
    after_evaluation = TrainState.after_evaluation
    cfg = config_of("hstu", tiny_data, {"training.max_steps": "none", **limits})
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors):
        patch.setattr(TrainState, "after_evaluation", lambda state, _: after_evaluation(state, next(scores)))
        train_run(cfg, tmp_path)
    printed = errors.getvalue()
    assert next(scores, None) is None
    if ending is None:
        assert "still improving" not in printed
    else:
        advice = f"the metric was still improving when training ended at {ending}: train longer"
        assert printed.index(advice) < printed.index("on validation:")
        assert printed.count("train longer") == 1


def test_num_threads_applies_only_during_the_run(tiny_data, tmp_path):
    before = torch.get_num_threads()

    class ThreadCount(TrainingCallback):
        def on_train_start(self, total_steps: int | None, first_step: int) -> None:
            self.threads = torch.get_num_threads()

    callback = ThreadCount()
    expected = before + 1
    cfg = config_of("hstu", tiny_data, {**SHORT, "training.num_threads": expected, "training.train_only": True})
    train(cfg, output=tmp_path / "run", callback=callback)
    assert callback.threads == expected
    assert torch.get_num_threads() == before
