"""Training in the order of time, and runs that begin where others stand."""

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
    "windows.replay_share": 0.2,
    "training.epochs": 1,
    "training.evaluate_every_epochs": 0,
}
FAMILIES = ("hstu", "ranking")


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


def trainer_of(family: str, data: Path, run: Path, more: dict[str, Any], **given: Any) -> Trainer:
    return Trainer(config_of(family, data, more), run, Topology.single(), **given)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_window_is_predicted_then_trained_on_then_told(tiny_data: Path, tmp_path: Path, family: str) -> None:
    told: list[WindowEnd] = []
    heard: list[tuple[int, int]] = []

    class Heard(TrainingCallback):
        def predicted(self, window: Any, metrics: Any, step: int) -> None:
            heard.append((window.number, step))

    def hook(end: WindowEnd) -> None:
        assert end.state.step in CheckpointManager(tmp_path / "checkpoints").steps()
        told.append(end)

    trainer = trainer_of(family, tiny_data, tmp_path, IN_TIME, listener=Heard(), window_hooks=[hook])
    state = trainer.train()
    num_windows = len(trainer.windows)
    assert num_windows > 2
    assert [number for number, _ in heard] == list(range(num_windows))
    # The weights that saw a window are those after the last step of the window before.
    assert [step for _, step in heard] == [0, *(end.state.step for end in told[:-1])]
    assert [end.number for end in told] == list(range(num_windows))
    assert told[-1].state.step == state.step
    run = load_run(tmp_path)
    assert [record["window"] for record in run.windows] == list(range(num_windows))
    metric = "ndcg@10" if family == "hstu" else "gauc/click"
    assert any(np.isfinite(record["metrics"][metric][0]) for record in run.windows)
    assert f"{metric} (next window)" in render(run)


def test_intervals_of_a_window_draw_its_users_and_not_its_events(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, Any]] = []

    def heard(values: Any, **given: Any) -> Any:
        drawn.append((len(values["hr@10"]), given["groups"]))
        return bootstrap(values, **given)

    monkeypatch.setattr(retrieval_task, "bootstrap", heard)
    trainer_of("hstu", tiny_data, tmp_path, {**IN_TIME, "training.max_steps": 2}).train()
    assert drawn
    assert all(count == len(users) > len(set(users.tolist())) for count, users in drawn if count > 20)


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_cut_short_are_the_same_training(tiny_data: Path, tmp_path: Path, family: str) -> None:
    more = {**IN_TIME, "training.checkpoint_every_steps": 2, "pipeline.schedule": "nested"}
    trainer_of(family, tiny_data, tmp_path / "whole", {**more, "pipeline.schedule": "serial"}).train()
    for at in (3, 2):
        with armed("train.step", crash, at=at), pytest.raises(Crash):
            trainer_of(family, tiny_data, tmp_path / "cut", more).train()
    trainer_of(family, tiny_data, tmp_path / "cut", more).train()
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "whole")
    windows = [load_run(tmp_path / name).windows for name in ("cut", "whole")]
    assert json.dumps(windows[0]) == json.dumps(windows[1])


def state_of(run: Path) -> dict[str, str]:
    """Digests of weights, rows and optimiser state alone."""
    return {name: digest for name, digest in run_digest(run).items() if name.startswith(("tensor", "table"))}


@pytest.mark.parametrize("family", ["hstu", "rows"])
def test_a_run_begins_with_the_bits_of_another(tiny_data: Path, tmp_path: Path, family: str) -> None:
    first = {"training.max_steps": 6, "training.evaluate_every_epochs": 0}
    trainer_of(family, tiny_data, tmp_path / "first", first).train()
    notes: list[str] = []

    class Heard(TrainingCallback):
        def noted(self, message: str) -> None:
            notes.append(message)

    second = {"training.max_steps": 2, "training.evaluate_every_epochs": 0, "training.checkpoint_every_steps": 1}
    trainer = trainer_of(
        family, tiny_data, tmp_path / "second", second, listener=Heard(), start_from=tmp_path / "first"
    )
    trainer._begin()
    trainer.saving.save(trainer.state)
    trainer.saving.close()
    assert state_of(tmp_path / "second") == state_of(tmp_path / "first")
    assert any("after step 6" in note for note in notes)
    assert any(note.startswith("table ") for note in notes)
    state = trainer_of(family, tiny_data, tmp_path / "third", second, start_from=tmp_path / "first").train()
    assert (state.first_step, state.step) == (6, 8)
    assert json.loads((tmp_path / "third" / "beginning.json").read_text())["run"].endswith("first")
    # Started again, it goes on from its own checkpoints; from another run it cannot.
    again = {**second, "training.max_steps": 4}
    assert trainer_of(family, tiny_data, tmp_path / "third", again, start_from=tmp_path / "first").train().step == 10
    with pytest.raises(UserError, match="goes on from its own checkpoints"):
        trainer_of(family, tiny_data, tmp_path / "third", again, start_from=tmp_path / "second").train()


def test_a_run_goes_on_with_what_was_appended_to_its_data(tiny_data: Path, tmp_path: Path) -> None:
    """Rows of old items are taken over to the bit, those of new ones begin as in any table; new events alone train."""
    data = tmp_path / "data"
    shutil.copytree(tiny_data / "sequences", data / "sequences")
    first = {"training.max_steps": 5, "training.evaluate_every_epochs": 0}
    trainer_of("hstu", data, tmp_path / "first", first).train()
    lines = ["user,item,time_ms,click,like,long_view"]
    lines += [f"{u},{i},{START_MS + 9 * SPAN_MS + u * 1000 + i},1,0,0" for u in (1, 3, 77) for i in (5, 900, 6, 901)]
    (tmp_path / "more.csv").write_text("\n".join(lines) + "\n")
    columns = {"log.time": "time_ms", "log.time_unit": "ms", "log.actions": "click=click,like=like,long_view=long_view"}
    before = Dataset.open(data / "sequences")
    append(tmp_path / "more.csv", data / "sequences", format="log", overrides=columns)
    more = {**IN_TIME, "training.max_steps": 1}
    trainer = trainer_of("hstu", data, tmp_path / "second", more, start_from=tmp_path / "first")
    assert [w.num_events for w in trainer.windows] == [6]  # all new events but the two last of each user, held out
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
    told = (tmp_path / "second" / "metrics.jsonl").read_text()
    assert "generation 1, with 1 users, 2 items, 12 events more" in told
    assert f"table items: {before.num_items + 1} rows taken over, 2 new" in told
    assert trainer.train().step == 6


def test_what_does_not_fit_is_refused(tiny_data: Path, tmp_path: Path) -> None:
    trainer_of("hstu", tiny_data, tmp_path / "first", {"training.max_steps": 1}).train()
    with pytest.raises(UserError, match="whose ids mean other users and items"):
        trainer_of("rows", tiny_data, tmp_path / "other", {}, start_from=tmp_path / "first")
    wider = {"task.encoder.dim": 16, "task.encoder.head_dim": 8}
    with pytest.raises(UserError, match="table items"):
        trainer_of("hstu", tiny_data, tmp_path / "wider", wider, start_from=tmp_path / "first")
    with pytest.raises(UserError, match="samples of this task have no time"):
        trainer_of("rows", tiny_data, tmp_path / "rows", IN_TIME)
    with pytest.raises(UserError, match="there are no windows"):
        trainer_of("hstu", tiny_data, tmp_path / "shuffled", {"windows.hours": 5}).train()


def test_a_beginning_behind_all_events_is_told_with_its_moment(tiny_data: Path, tmp_path: Path) -> None:
    """One event of a wrong clock in what the first run has seen is enough for that: nothing new comes after it."""
    data = tmp_path / "data"
    shutil.copytree(tiny_data / "sequences", data / "sequences")
    columns = {"log.time": "time_ms", "log.time_unit": "ms", "log.actions": "click=click,like=like,long_view=long_view"}
    far = {"wrong": START_MS + 700 * SPAN_MS, "right": START_MS + 9 * SPAN_MS}
    for name, start in far.items():
        if name == "right":
            first = {"training.max_steps": 1, "training.evaluate_every_epochs": 0}
            trainer_of("hstu", data, tmp_path / "first", first).train()
        lines = ["user,item,time_ms,click,like,long_view", *(f"1,{i},{start + i},1,0,0" for i in range(1, 5))]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
        overrides = {**columns, "log.max_ahead_s": "none"}
        append(tmp_path / f"{name}.csv", data / "sequences", format="log", overrides=overrides)
    with pytest.raises(
        UserError, match=r"(?s)windows.start.*no event to train on is from then or later.*first has seen"
    ):
        trainer_of("hstu", data, tmp_path / "second", IN_TIME, start_from=tmp_path / "first")
    named = {**IN_TIME, "windows.start": "2020-01-01", "windows.hours": 10_000}
    assert trainer_of("hstu", data, tmp_path / "second", named, start_from=tmp_path / "first").windows
