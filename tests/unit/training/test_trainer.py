"""Training loop on one rank: resuming, ends of a run, and invalid options. Real kills are in tests/faults."""

import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestrec.base.errors import DataError, NonFiniteError, UserError
from nestrec.checkpoint import CheckpointManager, CheckpointSaveError
from nestrec.data.batch_loader import Batch
from nestrec.data.batch_order import BatchPosition
from nestrec.data.formats.format_registry import prepare
from nestrec.data.synthetic.synthetic_logs import generate, preset
from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import restored_session
from nestrec.training.callbacks import TrainingCallback
from nestrec.training.run_checkpointer import RunInterruptedError
from nestrec.training.state import run_digest
from nestrec.training.trainer import StepPlan, Trainer
from support.fail_points import armed
from support.tiny_runs import FAMILIES, config_of

BACKGROUND = {"training.checkpoint_async": True, "training.incremental_checkpoints": 2, "training.max_checkpoints": 1}
EVICTIONS: dict[str, dict[str, object]] = {
    "ttl": {"eviction_policy": "ttl", "ttl_steps": 1, "max_rows": 90, "admission_threshold": 2},
    "late sweeps": {"eviction_policy": "ttl", "ttl_steps": 12, "max_rows": 150, "admission_threshold": 1},
    "lfu": {"eviction_policy": "lfu", "max_rows": 60, "admission_threshold": 1},
    "no bound": {"eviction_policy": "none", "max_rows": "none", "admission_threshold": 3},
}

SAVINGS: dict[str, dict[str, object]] = {"full": {}, "background": BACKGROUND}


def pairs_of(values: Iterable[str]) -> list[Any]:
    """Returns parameters of all values and ways of saving; one way per value, alternating, is not marked slow."""
    pairs = [(value, saving, (n + m) % 2) for n, value in enumerate(values) for m, saving in enumerate(SAVINGS)]
    return [pytest.param(v, saving, marks=pytest.mark.slow if is_slow else []) for v, saving, is_slow in pairs]


class Crash(Exception):
    pass


class WarningRecorder(TrainingCallback):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_warning(self, message: str) -> None:
        self.warnings.append(message)


def crash() -> None:
    raise Crash


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def trainer_of(
    family: str, data: Path, run: Path, overrides: Mapping[str, object], callback: TrainingCallback | None = None
) -> Trainer:
    return Trainer(config_of(family, data, overrides), run, Topology.single(), callback)


def train_through_crashes(
    family: str, data: Path, run: Path, overrides: Mapping[str, object], crashes: list[int]
) -> int:
    """Restarts training after each crash, given in steps since the start; returns the number of crashes.

    A run reports in step 20, so a crash soon after it leaves lines that the resumed run writes again.
    """
    for count in crashes:
        trainer = trainer_of(family, data, run, overrides)
        with armed("train.step", crash, at=count), pytest.raises(Crash):
            trainer.train()
        trainer.checkpointer.close()  # in a real crash the background save ends with the process
    trainer_of(family, data, run, overrides).train()
    return len(crashes)


def without_times(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    fields = ("kind", "step", "epoch", "loss", "learning_rate", "metrics", "part")
    return [{name: line[name] for name in fields if name in line} for line in lines if line["kind"] != "event"]


@pytest.mark.parametrize(("family", "saving"), pairs_of(FAMILIES))
def test_resume_equals_an_uninterrupted_run(tiny_data: Path, tmp_path: Path, family: str, saving: str) -> None:
    overrides = {"training.max_steps": 24, "training.checkpoint_every_steps": 3, **SAVINGS[saving]}
    trainer_of(family, tiny_data, tmp_path / "uninterrupted", overrides).train()
    assert train_through_crashes(family, tiny_data, tmp_path / "cut", overrides, [2, 8, 15]) == 3
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "uninterrupted")
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "uninterrupted")


@pytest.mark.parametrize(("store", "saving"), pairs_of(EVICTIONS))
def test_dynamic_table_admission_and_eviction_survive_a_restart(
    tiny_data: Path, tmp_path: Path, store: str, saving: str
) -> None:
    store_options = {f"task.table_store.{name}": value for name, value in EVICTIONS[store].items()}
    overrides = {"training.max_steps": 44, "training.checkpoint_every_steps": 4, "batch.batch_size": 2, **store_options}
    overrides |= SAVINGS[saving]
    uninterrupted = trainer_of("rows", tiny_data, tmp_path / "uninterrupted", overrides)
    uninterrupted.train()
    train_through_crashes("rows", tiny_data, tmp_path / "cut", overrides, [18, 13])
    cut = trainer_of("rows", tiny_data, tmp_path / "cut", overrides)
    cut.checkpointer.restore_last()
    assert cut.session.engine.digest("categories") == uninterrupted.session.engine.digest("categories")
    waiting = [t.session.engine.pending_key_state("categories") for t in (cut, uninterrupted)]
    assert all((waiting[0][name] == waiting[1][name]).all() for name in ("keys", "uses", "last_step", "newest_step"))
    tensors = [
        {k: v for k, v in run_digest(tmp_path / r).items() if "table" not in k} for r in ("cut", "uninterrupted")
    ]
    assert tensors[0] == tensors[1]


def test_checkpoint_incremental_holds_only_changed_rows(tiny_data: Path, tmp_path: Path) -> None:
    overrides = {
        "training.max_steps": 6,
        "training.checkpoint_every_steps": 1,
        "training.max_checkpoints": 9,
        **BACKGROUND,
    }
    overrides |= {"batch.batch_size": 1, "training.max_checkpoints": 9, "task.negatives.num_negatives": 1}
    trainer_of("hstu", tiny_data, tmp_path, overrides).train()
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    bases = [checkpoints.restore(step).manifest.base for step in range(1, 7)]
    assert [base.step if base else None for base in bases] == [None, 1, 2, None, 4, 5]
    sizes = [sum(f.bytes for f in checkpoints.restore(s).manifest.files if f.kind == "rows") for s in range(1, 7)]
    assert sizes[2] < sizes[3]
    assert sizes[5] < sizes[3]


def test_consumed_samples_are_the_global_batches_in_order(tiny_data: Path, tmp_path: Path) -> None:
    trainer = trainer_of("hstu", tiny_data, tmp_path, {"training.max_steps": 5})
    state = trainer.state
    expected = trainer.state
    position = BatchPosition()
    for _ in range(5):
        batch = trainer.loader.load_one(position)
        following = trainer.loader.order.next_position(position)
        expected, position = expected.after(batch, following), following
    assert trainer.train().consumed == expected.consumed != state.consumed


def test_evaluation_of_the_best_epoch_forgets_later_rows(tiny_data: Path, tmp_path: Path) -> None:
    overrides = {"training.max_steps": 1, "batch.batch_size": 2, "training.max_checkpoints": 9}
    first = trainer_of("hstu", tiny_data, tmp_path, overrides)
    first.train()
    early = first.session.engine.digest("items")
    at_start = first.measure("test", best=True)
    later = trainer_of("hstu", tiny_data, tmp_path, {**overrides, "training.max_steps": 6})
    later.train()
    assert later.session.engine.digest("items") != early
    later.session.restore(CheckpointManager(tmp_path / "checkpoints").restore(1))
    assert later.session.engine.digest("items") == early
    again = later.session.task.evaluate(later.session.engine, "test")
    assert np.array_equal(again.details["rank/model"], at_start.details["rank/model"])
    later.measure("test", best=False)
    assert later.state.step == 6


def test_non_finite_loss_names_its_step_and_keeps_the_checkpoint(tiny_data: Path, tmp_path: Path) -> None:
    overrides = {"training.max_steps": 4, "training.checkpoint_every_steps": 4, "training.eval_every_epochs": 0}
    trainer_of("hstu", tiny_data, tmp_path, overrides).train()
    before = run_digest(tmp_path)
    again = trainer_of(
        "hstu", tiny_data, tmp_path, {**overrides, "training.max_steps": 12, "optimizer.learning_rate": 1e30}
    )
    with pytest.raises(NonFiniteError, match=r"step=[56]: .*the run stops, and the last checkpoint is intact"):
        again.train()
    assert run_digest(tmp_path) == before
    trainer_of("hstu", tiny_data, tmp_path, {**overrides, "training.max_steps": 8}).train()


@pytest.mark.parametrize("saving", [{}, BACKGROUND], ids=["full", "background"])
def test_non_finite_rows_are_not_saved(tiny_data: Path, tmp_path: Path, saving: dict) -> None:
    """The loss of the last step is computed before its update, so only the rows show the problem."""
    overrides = {
        "training.max_steps": 4,
        "training.checkpoint_every_steps": 4,
        "training.eval_every_epochs": 0,
        **saving,
    }
    trainer_of("rows", tiny_data, tmp_path, overrides).train()
    before = run_digest(tmp_path)
    again = {**overrides, "training.max_steps": 5, "optimizer.table_learning_rate": 3e38}
    with pytest.raises(NonFiniteError, match="table 'categories' are not finite") as raised:
        trainer_of("rows", tiny_data, tmp_path, again).train()
    assert "the last checkpoint is intact" in str(raised.value)
    assert "lower learning rate" in raised.value.remedy
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]
    assert run_digest(tmp_path) == before
    trainer_of("rows", tiny_data, tmp_path, {**overrides, "training.max_steps": 8}).train()


def test_stop_signal_saves_and_resumes_later(tiny_data: Path, tmp_path: Path) -> None:
    overrides = {"training.max_steps": 12}
    trainer_of("sasrec", tiny_data, tmp_path / "uninterrupted", overrides).train()
    trainer = trainer_of("sasrec", tiny_data, tmp_path / "cut", overrides)
    with armed("train.step", terminate, at=4), pytest.raises(RunInterruptedError):
        trainer.train()
    # The signal arrives after step 4; ranks agree in step 5, read it in step 6, and start no batch after step 7.
    assert trainer.state.step == 7
    assert CheckpointManager(tmp_path / "cut" / "checkpoints").steps()[-1] == 7
    trainer_of("sasrec", tiny_data, tmp_path / "cut", overrides).train()
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "uninterrupted")


def test_checkpoint_corrupt_is_reported_and_previous_one_used(tiny_data: Path, tmp_path: Path) -> None:
    overrides = {"training.max_steps": 6, "training.checkpoint_every_steps": 2}
    trainer_of("ranking", tiny_data, tmp_path, overrides).train()
    before = run_digest(tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000006" / "tensors-00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    callback = WarningRecorder()
    trainer = trainer_of("ranking", tiny_data, tmp_path, overrides, callback)
    trainer.train()
    assert "checkpoint of step 6 is corrupt and skipped" in callback.warnings[0]
    assert run_digest(tmp_path) == before
    assert '"resumed from step 4"' in (tmp_path / "metrics.jsonl").read_text()


def test_resume_after_a_crash_reports_lost_progress(tiny_data: Path, tmp_path: Path) -> None:
    overrides = {"training.max_steps": 9, "training.checkpoint_every_steps": 4, "training.eval_every_epochs": 0}
    with armed("train.step", crash, at=7), pytest.raises(Crash):
        trainer_of("ranking", tiny_data, tmp_path, overrides).train()
    trainer_of("ranking", tiny_data, tmp_path, overrides).train()
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lost = [event for event in events if "lost_steps" in event]
    assert [(event["step"], event["lost_steps"]) for event in lost] == [(4, 3)]
    assert 0 < lost[0]["lost_s"] < 60
    assert lost[0]["text"] == f"lost: 3 steps, {lost[0]['lost_s']:.1f} s of work"


@pytest.mark.parametrize("field", ["task.encoder.num_layers", "task.encoder.num_heads"])
def test_resume_with_another_model_is_rejected(tiny_data: Path, tmp_path: Path, field: str) -> None:
    overrides = {"training.max_steps": 1}
    trainer_of("hstu", tiny_data, tmp_path, overrides).train()
    (tmp_path / "config.json").unlink()  # as if only the checkpoints had been copied
    with pytest.raises(UserError, match="the checkpoint has another model"):
        trainer_of("hstu", tiny_data, tmp_path, {**overrides, field: 3}).train()
    assert not (tmp_path / "config.json").exists()


def test_early_stopping_and_max_steps_end_a_run(tiny_data: Path, tmp_path: Path) -> None:
    patient = trainer_of(
        "sasrec", tiny_data, tmp_path / "a", {"training.early_stopping_patience": 2, "optimizer.learning_rate": 0.0}
    )
    patient.train()
    assert (patient.state.position.epoch, patient.state.best_step) == (3, 3)
    assert CheckpointManager(tmp_path / "a" / "best").steps() == [3]
    manifests = [tmp_path / "a" / name / "step-00000003" / "manifest.json" for name in ("best", "checkpoints")]
    assert manifests[0].samefile(manifests[1]), "both are hard links to one checkpoint"
    bounded = trainer_of("sasrec", tiny_data, tmp_path / "b", {"training.max_steps": 4})
    assert bounded.train().step == 4
    unmeasured = trainer_of(
        "sasrec", tiny_data, tmp_path / "c", {"training.epochs": 2, "training.eval_every_epochs": 0}
    )
    assert unmeasured.train().position == BatchPosition(2, 0)
    assert unmeasured.state.best_step is None
    assert unmeasured.evaluate("valid").score > 0


def test_warmup_grows_both_learning_rates_linearly(tiny_data: Path, tmp_path: Path) -> None:
    overrides = {"optimizer.warmup_steps": 4, "optimizer.learning_rate": 0.4, "optimizer.table_learning_rate": 0.8}
    trainer = trainer_of("hstu", tiny_data, tmp_path, {**overrides, "training.max_steps": 1})
    assert trainer._learning_rates().dense == pytest.approx(0.1)
    assert trainer._learning_rates().tables == pytest.approx(0.2)


def test_ema_weights_are_evaluated_saved_and_exported(tiny_data: Path, tmp_path: Path) -> None:
    overrides = {
        "training.max_steps": 6,
        "optimizer.ema_decay": 0.9,
        "optimizer.max_grad_norm": 1.0,
        "optimizer.learning_rate": 0.05,
    }
    trainer = trainer_of("hstu", tiny_data, tmp_path / "run", overrides)
    trainer.train()
    metrics = trainer.measure("valid", best=False).metrics["model"]
    dense = trainer.session.dense
    with dense.averaged():
        weights = {name: tensor.clone() for name, tensor in trainer.session.task.model.state_dict().items()}
        expected = trainer.session.task.evaluate(trainer.session.engine, "valid").metrics["model"]
    assert repr(metrics) == repr(expected)
    assert repr(metrics) != repr(trainer.session.task.evaluate(trainer.session.engine, "valid").metrics["model"])
    with restored_session(tmp_path / "run", best=False) as (session, step):
        assert step == 6
        exported = session.task.model.state_dict()
        assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("hstu", {"data.folder": "/nowhere", "data.synthetic": "none"}, "does not contain a prepared dataset"),
        ("hstu", {"data.folder": ""}, "a dataset is required"),
        ("hstu", {"task.history.max_events": 13}, "must be equal to task.encoder.max_length, which is 12"),
        ("ranking", {"task.inputs.labels": "clik"}, "[Dd]id you mean 'click'"),
        ("ranking", {"task.encoder.max_length": 15}, "must be twice task.history.max_events = 8"),
        ("ranking", {"task.split.valid_from": "2100-01-01"}, "is later than test_from"),
    ],
)
def test_trainer_invalid_options_name_field_and_remedy(
    tiny_data: Path, tmp_path: Path, family: str, overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        trainer_of(family, tiny_data, tmp_path, overrides)
    assert caught.value.remedy


def test_resume_rejects_options_that_cannot_change(tiny_data: Path, tmp_path: Path) -> None:
    overrides = {"training.max_steps": 2}
    trainer_of("hstu", tiny_data, tmp_path / "run", overrides).train()
    config = (tmp_path / "run" / "config.json").read_text()
    changed = {
        "training.seed": 7,
        "batch.batch_size": 5,
        "task.negatives.num_negatives": 3,
        "task.encoder.num_layers": 1,
    }
    for name, value in changed.items():
        with pytest.raises(UserError, match="cannot change when a run resumes") as raised:
            trainer_of("hstu", tiny_data, tmp_path / "run", {**overrides, name: value}).train()
        assert (raised.value.option, raised.value.value) == (name, value)
    assert (tmp_path / "run" / "config.json").read_text() == config


def test_resume_reports_changed_options(tiny_data: Path, tmp_path: Path) -> None:
    trainer_of("hstu", tiny_data, tmp_path, {"training.max_steps": 2}).train()
    recorder = WarningRecorder()
    trainer_of("hstu", tiny_data, tmp_path, {"training.max_steps": 2}, recorder).train()
    assert recorder.warnings == []
    trainer_of(
        "hstu",
        tiny_data,
        tmp_path,
        {"training.max_steps": 3, "task.encoder.activation_checkpointing": "true"},
        recorder,
    ).train()
    assert [line.partition(": ")[2] for line in recorder.warnings] == [
        "task.encoder.activation_checkpointing was False and is now True",
        "training.max_steps was 2 and is now 3",
    ]
    assert "changed: training.max_steps was 2 and is now 3" in (tmp_path / "metrics.jsonl").read_text()


def test_resume_and_evaluation_reject_other_data(tiny_data: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    trainer_of("hstu", data, tmp_path / "run", {"training.max_steps": 2}).train()
    folder = Path(config_of("hstu", data, {}).data.folder)
    shutil.rmtree(folder)
    generate(preset("tiny", num_users=60, seed=5), folder)
    for action in (lambda t: t.train(), lambda t: t.measure("test", best=False)):
        with pytest.raises(UserError, match="this run was trained on other data") as raised:
            action(trainer_of("hstu", data, tmp_path / "run", {"training.max_steps": 2}))
        assert (raised.value.option, raised.value.value) == ("data.folder", str(folder))


@pytest.mark.parametrize(("num_events", "problem"), [(1, "no training samples"), (2, "no validation samples")])
def test_trainer_without_samples_is_rejected_before_the_start(tmp_path: Path, num_events: int, problem: str) -> None:
    rows = [f"{user},{user % 30 + event}" for user in range(60) for event in range(num_events)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item", *rows]))
    prepare("log", tmp_path / "log.csv", tmp_path / "sequences")
    overrides = {"task.encoder.time_bias": "false", "task.negatives.num_negatives": 4}
    with pytest.raises(UserError, match=problem):
        trainer_of("hstu", tmp_path, tmp_path / "run", overrides)
    assert not (tmp_path / "run").exists()


def test_trainer_without_test_split_trains_without_test_metrics(tiny_data: Path, tmp_path: Path) -> None:
    overrides = {"training.max_steps": 1, "task.split.test_fraction": 0.0}
    trainer = trainer_of("rows", tiny_data, tmp_path, overrides)
    trainer.train()
    with pytest.raises(UserError, match="so the test split is empty"):
        trainer.evaluate("test")
    assert not (tmp_path / "eval").exists()


def test_trainer_first_report_has_a_loss(tiny_data: Path, tmp_path: Path) -> None:
    trainer_of("hstu", tiny_data, tmp_path, {"training.max_steps": 1, "batch.batch_size": 1000}).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] > 0 for line in lines if line["kind"] == "step"] == [True]


def test_trainer_rejects_a_run_folder_in_use(tiny_data: Path, tmp_path: Path) -> None:
    overrides = {"training.max_steps": 3}
    raised = []

    def start_another() -> None:
        with pytest.raises(UserError, match="another process is training this run"):
            trainer_of("hstu", tiny_data, tmp_path, overrides).train()
        raised.append(True)

    with armed("train.step", start_another, at=2):
        assert trainer_of("hstu", tiny_data, tmp_path, overrides).train().step == 3
    assert raised == [True]
    assert trainer_of("hstu", tiny_data, tmp_path, {"training.max_steps": 4}).train().step == 4, "the lock is released"


def test_trainer_reports_the_loss_of_its_step(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of("rows", tiny_data, tmp_path, {"training.max_steps": 23, "training.eval_every_epochs": 2})
    losses: dict[int, float] = {}
    advance = trainer.schedule.advance

    def watched(step, feed):
        totals = advance(step, feed)
        losses[step.number] = float(totals.loss)
        return totals

    monkeypatch.setattr(trainer.schedule, "advance", watched)
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    reported = {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}
    assert len(reported) > 1
    assert 20 in reported
    assert reported == {step: losses[step] for step in reported}


def test_trainer_reads_no_batch_after_the_last_step(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline prefetches batches; an error in a batch that no step needs must not stop the run."""
    trainer = trainer_of("rows", tiny_data, tmp_path, {"training.max_steps": 3, "pipeline.schedule": "nested"})
    starting_at = trainer.loader.iterate_from

    def three_and_a_damaged_one(position: BatchPosition) -> Iterator[Batch]:
        yield from itertools.islice(starting_at(position), 3)
        raise DataError("is damaged")

    monkeypatch.setattr(trainer.loader, "iterate_from", three_and_a_damaged_one)
    assert trainer.train().step == 3


def test_micro_batches_above_window_cache_limit_are_rejected(tiny_data: Path, tmp_path: Path) -> None:
    many = {"batch.num_micro_batches": 32769, "pipeline.window_cache": True}
    with pytest.raises(UserError, match=r"batch.num_micro_batches=32769: the window cache supports at most"):
        trainer_of("rows", tiny_data, tmp_path, many)


def test_stop_signal_with_failed_background_save_is_an_error(tiny_data: Path, tmp_path: Path) -> None:
    """A clean stop would promise that the run can resume from a checkpoint that was not saved."""
    overrides = {**BACKGROUND, "training.max_steps": 12, "training.epochs": 9, "training.eval_every_epochs": 0}
    trainer = trainer_of("rows", tiny_data, tmp_path, overrides)
    with (
        armed("train.step", terminate, at=3),
        armed("checkpoint.before_rename", crash),
        pytest.raises(CheckpointSaveError),
    ):
        trainer.train()


@pytest.mark.parametrize(
    "overrides",
    [
        {"batch.num_micro_batches": 100_000, "batch.batch_size": 64},
        {"batch.num_micro_batches": 100_000, "batch.batch_size": "none", "batch.batch_tokens": 100_000},
        {"batch.num_micro_batches": 65, "batch.batch_size": 100, "pipeline.clustering": "greedy"},
    ],
)
def test_micro_batches_above_batch_size_are_rejected(tiny_data: Path, tmp_path, overrides) -> None:
    with pytest.raises(UserError) as error:
        trainer_of("hstu", tiny_data, tmp_path, overrides)
    assert (error.value.option, error.value.value) == ("batch.num_micro_batches", overrides["batch.num_micro_batches"])
    assert error.value.remedy


@pytest.mark.parametrize("micro_batches", [32, 40])
def test_micro_batches_may_be_partly_empty(tiny_data: Path, tmp_path: Path, micro_batches: int) -> None:
    overrides = {"training.max_steps": 1, "training.eval_every_epochs": 0, "batch.num_micro_batches": micro_batches}
    overrides["batch.batch_size"] = {32: 1, 40: 40}[micro_batches]
    assert trainer_of("hstu", tiny_data, tmp_path, overrides).train().step == 1


def test_step_plan_lists_the_actions_after_a_step(tiny_data: Path, tmp_path: Path) -> None:
    overrides = {"training.checkpoint_every_steps": 3, "training.max_steps": 5, "training.eval_every_epochs": 0}
    trainer = trainer_of("rows", tiny_data, tmp_path, overrides)
    batch = trainer.loader.load_one(BatchPosition())

    def plan_of(number: int, *, stop_requested: bool = False) -> StepPlan:
        trainer.state = replace(trainer.state, step=number - 1)
        trainer._meter.stop_requested = stop_requested
        return trainer._plan_step(batch)

    nothing = dict.fromkeys(("stops", "is_stop", "ends_window", "reports", "evaluates", "saves", "publishes"), False)
    assert plan_of(4) == StepPlan(**{**nothing, "number": 4, "is_fence": False})
    assert plan_of(3) == StepPlan(**{**nothing, "number": 3, "is_fence": True, "saves": True})
    assert plan_of(5) == StepPlan(**{**nothing, "number": 5, "is_fence": True}), "`train` itself saves the last step"
    assert plan_of(20).reports
    stopped = {"is_fence": True, "stops": True}
    assert plan_of(4, stop_requested=True) == StepPlan(**{**nothing, **stopped, "number": 4, "is_stop": True})
    assert plan_of(3, stop_requested=True) == StepPlan(**{**nothing, **stopped, "number": 3, "saves": True})
