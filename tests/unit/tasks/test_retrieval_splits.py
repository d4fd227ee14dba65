"""Retrieval with a temporal split: all held-out events are evaluated, with all baselines, on slices."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestrec.base.config_overrides import apply_overrides
from nestrec.base.config_values import format_iso_time
from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.data.formats.format_registry import prepare
from nestrec.data.samples.split import SplitConfig, split_dataset
from nestrec.distributed import Topology
from nestrec.tasks.catalog_ranks import BASELINES
from nestrec.training.recipes import recipe
from nestrec.training.training_session import Session

NUM_USERS, NUM_ITEMS = 30, 25
CUTS = (1_600, 1_800)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepares 1000 random events, one per second from 1000 on; the last users and items appear late."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    lines = ["user,item,at,brand"]
    for second in range(1_000, 2_000):
        late = second >= CUTS[0]
        user, item = draw.integers(NUM_USERS - (0 if late else 6)), draw.integers(NUM_ITEMS - (0 if late else 3))
        lines.append(f"u{user},i{item},{second},b{item % 3}")
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    prepare("log", folder / "log.csv", folder / "out", log={"time": "at"}, item_columns={"categories": ("brand",)})
    return folder / "out"


def session_of(data: Path, **overrides: Any) -> Session:
    options = {
        "data.folder": str(data),
        "training.device": "cpu",
        "task.loss": "full",
        "task.encoder.dim": "16",
        "task.split.kind": "time",
        "task.split.valid_from": format_iso_time(CUTS[0] * 1000),
        "task.split.test_from": format_iso_time(CUTS[1] * 1000),
        "task.evaluation.slices": "items,users,history,item_brand",
        "task.evaluation.filter_seen": "none",
        **overrides,
    }
    return Session.open(apply_overrides(recipe("demo"), options), Topology.single())


def test_retrieval_evaluates_and_slices_each_held_out_event(data: Path) -> None:
    session = session_of(data, **{"task.evaluation.max_targets_per_user": "1000"})
    evaluation = session.task.evaluate(session.engine, "test")
    dataset = Dataset.open(data)
    rows = dataset.rows(np.arange(dataset.num_samples))
    (items, offsets), times = rows.lists["item_ids"], rows.lists["timestamps_ms"][0]
    keys = [row["item_key"] for row in dataset.items().to_pylist()]
    expected = []
    trained = items[times < CUTS[0] * 1000]
    for user in range(dataset.num_samples):
        own = range(offsets[user], offsets[user + 1])
        events = [i for i in own if times[i] >= CUTS[1] * 1000 and i > offsets[user]]
        expected += [(user, int(items[i]), i - offsets[user], bool(times[own[0]] >= CUTS[0] * 1000)) for i in events]
    assert evaluation.details["users"].tolist() == [user for user, *_ in expected]
    counts = np.bincount(trained, minlength=NUM_ITEMS + 1)
    slices = {name: part.count for name, part in evaluation.slices.items()}
    assert slices["new items"] == sum(counts[item] == 0 for _, item, *_ in expected)
    assert evaluation.details["item_events"].tolist() == [counts[item] for _, item, *_ in expected]
    assert slices["new users"] == sum(is_new for *_, is_new in expected)
    assert slices["history 20-49"] == sum(20 <= position < 50 for _, _, position, _ in expected)
    assert slices["item_brand=b1"] == sum(int(keys[item - 1][1:]) % 3 == 1 for _, item, *_ in expected)
    assert list(evaluation.metrics) == ["model", *BASELINES]
    assert evaluation.slices["new items"].metrics["popularity"]["hr@10"].mean == 0
    assert set(evaluation.metrics["ease"]) >= {"ndcg@10", "coverage@10", "gini@10", "novelty@10"}
    assert "slices" in evaluation.to_plain()


def test_retrieval_limits_targets_per_user_and_skips_large_ease(data: Path) -> None:
    session = session_of(data, **{"task.evaluation.max_targets_per_user": "2", "task.evaluation.ease_max_items": "5"})
    evaluation = session.task.evaluate(session.engine, "test")
    assert np.bincount(evaluation.details["users"]).max() == 2
    assert "ease" not in evaluation.metrics
    skipped, measured = evaluation.notes
    assert skipped.startswith("baseline 'ease' is skipped: 25 items are more than task.evaluation.ease_m")
    users = evaluation.details["users"]
    unlimited = session_of(data, **{"task.evaluation.max_targets_per_user": "1000"})
    rest = unlimited.task.evaluate(unlimited.engine, "test").details["users"].size - users.size
    expected = f"measured on {users.size} targets of {np.unique(users).size} users; {rest} later targets are omitted"
    assert measured.startswith(expected)


@pytest.mark.parametrize("kind", ["time", "leave_one_out"])
def test_retrieval_target_actions_filter_evaluated_events(tmp_path: Path, kind: str) -> None:
    draw = np.random.default_rng(0)
    events = [(draw.integers(8), draw.integers(9), at, draw.choice(["buy", "view"], p=[0.3, 0.7])) for at in range(400)]
    text = "\n".join(["user,item,at,what", *(",".join(map(str, event)) for event in events)])
    (tmp_path / "log.csv").write_text(text + "\n")
    log = {"time": "at", "actions": {"buy": "what:buy", "view": "what:view"}}
    prepare("log", tmp_path / "log.csv", tmp_path / "out", log=log)
    target_options: dict[str, Any] = {"task.inputs.target_actions": "buy", "task.evaluation.slices": "users"}
    cuts = {"task.split.valid_from": "none", "task.split.test_from": "none"}
    session = session_of(tmp_path / "out", **cuts, **target_options, **{"task.split.kind": kind})
    evaluation = session.task.evaluate(session.engine, "test")
    dataset = session.dataset
    first, end = split_dataset(SplitConfig(kind=kind), dataset).held_out("test")  # type: ignore[arg-type]
    masks, offsets = dataset.rows(np.arange(dataset.num_samples)).lists["actions"]
    expected_users = [
        u for u, start in enumerate(offsets[:-1]) for at in range(first[u], end[u]) if at and masks[start + at] & 1
    ]
    assert evaluation.details["users"].tolist() == expected_users
    assert session.task.num_held_out("test") == len(set(expected_users)) > 0


def test_retrieval_invalid_splits_and_slices_are_rejected(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task.evaluation.slices=item_brnd: .*item_brand"):
        session_of(data, **{"task.evaluation.slices": "item_brnd"})
    with pytest.raises(UserError, match=r"not used with task.split.kind=leave_one_out"):
        SplitConfig(kind="leave_one_out", valid_from="2026-01-01")
    with pytest.raises(UserError, match=r"later than test_from = 1970-01-01T00:31:\S+ \(the last test_fraction = 0.1 "):
        split_dataset(SplitConfig(valid_from="2026-01-01"), Dataset.open(data))
    (tmp_path / "log.csv").write_text("user,item\nu,a\nu,b\n")
    prepare("log", tmp_path / "log.csv", tmp_path / "out")
    with pytest.raises(UserError, match="a temporal split needs event times"):
        split_dataset(SplitConfig(), Dataset.open(tmp_path / "out"))
