"""Chronological training on time windows, and warm starts from other runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.checkpoint import CheckpointManager
from nestrec.data.dataset import Dataset
from nestrec.data.incremental.append import append
from nestrec.data.synthetic.synthetic_logs import SPAN_MS, START_MS
from nestrec.distributed import Topology
from nestrec.embedding.initial import initial_rows
from nestrec.report.run_page import render
from nestrec.report.run_records import load_run
from nestrec.tasks import retrieval_task
from nestrec.tasks.metrics import bootstrap
from nestrec.training.callbacks import TrainingCallback
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from nestrec.training.training_session import WindowEnd
from support.fail_points import armed
from support.tiny_runs import config_of

IN_TIME = {
    "batch.order": "chronological",
    "windows.hours": 120,
    "windows.replay_fraction": 0.2,
    "training.epochs": 1,
    "training.eval_every_epochs": 0,
}
FAMILIES = ("hstu", "ranking")


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


def trainer_of(family: str, data: Path, run: Path, overrides: dict[str, Any], **arguments: Any) -> Trainer:
    return Trainer(config_of(family, data, overrides), run, Topology.single(), **arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_time_windows_are_evaluated_then_trained_then_reported(tiny_data: Path, tmp_path: Path, family: str) -> None:
    ends: list[WindowEnd] = []
    evaluations: list[tuple[int, int]] = []

    class EvaluationRecorder(TrainingCallback):
        def on_window_evaluation(self, window: Any, metrics: Any, step: int) -> None:
            evaluations.append((window.number, step))

    def hook(end: WindowEnd) -> None:
        assert end.state.step in CheckpointManager(tmp_path / "checkpoints").steps()
        ends.append(end)

    trainer = trainer_of(family, tiny_data, tmp_path, IN_TIME, callback=EvaluationRecorder(), window_hooks=[hook])
    state = trainer.train()
    num_windows = len(trainer.windows)
    assert num_windows > 2
    assert [number for number, _ in evaluations] == list(range(num_windows))
    # A window is evaluated with the weights after the last step of the previous window.
    assert [step for _, step in evaluations] == [0, *(end.state.step for end in ends[:-1])]
    assert [end.number for end in ends] == list(range(num_windows))
    assert ends[-1].state.step == state.step
    run = load_run(tmp_path)
    assert [record["window"] for record in run.windows] == list(range(num_windows))
    metric = "ndcg@10" if family == "hstu" else "gauc/click"
    assert any(np.isfinite(record["metrics"][metric][0]) for record in run.windows)
    assert f"{metric} (next window)" in render(run)


def test_time_window_intervals_resample_users_not_events(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, Any]] = []

    def recording_bootstrap(values: Any, **options: Any) -> Any:
        drawn.append((len(values["hr@10"]), options["groups"]))
        return bootstrap(values, **options)

    monkeypatch.setattr(retrieval_task, "bootstrap", recording_bootstrap)
    trainer_of("hstu", tiny_data, tmp_path, {**IN_TIME, "training.max_steps": 2}).train()
    assert drawn
    assert all(count == len(users) > len(set(users.tolist())) for count, users in drawn if count > 20)


@pytest.mark.parametrize("family", FAMILIES)
def test_time_windows_resume_bitwise_after_crashes(tiny_data: Path, tmp_path: Path, family: str) -> None:
    overrides = {**IN_TIME, "training.checkpoint_every_steps": 2, "pipeline.schedule": "nested"}
    trainer_of(family, tiny_data, tmp_path / "uninterrupted", {**overrides, "pipeline.schedule": "serial"}).train()
    for at in (3, 2):
        with armed("train.step", crash, at=at), pytest.raises(Crash):
            trainer_of(family, tiny_data, tmp_path / "cut", overrides).train()
    trainer_of(family, tiny_data, tmp_path / "cut", overrides).train()
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "uninterrupted")
    windows = [load_run(tmp_path / name).windows for name in ("cut", "uninterrupted")]
    assert json.dumps(windows[0]) == json.dumps(windows[1])


def state_of(run: Path) -> dict[str, str]:
    """Returns the digests of weights, rows and optimizer state."""
    return {name: digest for name, digest in run_digest(run).items() if name.startswith(("tensor", "table"))}


@pytest.mark.parametrize("family", ["hstu", "rows"])
def test_warm_start_copies_weights_and_state_bitwise(tiny_data: Path, tmp_path: Path, family: str) -> None:
    first = {"training.max_steps": 6, "training.eval_every_epochs": 0}
    trainer_of(family, tiny_data, tmp_path / "first", first).train()
    notes: list[str] = []

    class MessageRecorder(TrainingCallback):
        def on_message(self, message: str) -> None:
            notes.append(message)

    second = {"training.max_steps": 2, "training.eval_every_epochs": 0, "training.checkpoint_every_steps": 1}
    trainer = trainer_of(
        family, tiny_data, tmp_path / "second", second, callback=MessageRecorder(), warm_start=tmp_path / "first"
    )
    trainer._begin()
    trainer.checkpointer.save(trainer.state)
    trainer.checkpointer.close()
    assert state_of(tmp_path / "second") == state_of(tmp_path / "first")
    assert any("after step 6" in note for note in notes)
    assert any(note.startswith("table ") for note in notes)
    state = trainer_of(family, tiny_data, tmp_path / "third", second, warm_start=tmp_path / "first").train()
    assert (state.first_step, state.step) == (6, 8)
    assert json.loads((tmp_path / "third" / "beginning.json").read_text())["run"].endswith("first")
    # A second start resumes from the run's own checkpoints; a warm start from another run is rejected.
    again = {**second, "training.max_steps": 4}
    assert trainer_of(family, tiny_data, tmp_path / "third", again, warm_start=tmp_path / "first").train().step == 10
    with pytest.raises(UserError, match="resumes from its own checkpoints"):
        trainer_of(family, tiny_data, tmp_path / "third", again, warm_start=tmp_path / "second").train()


def test_warm_start_trains_on_appended_data(tiny_data: Path, tmp_path: Path) -> None:
    """Rows of old items are copied bitwise, rows of new items get initial values, and only new events are trained."""
    data = tmp_path / "data"
    shutil.copytree(tiny_data / "sequences", data / "sequences")
    first = {"training.max_steps": 5, "training.eval_every_epochs": 0}
    trainer_of("hstu", data, tmp_path / "first", first).train()
    lines = ["user,item,time_ms,click,like,long_view"]
    lines += [f"{u},{i},{START_MS + 9 * SPAN_MS + u * 1000 + i},1,0,0" for u in (1, 3, 77) for i in (5, 900, 6, 901)]
    (tmp_path / "more.csv").write_text("\n".join(lines) + "\n")
    columns = {"log.time": "time_ms", "log.time_unit": "ms", "log.actions": "click=click,like=like,long_view=long_view"}
    before = Dataset.open(data / "sequences")
    append(tmp_path / "more.csv", data / "sequences", format="log", overrides=columns)
    overrides = {**IN_TIME, "training.max_steps": 1}
    trainer = trainer_of("hstu", data, tmp_path / "second", overrides, warm_start=tmp_path / "first")
    # The window has all new events except the last two of each user, which are held out.
    assert [w.num_events for w in trainer.windows] == [6]
    trainer._begin()
    engine = trainer.session.engine
    keys = np.arange(before.num_items + 3)
    rows = engine.shards["items"].read(keys)
    saved = CheckpointManager(tmp_path / "first" / "checkpoints").restore_latest()
    assert saved is not None
    chunk = next(iter(saved.rows("items")))
    weight = engine.shards["items"].layout.view(rows, "weight")
    assert torch.equal(weight[chunk["keys"]], chunk["weight"])
    fresh = initial_rows(keys[-2:], engine.tables["items"], engine.shards["items"].layout, engine.device)
    assert torch.equal(rows[-2:], fresh)
    log = (tmp_path / "second" / "metrics.jsonl").read_text()
    assert "generation 1, with 1 users, 2 items, 12 events more" in log
    assert f"table items: {before.num_items + 1} rows loaded, 2 new" in log
    assert trainer.train().step == 6


def test_warm_start_rejects_runs_that_do_not_match(tiny_data: Path, tmp_path: Path) -> None:
    trainer_of("hstu", tiny_data, tmp_path / "first", {"training.max_steps": 1}).train()
    with pytest.raises(UserError, match="whose ids differ from those of"):
        trainer_of("rows", tiny_data, tmp_path / "other", {}, warm_start=tmp_path / "first")
    wider = {"task.encoder.dim": 16, "task.encoder.head_dim": 8}
    with pytest.raises(UserError, match="table items"):
        trainer_of("hstu", tiny_data, tmp_path / "wider", wider, warm_start=tmp_path / "first")
    with pytest.raises(UserError, match="samples of this task have no time"):
        trainer_of("rows", tiny_data, tmp_path / "rows", IN_TIME)
    with pytest.raises(UserError, match="there are no time windows"):
        trainer_of("hstu", tiny_data, tmp_path / "shuffled", {"windows.hours": 5}).train()


def test_warm_start_after_all_events_is_rejected_with_its_time(tiny_data: Path, tmp_path: Path) -> None:
    """One event of a wrong clock in the data of the first run is enough: no new event is later."""
    data = tmp_path / "data"
    shutil.copytree(tiny_data / "sequences", data / "sequences")
    columns = {"log.time": "time_ms", "log.time_unit": "ms", "log.actions": "click=click,like=like,long_view=long_view"}
    far = {"wrong": START_MS + 700 * SPAN_MS, "right": START_MS + 9 * SPAN_MS}
    for name, start in far.items():
        if name == "right":
            first = {"training.max_steps": 1, "training.eval_every_epochs": 0}
            trainer_of("hstu", data, tmp_path / "first", first).train()
        lines = ["user,item,time_ms,click,like,long_view", *(f"1,{i},{start + i},1,0,0" for i in range(1, 5))]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
        overrides = {**columns, "log.max_future_s": "none"}
        append(tmp_path / f"{name}.csv", data / "sequences", format="log", overrides=overrides)
    with pytest.raises(
        UserError, match=r"(?s)windows.start_time.*no training events from this time onward.*first was trained on"
    ):
        trainer_of("hstu", data, tmp_path / "second", IN_TIME, warm_start=tmp_path / "first")
    named = {**IN_TIME, "windows.start_time": "2020-01-01", "windows.hours": 10_000}
    assert trainer_of("hstu", data, tmp_path / "second", named, warm_start=tmp_path / "first").windows
