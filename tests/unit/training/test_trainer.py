"""The loop on one rank: resumed against uninterrupted, ends of a run, mistakes. Real kills are in tests/faults."""

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

BACKGROUND = {"training.checkpoint_async": True, "training.incremental_saves": 2, "training.keep_checkpoints": 1}
EVICTIONS: dict[str, dict[str, object]] = {
    "ttl": {"eviction": "ttl", "ttl_steps": 1, "max_rows": 90, "admission_count": 2},
    "late sweeps": {"eviction": "ttl", "ttl_steps": 12, "max_rows": 150, "admission_count": 1},
    "lfu": {"eviction": "lfu", "max_rows": 60, "admission_count": 1},
    "no bound": {"eviction": "none", "max_rows": "none", "admission_count": 3},
}

SAVINGS: dict[str, dict[str, object]] = {"full": {}, "background": BACKGROUND}


def pairs_of(values: Iterable[str]) -> list[Any]:
    """Values with ways of saving: each value with one of them, in turn; the others are slow."""
    found = [(value, saving, (n + m) % 2) for n, value in enumerate(values) for m, saving in enumerate(SAVINGS)]
    return [pytest.param(v, saving, marks=pytest.mark.slow if is_slow else []) for v, saving, is_slow in found]


class Crash(Exception):
    pass


class Heard(TrainingCallback):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warned(self, message: str) -> None:
        self.warnings.append(message)


def crash() -> None:
    raise Crash


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def trainer_of(
    family: str, data: Path, run: Path, more: Mapping[str, object], listener: TrainingCallback | None = None
) -> Trainer:
    return Trainer(config_of(family, data, more), run, Topology.single(), listener)


def train_through_crashes(family: str, data: Path, run: Path, more: Mapping[str, object], crashes: list[int]) -> int:
    """Start again after each crash, given as steps since the start; how many crashes there were.

    A run reports in step 20: a crash soon after it leaves lines that are written again.
    """
    for count in crashes:
        trainer = trainer_of(family, data, run, more)
        with armed("train.step", crash, at=count), pytest.raises(Crash):
            trainer.train()
        trainer.saving.close()  # a process that dies takes its background save with it; here it would go on
    trainer_of(family, data, run, more).train()
    return len(crashes)


def without_times(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = ("kind", "step", "epoch", "loss", "learning_rate", "metrics", "part")
    return [{name: line[name] for name in kept if name in line} for line in lines if line["kind"] != "event"]


@pytest.mark.parametrize(("family", "saving"), pairs_of(FAMILIES))
def test_a_resumed_run_equals_an_uninterrupted_one(tiny_data: Path, tmp_path: Path, family: str, saving: str) -> None:
    more = {"training.max_steps": 24, "training.checkpoint_every_steps": 3, **SAVINGS[saving]}
    trainer_of(family, tiny_data, tmp_path / "whole", more).train()
    assert train_through_crashes(family, tiny_data, tmp_path / "cut", more, [2, 8, 15]) == 3
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "whole")
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "whole")


@pytest.mark.parametrize(("store", "saving"), pairs_of(EVICTIONS))
def test_what_a_dynamic_table_admits_and_evicts_is_the_same_after_a_restart(
    tiny_data: Path, tmp_path: Path, store: str, saving: str
) -> None:
    given = {f"task.table_store.{name}": value for name, value in EVICTIONS[store].items()}
    more = {"training.max_steps": 44, "training.checkpoint_every_steps": 4, "batch.batch_samples": 2, **given}
    more |= SAVINGS[saving]
    whole = trainer_of("rows", tiny_data, tmp_path / "whole", more)
    whole.train()
    train_through_crashes("rows", tiny_data, tmp_path / "cut", more, [18, 13])
    cut = trainer_of("rows", tiny_data, tmp_path / "cut", more)
    cut.saving.restore_last()
    assert cut.session.engine.digest("categories") == whole.session.engine.digest("categories")
    waiting = [t.session.engine.unsettled("categories") for t in (cut, whole)]
    assert all((waiting[0][name] == waiting[1][name]).all() for name in ("keys", "uses", "last_step", "newest_step"))
    tensors = [{k: v for k, v in run_digest(tmp_path / r).items() if "table" not in k} for r in ("cut", "whole")]
    assert tensors[0] == tensors[1]


def test_incremental_checkpoints_hold_only_what_changed(tiny_data: Path, tmp_path: Path) -> None:
    more = {"training.max_steps": 6, "training.checkpoint_every_steps": 1, "training.keep_checkpoints": 9, **BACKGROUND}
    more |= {"batch.batch_samples": 1, "training.keep_checkpoints": 9, "task.num_negatives": 1}
    trainer_of("hstu", tiny_data, tmp_path, more).train()
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
        batch = trainer.batches.build(position)
        following = trainer.batches.order.after(position)
        expected, position = expected.after(batch, following), following
    assert trainer.train().consumed == expected.consumed != state.consumed


def test_measuring_the_best_epoch_forgets_rows_made_later(tiny_data: Path, tmp_path: Path) -> None:
    more = {"training.max_steps": 1, "batch.batch_samples": 2, "training.keep_checkpoints": 9}
    first = trainer_of("hstu", tiny_data, tmp_path, more)
    first.train()
    early = first.session.engine.digest("items")
    at_start = first.measure("test", best=True)
    later = trainer_of("hstu", tiny_data, tmp_path, {**more, "training.max_steps": 6})
    later.train()
    assert later.session.engine.digest("items") != early
    later.session.restore(CheckpointManager(tmp_path / "checkpoints").restore(1))
    assert later.session.engine.digest("items") == early
    again = later.session.task.evaluate(later.session.engine, "test")
    assert np.array_equal(again.details["rank/model"], at_start.details["rank/model"])
    later.measure("test", best=False)
    assert later.state.step == 6


def test_a_non_finite_loss_names_its_step_and_leaves_the_last_checkpoint(tiny_data: Path, tmp_path: Path) -> None:
    more = {"training.max_steps": 4, "training.checkpoint_every_steps": 4, "training.evaluate_every_epochs": 0}
    trainer_of("hstu", tiny_data, tmp_path, more).train()
    before = run_digest(tmp_path)
    again = trainer_of("hstu", tiny_data, tmp_path, {**more, "training.max_steps": 12, "optimizer.learning_rate": 1e30})
    with pytest.raises(NonFiniteError, match=r"at step [56]: the run stops, the last checkpoint is intact"):
        again.train()
    assert run_digest(tmp_path) == before
    trainer_of("hstu", tiny_data, tmp_path, {**more, "training.max_steps": 8}).train()


@pytest.mark.parametrize("saving", [{}, BACKGROUND], ids=["full", "background"])
def test_rows_that_are_not_finite_are_not_saved(tiny_data: Path, tmp_path: Path, saving: dict) -> None:
    """The loss of the last step has not seen its own update, so only the rows tell."""
    more = {
        "training.max_steps": 4,
        "training.checkpoint_every_steps": 4,
        "training.evaluate_every_epochs": 0,
        **saving,
    }
    trainer_of("rows", tiny_data, tmp_path, more).train()
    before = run_digest(tmp_path)
    again = {**more, "training.max_steps": 5, "optimizer.table_learning_rate": 3e38}
    with pytest.raises(NonFiniteError, match="table 'categories' are not finite") as refused:
        trainer_of("rows", tiny_data, tmp_path, again).train()
    assert "the last checkpoint is intact" in str(refused.value)
    assert "smaller learning rate" in refused.value.remedy
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]
    assert run_digest(tmp_path) == before
    trainer_of("rows", tiny_data, tmp_path, {**more, "training.max_steps": 8}).train()


def test_told_to_stop_it_saves_and_goes_on_later(tiny_data: Path, tmp_path: Path) -> None:
    more = {"training.max_steps": 12}
    trainer_of("sasrec", tiny_data, tmp_path / "whole", more).train()
    trainer = trainer_of("sasrec", tiny_data, tmp_path / "cut", more)
    with armed("train.step", terminate, at=4), pytest.raises(RunInterruptedError):
        trainer.train()
    # The signal came after step 4; ranks agree in step 5, it is read in step 6, and no batch begins after step 7.
    assert trainer.state.step == 7
    assert CheckpointManager(tmp_path / "cut" / "checkpoints").steps()[-1] == 7
    trainer_of("sasrec", tiny_data, tmp_path / "cut", more).train()
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "whole")


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_taken(tiny_data: Path, tmp_path: Path) -> None:
    more = {"training.max_steps": 6, "training.checkpoint_every_steps": 2}
    trainer_of("ranking", tiny_data, tmp_path, more).train()
    before = run_digest(tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000006" / "tensors-00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    listener = Heard()
    trainer = trainer_of("ranking", tiny_data, tmp_path, more, listener)
    trainer.train()
    assert "checkpoint of step 6 is damaged and skipped" in listener.warnings[0]
    assert run_digest(tmp_path) == before
    assert '"resumed from step 4"' in (tmp_path / "metrics.jsonl").read_text()


def test_a_start_after_a_crash_says_what_was_lost(tiny_data: Path, tmp_path: Path) -> None:
    more = {"training.max_steps": 9, "training.checkpoint_every_steps": 4, "training.evaluate_every_epochs": 0}
    with armed("train.step", crash, at=7), pytest.raises(Crash):
        trainer_of("ranking", tiny_data, tmp_path, more).train()
    trainer_of("ranking", tiny_data, tmp_path, more).train()
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lost = [event for event in events if "lost_steps" in event]
    assert [(event["step"], event["lost_steps"]) for event in lost] == [(4, 3)]
    assert 0 < lost[0]["lost_s"] < 60
    assert lost[0]["text"] == f"lost: 3 steps, {lost[0]['lost_s']:.1f} s of work"


@pytest.mark.parametrize("field", ["task.encoder.num_layers", "task.encoder.num_heads"])
def test_a_run_is_not_continued_with_another_model(tiny_data: Path, tmp_path: Path, field: str) -> None:
    more = {"training.max_steps": 1}
    trainer_of("hstu", tiny_data, tmp_path, more).train()
    (tmp_path / "config.json").unlink()  # as where checkpoints alone were copied
    with pytest.raises(UserError, match="the checkpoint is of another model"):
        trainer_of("hstu", tiny_data, tmp_path, {**more, field: 3}).train()
    assert not (tmp_path / "config.json").exists()


def test_patience_ends_a_run_and_steps_bound_it(tiny_data: Path, tmp_path: Path) -> None:
    patient = trainer_of("sasrec", tiny_data, tmp_path / "a", {"training.patience": 2, "optimizer.learning_rate": 0.0})
    patient.train()
    assert (patient.state.position.epoch, patient.state.best_step) == (3, 3)
    assert CheckpointManager(tmp_path / "a" / "best").steps() == [3]
    manifests = [tmp_path / "a" / name / "step-00000003" / "manifest.json" for name in ("best", "checkpoints")]
    assert manifests[0].samefile(manifests[1]), "one checkpoint in two places"
    bounded = trainer_of("sasrec", tiny_data, tmp_path / "b", {"training.max_steps": 4})
    assert bounded.train().step == 4
    unmeasured = trainer_of(
        "sasrec", tiny_data, tmp_path / "c", {"training.epochs": 2, "training.evaluate_every_epochs": 0}
    )
    assert unmeasured.train().position == BatchPosition(2, 0)
    assert unmeasured.state.best_step is None
    assert unmeasured.evaluate("valid").score > 0


def test_warm_up_grows_both_rates_linearly(tiny_data: Path, tmp_path: Path) -> None:
    more = {"optimizer.warmup_steps": 4, "optimizer.learning_rate": 0.4, "optimizer.table_learning_rate": 0.8}
    trainer = trainer_of("hstu", tiny_data, tmp_path, {**more, "training.max_steps": 1})
    assert trainer._rates().dense == pytest.approx(0.1)
    assert trainer._rates().tables == pytest.approx(0.2)


def test_running_means_of_weights_are_measured_saved_and_exported(tiny_data: Path, tmp_path: Path) -> None:
    more = {"training.max_steps": 6, "optimizer.ema": 0.9, "optimizer.clip_norm": 1.0, "optimizer.learning_rate": 0.05}
    trainer = trainer_of("hstu", tiny_data, tmp_path / "run", more)
    trainer.train()
    found = trainer.measure("valid", best=False).metrics["model"]
    dense = trainer.session.dense
    with dense.averaged():
        weights = {name: tensor.clone() for name, tensor in trainer.session.task.model.state_dict().items()}
        expected = trainer.session.task.evaluate(trainer.session.engine, "valid").metrics["model"]
    assert repr(found) == repr(expected)
    assert repr(found) != repr(trainer.session.task.evaluate(trainer.session.engine, "valid").metrics["model"])
    with restored_session(tmp_path / "run", best=False) as (session, step):
        assert step == 6
        exported = session.task.model.state_dict()
        assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        ("hstu", {"data.folder": "/nowhere", "data.synthetic": "none"}, "there is no prepared dataset here"),
        ("hstu", {"data.folder": ""}, "no dataset is named"),
        ("hstu", {"task.history.max_length": 13}, "differs from task.encoder.max_length = 12"),
        ("ranking", {"task.inputs.labels": "clik"}, "did you mean 'click'"),
        ("ranking", {"task.encoder.max_length": 15}, "must be twice task.inputs.max_events = 8"),
        ("ranking", {"task.split.valid_from": "2100-01-01"}, "is later than test_from"),
    ],
)
def test_mistakes_name_the_field_and_the_remedy(
    tiny_data: Path, tmp_path: Path, family: str, more: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        trainer_of(family, tiny_data, tmp_path, more)
    assert caught.value.remedy


def test_a_run_that_goes_on_refuses_what_would_make_it_another_run(tiny_data: Path, tmp_path: Path) -> None:
    more = {"training.max_steps": 2}
    trainer_of("hstu", tiny_data, tmp_path / "run", more).train()
    config = (tmp_path / "run" / "config.json").read_text()
    changed = {"training.seed": 7, "batch.batch_samples": 5, "task.num_negatives": 3, "task.encoder.num_layers": 1}
    for name, value in changed.items():
        with pytest.raises(UserError, match="may not change while it goes on") as refused:
            trainer_of("hstu", tiny_data, tmp_path / "run", {**more, name: value}).train()
        assert (refused.value.option, refused.value.value) == (name, value)
    assert (tmp_path / "run" / "config.json").read_text() == config


def test_a_run_that_goes_on_tells_what_was_changed(tiny_data: Path, tmp_path: Path) -> None:
    trainer_of("hstu", tiny_data, tmp_path, {"training.max_steps": 2}).train()
    heard = Heard()
    trainer_of("hstu", tiny_data, tmp_path, {"training.max_steps": 2}, heard).train()
    assert heard.warnings == []
    trainer_of("hstu", tiny_data, tmp_path, {"training.max_steps": 3, "task.encoder.recompute": "true"}, heard).train()
    assert [line.partition(": ")[2] for line in heard.warnings] == [
        "task.encoder.recompute was False, is True",
        "training.max_steps was 2, is 3",
    ]
    assert "changed: training.max_steps was 2, is 3" in (tmp_path / "metrics.jsonl").read_text()


def test_neither_training_nor_measuring_goes_on_with_other_data(tiny_data: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    trainer_of("hstu", data, tmp_path / "run", {"training.max_steps": 2}).train()
    folder = Path(config_of("hstu", data, {}).data.folder)
    shutil.rmtree(folder)
    generate(preset("tiny", num_users=60, seed=5), folder)
    for action in (lambda t: t.train(), lambda t: t.measure("test", best=False)):
        with pytest.raises(UserError, match="is not the data that this run was trained on"):
            action(trainer_of("hstu", data, tmp_path / "run", {"training.max_steps": 2}))


@pytest.mark.parametrize(("num_events", "problem"), [(1, "nothing to train on"), (2, "nothing to validate on")])
def test_a_run_with_nothing_to_train_on_or_to_measure_by_is_refused_before_it_begins(
    tmp_path: Path, num_events: int, problem: str
) -> None:
    rows = [f"{user},{user % 30 + event}" for user in range(60) for event in range(num_events)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item", *rows]))
    prepare("log", tmp_path / "log.csv", tmp_path / "sequences")
    more = {"task.encoder.time_bias": "false", "task.num_negatives": 4}
    with pytest.raises(UserError, match=problem):
        trainer_of("hstu", tmp_path, tmp_path / "run", more)
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_test_part_trains_and_is_not_measured_on_it(tiny_data: Path, tmp_path: Path) -> None:
    more = {"training.max_steps": 1, "task.test_share": 0.0}
    trainer = trainer_of("rows", tiny_data, tmp_path, more)
    trainer.train()
    with pytest.raises(UserError, match="so there is no test part"):
        trainer.evaluate("test")
    assert not (tmp_path / "eval").exists()


def test_the_first_report_has_a_loss(tiny_data: Path, tmp_path: Path) -> None:
    trainer_of("hstu", tiny_data, tmp_path, {"training.max_steps": 1, "batch.batch_samples": 1000}).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] > 0 for line in lines if line["kind"] == "step"] == [True]


def test_two_trainers_do_not_write_into_one_folder(tiny_data: Path, tmp_path: Path) -> None:
    more = {"training.max_steps": 3}
    refused = []

    def start_another() -> None:
        with pytest.raises(UserError, match="is being trained by another process"):
            trainer_of("hstu", tiny_data, tmp_path, more).train()
        refused.append(True)

    with armed("train.step", start_another, at=2):
        assert trainer_of("hstu", tiny_data, tmp_path, more).train().step == 3
    assert refused == [True]
    assert trainer_of("hstu", tiny_data, tmp_path, {"training.max_steps": 4}).train().step == 4, "it is free again"


def test_a_reported_loss_is_that_of_its_step(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of("rows", tiny_data, tmp_path, {"training.max_steps": 23, "training.evaluate_every_epochs": 2})
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


def test_no_batch_beyond_the_last_step_is_looked_at(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline takes batches ahead of their step; what is wrong with one that no step needs is nobody's business."""
    trainer = trainer_of("rows", tiny_data, tmp_path, {"training.max_steps": 3, "pipeline.schedule": "nested"})
    starting_at = trainer.batches.starting_at

    def three_and_a_damaged_one(position: BatchPosition) -> Iterator[Batch]:
        yield from itertools.islice(starting_at(position), 3)
        raise DataError("is damaged")

    monkeypatch.setattr(trainer.batches, "starting_at", three_and_a_damaged_one)
    assert trainer.train().step == 3


def test_more_micro_batches_than_the_window_cache_can_number_are_refused(tiny_data: Path, tmp_path: Path) -> None:
    many = {"batch.micro_batches": 32769, "pipeline.window_cache": True}
    with pytest.raises(UserError, match=r"batch.micro_batches=32769: is more than the window cache can tell apart"):
        trainer_of("rows", tiny_data, tmp_path, many)


def test_a_run_told_to_stop_says_so_where_its_save_in_the_background_failed(tiny_data: Path, tmp_path: Path) -> None:
    """Whoever reads that it stopped will start it again and count on what it saved."""
    given = {**BACKGROUND, "training.max_steps": 12, "training.epochs": 9, "training.evaluate_every_epochs": 0}
    trainer = trainer_of("rows", tiny_data, tmp_path, given)
    with (
        armed("train.step", terminate, at=3),
        armed("checkpoint.before_rename", crash),
        pytest.raises(CheckpointSaveError),
    ):
        trainer.train()


@pytest.mark.parametrize(
    "given",
    [
        {"batch.micro_batches": 100_000, "batch.batch_samples": 64},
        {"batch.micro_batches": 100_000, "batch.batch_samples": "none", "batch.batch_tokens": 100_000},
        {"batch.micro_batches": 65, "batch.batch_samples": 100, "pipeline.clustering": "greedy"},
    ],
)
def test_more_micro_batches_than_a_batch_can_fill_are_refused_before_any_step(tiny_data: Path, tmp_path, given) -> None:
    with pytest.raises(UserError) as error:
        trainer_of("hstu", tiny_data, tmp_path, given)
    assert (error.value.option, error.value.value) == ("batch.micro_batches", given["batch.micro_batches"])
    assert error.value.remedy


@pytest.mark.parametrize("micro_batches", [32, 40])
def test_micro_batches_may_be_empty_while_others_are_not(tiny_data: Path, tmp_path: Path, micro_batches: int) -> None:
    more = {"training.max_steps": 1, "training.evaluate_every_epochs": 0, "batch.micro_batches": micro_batches}
    more["batch.batch_samples"] = {32: 1, 40: 40}[micro_batches]
    assert trainer_of("hstu", tiny_data, tmp_path, more).train().step == 1


def test_step_plan_says_what_follows_a_step(tiny_data: Path, tmp_path: Path) -> None:
    given = {"training.checkpoint_every_steps": 3, "training.max_steps": 5, "training.evaluate_every_epochs": 0}
    trainer = trainer_of("rows", tiny_data, tmp_path, given)
    batch = trainer.batches.build(BatchPosition())

    def plan_of(number: int, *, wants_stop: bool = False) -> StepPlan:
        trainer.state = replace(trainer.state, step=number - 1)
        trainer._meter.wants_stop = wants_stop
        return trainer._plan_step(batch)

    nothing = dict.fromkeys(("stops", "is_stop", "ends_window", "reports", "evaluates", "saves", "publishes"), False)
    assert plan_of(4) == StepPlan(**{**nothing, "number": 4, "is_fence": False})
    assert plan_of(3) == StepPlan(**{**nothing, "number": 3, "is_fence": True, "saves": True})
    assert plan_of(5) == StepPlan(**{**nothing, "number": 5, "is_fence": True}), "the last step; `train` saves it"
    assert plan_of(20).reports
    stopped = {"is_fence": True, "stops": True}
    assert plan_of(4, wants_stop=True) == StepPlan(**{**nothing, **stopped, "number": 4, "is_stop": True})
    assert plan_of(3, wants_stop=True) == StepPlan(**{**nothing, **stopped, "number": 3, "saves": True})
