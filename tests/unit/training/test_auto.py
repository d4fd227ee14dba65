"""`nestrec train auto`: what is chosen for datasets of several shapes, and why."""

import random
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from nestrec.api import configured, train
from nestrec.base.errors import UserError
from nestrec.cli.data_output import show_task
from nestrec.data.formats.format_registry import prepare
from nestrec.data.synthetic import synthetic_logs as synthetic
from support.tiny_runs import criteo_text


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
    changed = configured(tmp_path / "run" / "config.json", {"task.split.kind": "none"})
    assert "task.split.kind" not in changed.reasons


def write_events(folder: Path, lines: Iterable[str], **log: object) -> Path:
    (folder / "log.csv").write_text("\n".join(["user,item,at,clicked,liked,event", *lines]) + "\n")
    prepare("log", folder / "log.csv", folder / "data", log=log)
    return folder / "data"


SHOP_ACTIONS = ("view", "click", "like", "buy")


@pytest.mark.parametrize("form", ["event types", "flags", "one event type"])
def test_auto_prefers_retrieval_for_a_shop_log(tmp_path: Path, form: str) -> None:
    """Half of the events have none of the actions, but they are not impressions."""
    draw = np.random.default_rng(0)
    names = SHOP_ACTIONS if form != "one event type" else ("buy",)
    lines = ["user,item,at,event,view,click,like,buy"]
    for second in range(600):
        flags = draw.random(4) < 0.16 if form == "flags" else [0, 0, 0, 0]
        event = str(draw.choice([*names, *["search"] * len(names)]))
        lines.append(f"u{second % 20},i{second // 20},{second},{event},{','.join(str(int(f)) for f in flags)}")
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    columns = {name: name if form == "flags" else f"event:{name}" for name in names}
    prepare("log", tmp_path / "log.csv", tmp_path / "data", log={"time": "at", "actions": columns})
    cfg = configured("auto", {"data.folder": str(tmp_path / "data")})
    assert cfg.task.kind == "retrieval"
    assert "--task.kind ranking scores candidates" in cfg.reasons["task.kind"]


def test_auto_says_that_retrieval_ignores_actions(tmp_path: Path) -> None:
    kinds = ["view"] * 9 + ["buy"]
    lines = (f"u{second % 20},i{second // 20},{second},0,0,{kinds[second % 7 + 3]}" for second in range(600))
    folder = write_events(tmp_path, lines, time="at", actions={"view": "event:view", "buy": "event:buy"})
    cfg = configured("auto", {"data.folder": str(folder)})
    assert cfg.task.inputs.actions == ()
    assert "actions (view, buy) are ignored; --task.inputs.actions buy trains" in cfg.reasons["task.inputs.actions"]
    chosen = configured("auto", {"data.folder": str(folder), "task.inputs.actions": "buy"})
    assert chosen.task.inputs.actions == ("buy",)
    assert "task.inputs.actions" not in chosen.reasons
    assert "task.inputs.actions" not in configured("auto", {"data.folder": folder, "task.kind": "ranking"}).reasons


def test_prepare_explains_which_task_auto_chooses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_task(Path(write_log(tmp_path, "shown", clicks=0.4)))
    show_task(Path(write_log(tmp_path, "done", clicks=1.0)))
    ranking, retrieval = capsys.readouterr().out.splitlines()
    assert "shown chooses ranking: scores candidates that you provide (/v1/rank); 6" in ranking
    assert "done chooses retrieval: finds items of the whole catalog (/v1/recommend); events are actions" in retrieval


TINY = {"training.max_steps": 1, "training.epochs": 1, "training.device": "cpu"}


def draw_tiny_log(folder: Path, draw: random.Random) -> str:
    times = draw.choice(["apart", "apart", "same", "none"])
    actions = draw.choice(["none", "never", "always", "mixed", "mixed"])
    lines = []
    for user in range(draw.choice([1, 2, 3, 4, 6])):
        for _ in range(draw.choice([1, 2, 3, 3, 4, 6])):
            at = draw.randrange(10**6) if times == "apart" else 5
            clicked = {"mixed": draw.random() < 0.5, "always": True}.get(actions, False)
            lines.append(f"u{user},i{draw.randrange(draw.choice([1, 2, 6]))},{at},{clicked:d},0,x")
    log = {"time": None if times == "none" else "at", "actions": {} if actions == "none" else {"click": "clicked"}}
    return str(write_events(folder, lines, **log))


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 80))])
def test_auto_trains_tiny_logs_or_says_what_they_lack(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    given: dict[str, object] = {**TINY, "data.folder": draw_tiny_log(tmp_path, draw)}
    if kind := draw.choice([None, None, "retrieval", "ranking"]):
        given["task.kind"] = kind
    problem = None
    try:
        run = train("auto", given, output=tmp_path / "run")
    except UserError as error:
        problem = str(error)
    if problem is None:
        assert run.evaluation is not None
    else:
        assert re.search(r"is too small for \w+ \(\d+ users, \d+ events|the log has (none|click \d)", problem)


@pytest.mark.parametrize(("users", "events"), [(3, 40), (20, 3)])
def test_auto_takes_another_split_for_few_users_or_events(tmp_path: Path, users: int, events: int) -> None:
    draw = np.random.default_rng(0)
    lines = [f"u{u},i{draw.integers(9)},{at},0,0,x" for u in range(users) for at in draw.permutation(9999)[:events]]
    folder = write_events(tmp_path, lines, time="at")
    cfg = configured("auto", {"data.folder": str(folder), **TINY})
    assert cfg.task.split.kind == ("time" if events == 3 else "leave_one_out")
    assert ("by leave_one_out 0 users train" in cfg.reasons["task.split.kind"]) == (events == 3)
    assert train(cfg, output=tmp_path / "run").evaluation is not None


@pytest.mark.parametrize("label", ["0", "1"])
def test_auto_trains_few_rows_of_one_label(tmp_path: Path, label: str) -> None:
    lines = criteo_text(4, seed=0).splitlines()
    (tmp_path / "rows.txt").write_text("".join(f"{label}{line[1:]}\n" for line in lines))
    prepare("criteo", tmp_path / "rows.txt", tmp_path / "data")
    assert (
        train("auto", {"data.folder": str(tmp_path / "data"), **TINY}, output=tmp_path / "run").evaluation is not None
    )


def test_auto_refuses_two_rows_with_their_number(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text(criteo_text(2, seed=0))
    prepare("criteo", tmp_path / "rows.txt", tmp_path / "data")
    with pytest.raises(UserError, match=r"is too small \(2 rows with labels\)"):
        configured("auto", {"data.folder": str(tmp_path / "data")})


def test_run_folder_of_another_task_is_refused(tmp_path: Path) -> None:
    given = {**TINY, "data.folder": write_log(tmp_path, "shown", clicks=0.4)}
    train("auto", {**given, "task.kind": "retrieval"}, output=tmp_path / "run")
    with pytest.raises(UserError, match="holds a run of the task 'retrieval', which cannot be resumed with another"):
        train("auto", given, output=tmp_path / "run")
