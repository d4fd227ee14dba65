"""`nestrec train auto`: what is chosen for datasets of several shapes, and why."""

from pathlib import Path

import numpy as np
import pytest

from nestrec.base.errors import UserError
from nestrec.data.prepare.preparation import prepare
from nestrec.data.synthetic import logs as synthetic
from nestrec.library.configured import configured
from nestrec.library.runs import train


def write_log(
    folder: Path, name: str, *, clicks: float, repeats: bool = False, times: bool = True, num_users: int = 20
) -> str:
    draw = np.random.default_rng(0)
    lines = ["user,item,at,clicked,device,seconds"]
    for second in range(600):
        clicked = int(draw.random() < clicks)
        item = draw.integers(3) if repeats else second // 20
        lines.append(f"u{second % num_users},i{item},{second},{clicked},{['tv', 'phone'][second % 2]},{clicked * 9}")
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    log = {
        "time": "at" if times else None,
        "actions": {"click": "clicked"},
        "categories": ("device",),
        "values": {"watch": "seconds"},
    }
    prepare("log", folder / f"{name}.csv", folder / name, log=log)
    return str(folder / name)


def test_impressions_are_ranked_by_what_is_known_before(tmp_path: Path) -> None:
    cfg = configured("auto", {"data.folder": write_log(tmp_path, "shown", clicks=0.4)})
    assert (cfg.task.kind, cfg.task.inputs.labels, cfg.task.split.kind) == ("ranking", ("click",), "time")
    assert cfg.task.inputs.event_features == ("device",)
    assert "no action" in cfg.reasons["task.kind"]


@pytest.mark.parametrize(("num_users", "train_on"), [(20, "last"), (3, "all")])
def test_of_long_histories_all_events_are_trained_on(tmp_path: Path, num_users: int, train_on: str) -> None:
    cfg = configured("auto", {"data.folder": write_log(tmp_path, "shown", clicks=0.4, num_users=num_users)})
    assert (cfg.task.inputs.train_on, cfg.task.inputs.max_events) == (train_on, 32 if num_users == 20 else 128)


@pytest.mark.parametrize(("options", "seen"), [({}, "history"), ({"repeats": True}, "none")])
def test_logs_of_actions_ask_for_the_next_item(tmp_path: Path, options: dict[str, bool], seen: str) -> None:
    cfg = configured("auto", {"data.folder": write_log(tmp_path, "done", clicks=1.0, **options)})
    assert (cfg.task.kind, cfg.task.loss, cfg.task.evaluation.filter_seen) == ("retrieval", "full", seen)
    assert cfg.task.encoder.time_bias
    assert set(cfg.reasons) >= {"task.kind", "task.loss", "task.encoder.dim", "task.split.kind", "batch.batch_samples"}


def test_items_that_few_have_had_are_read_by_what_they_are(tmp_path: Path) -> None:
    lines = [f"u{i % 50},i{i // 3},{i},b{i // 30}" for i in range(600)]
    (tmp_path / "log.csv").write_text("user,item,at,brand\n" + "\n".join(lines) + "\n")
    columns = {"categories": ("brand",)}
    prepare("log", tmp_path / "log.csv", tmp_path / "data", log={"time": "at"}, item_columns=columns)
    cfg = configured("auto", {"data.folder": str(tmp_path / "data")})
    assert cfg.task.inputs.item_features == ("brand",)
    assert "100% of items have at most 5 events" in cfg.reasons["task.inputs.item_features"]


def test_what_is_given_wins_and_loses_its_reason(tmp_path: Path) -> None:
    folder = write_log(tmp_path, "shown", clicks=0.4, times=False)
    assert configured("auto", {"data.folder": folder}).task.kind == "retrieval", "ranking needs times"
    cfg = configured("auto", {"data.folder": folder, "task.encoder.dim": 16, "task.encoder.head_dim": 8})
    assert cfg.task.encoder.dim == 16
    assert "task.encoder.dim" not in cfg.reasons
    assert not cfg.task.encoder.time_bias


def test_without_a_dataset_or_with_an_unknown_task_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"wrote: --data.folder data/mine"):
        configured("auto")
    folder = write_log(tmp_path, "shown", clicks=0.4)
    with pytest.raises(UserError, match=r"task.kind = 'rankin'"):
        configured("auto", {"data.folder": folder, "task.kind": "rankin"})
    with pytest.raises(UserError, match="no labelled examples"):
        configured("auto", {"data.folder": folder, "task.kind": "rows"})


def test_an_automatic_run_trains_and_keeps_its_reasons(tmp_path: Path) -> None:
    synthetic.generate(synthetic.preset("tiny", num_users=40, num_items=30), tmp_path / "data")
    given = {
        "data.folder": str(tmp_path / "data"),
        "task.kind": "retrieval",
        "training.max_steps": 2,
        "training.device": "cpu",
        "task.evaluation.baselines": "popularity",
    }
    run = train("auto", given, output=tmp_path / "run")
    assert run.evaluation is not None
    again = configured(tmp_path / "run" / "config.json")
    assert again.reasons["task.loss"].startswith("full: 30 items")
