"""`nestrec train auto`: the options chosen for datasets of several shapes, and their reasons."""

import random
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from nestrec.api import resolve_config, train
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
        "outcome_features": {"watch": "seconds"},
    }
    prepare("log", folder / f"{name}.csv", folder / name, log=log)
    return str(folder / name)


def test_auto_ranks_impressions_with_known_features(tmp_path: Path) -> None:
    cfg = resolve_config("auto", {"data.folder": write_log(tmp_path, "shown", clicks=0.4)})
    assert (cfg.task.kind, cfg.task.inputs.labels, cfg.task.split.kind) == ("ranking", ("click",), "time")
    assert cfg.task.inputs.event_features == ("device",)
    assert "no action" in cfg.reasons["task.kind"]


@pytest.mark.parametrize(("num_users", "train_events"), [(20, "last"), (3, "all")])
def test_auto_trains_on_all_events_of_long_histories(tmp_path: Path, num_users: int, train_events: str) -> None:
    cfg = resolve_config("auto", {"data.folder": write_log(tmp_path, "shown", clicks=0.4, num_users=num_users)})
    assert (cfg.task.inputs.train_events, cfg.task.history.max_events) == (train_events, 32 if num_users == 20 else 128)


@pytest.mark.parametrize(("options", "seen"), [({}, "history"), ({"repeats": True}, "none")])
def test_auto_chooses_retrieval_for_logs_of_actions(tmp_path: Path, options: dict[str, bool], seen: str) -> None:
    cfg = resolve_config("auto", {"data.folder": write_log(tmp_path, "done", clicks=1.0, **options)})
    assert (cfg.task.kind, cfg.task.loss, cfg.task.evaluation.filter_seen) == ("retrieval", "full", seen)
    assert cfg.task.encoder.time_bias
    assert set(cfg.reasons) >= {"task.kind", "task.loss", "task.encoder.dim", "task.split.kind", "batch.batch_size"}


def test_auto_uses_item_features_for_rare_items(tmp_path: Path) -> None:
    lines = [f"u{i % 50},i{i // 3},{i},b{i // 30}" for i in range(600)]
    (tmp_path / "log.csv").write_text("user,item,at,brand\n" + "\n".join(lines) + "\n")
    columns = {"categories": ("brand",)}
    prepare("log", tmp_path / "log.csv", tmp_path / "data", log={"time": "at"}, item_columns=columns)
    cfg = resolve_config("auto", {"data.folder": str(tmp_path / "data")})
    assert cfg.task.inputs.item_features == ("brand",)
    assert "100% of items have at most 5 events" in cfg.reasons["task.inputs.item_features"]


def test_auto_user_options_override_choices_and_reasons(tmp_path: Path) -> None:
    folder = write_log(tmp_path, "shown", clicks=0.4, times=False)
    assert resolve_config("auto", {"data.folder": folder}).task.kind == "retrieval", "ranking requires times"
    cfg = resolve_config("auto", {"data.folder": folder, "task.encoder.dim": 16, "task.encoder.head_dim": 8})
    assert cfg.task.encoder.dim == 16
    assert "task.encoder.dim" not in cfg.reasons
    assert not cfg.task.encoder.time_bias


def test_auto_requires_a_dataset_and_a_known_task(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"wrote: --data.folder data/mine"):
        resolve_config("auto")
    folder = write_log(tmp_path, "shown", clicks=0.4)
    with pytest.raises(UserError, match=r"task.kind=rankin: .*Did you mean 'ranking'"):
        resolve_config("auto", {"data.folder": folder, "task.kind": "rankin"})
    with pytest.raises(UserError, match="not labeled rows"):
        resolve_config("auto", {"data.folder": folder, "task.kind": "rows"})


def test_auto_run_trains_and_stores_its_reasons(tmp_path: Path) -> None:
    synthetic.generate(synthetic.preset("tiny", num_users=40, num_items=30), tmp_path / "data")
    options = {
        "data.folder": str(tmp_path / "data"),
        "task.kind": "retrieval",
        "training.max_steps": 2,
        "training.device": "cpu",
        "task.evaluation.baselines": "popularity",
    }
    run = train("auto", options, output=tmp_path / "run")
    assert run.evaluation is not None
    again = resolve_config(tmp_path / "run" / "config.json")
    assert again.reasons["task.loss"].startswith("full: 30 items")
    changed = resolve_config(tmp_path / "run" / "config.json", {"task.split.kind": "none"})
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
    cfg = resolve_config("auto", {"data.folder": str(tmp_path / "data")})
    assert cfg.task.kind == "retrieval"
    assert "--task.kind ranking scores candidates" in cfg.reasons["task.kind"]


def test_auto_explains_that_retrieval_ignores_actions(tmp_path: Path) -> None:
    kinds = ["view"] * 9 + ["buy"]
    lines = (f"u{second % 20},i{second // 20},{second},0,0,{kinds[second % 7 + 3]}" for second in range(600))
    folder = write_events(tmp_path, lines, time="at", actions={"view": "event:view", "buy": "event:buy"})
    cfg = resolve_config("auto", {"data.folder": str(folder)})
    assert cfg.task.inputs.target_actions == ()
    assert (
        "actions (view, buy) are ignored; --task.inputs.target_actions buy trains"
        in cfg.reasons["task.inputs.target_actions"]
    )
    chosen = resolve_config("auto", {"data.folder": str(folder), "task.inputs.target_actions": "buy"})
    assert chosen.task.inputs.target_actions == ("buy",)
    assert "task.inputs.target_actions" not in chosen.reasons
    assert (
        "task.inputs.target_actions"
        not in resolve_config("auto", {"data.folder": folder, "task.kind": "ranking"}).reasons
    )


def test_auto_choice_is_explained_by_prepare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_task(Path(write_log(tmp_path, "shown", clicks=0.4)))
    show_task(Path(write_log(tmp_path, "done", clicks=1.0)))
    ranking, retrieval = capsys.readouterr().out.splitlines()
    assert "shown chooses ranking: scores candidates that you provide (/v1/rank); 6" in ranking
    assert "done chooses retrieval: finds items in the full catalog (/v1/recommend); events are actions" in retrieval


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
def test_auto_trains_tiny_logs_or_explains_what_is_missing(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    options: dict[str, object] = {**TINY, "data.folder": draw_tiny_log(tmp_path, draw)}
    if kind := draw.choice([None, None, "retrieval", "ranking"]):
        options["task.kind"] = kind
    problem = None
    try:
        run = train("auto", options, output=tmp_path / "run")
    except UserError as error:
        problem = str(error)
    if problem is None:
        assert run.evaluation is not None
    else:
        assert re.search(r"is too small for \w+ \(\d+ users, \d+ events|the log has (none|click \d)", problem)


@pytest.mark.parametrize(("users", "events"), [(3, 40), (20, 3)])
def test_auto_changes_the_split_for_few_users_or_events(tmp_path: Path, users: int, events: int) -> None:
    draw = np.random.default_rng(0)
    lines = [f"u{u},i{draw.integers(9)},{at},0,0,x" for u in range(users) for at in draw.permutation(9999)[:events]]
    folder = write_events(tmp_path, lines, time="at")
    cfg = resolve_config("auto", {"data.folder": str(folder), **TINY})
    assert cfg.task.split.kind == ("time" if events == 3 else "leave_one_out")
    assert ("by leave_one_out 0 training users" in cfg.reasons["task.split.kind"]) == (events == 3)
    assert train(cfg, output=tmp_path / "run").evaluation is not None


@pytest.mark.parametrize("label", ["0", "1"])
def test_auto_trains_few_rows_of_one_label(tmp_path: Path, label: str) -> None:
    lines = criteo_text(4, seed=0).splitlines()
    (tmp_path / "rows.txt").write_text("".join(f"{label}{line[1:]}\n" for line in lines))
    prepare("criteo", tmp_path / "rows.txt", tmp_path / "data")
    assert (
        train("auto", {"data.folder": str(tmp_path / "data"), **TINY}, output=tmp_path / "run").evaluation is not None
    )


def test_auto_rejects_two_rows_with_their_number(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text(criteo_text(2, seed=0))
    prepare("criteo", tmp_path / "rows.txt", tmp_path / "data")
    with pytest.raises(UserError, match=r"is too small \(2 labeled rows\)"):
        resolve_config("auto", {"data.folder": str(tmp_path / "data")})


def test_auto_rejects_run_folder_of_another_task(tmp_path: Path) -> None:
    options = {**TINY, "data.folder": write_log(tmp_path, "shown", clicks=0.4)}
    train("auto", {**options, "task.kind": "retrieval"}, output=tmp_path / "run")
    with pytest.raises(UserError, match="contains a run of the task 'retrieval', which cannot be resumed with another"):
        train("auto", options, output=tmp_path / "run")
