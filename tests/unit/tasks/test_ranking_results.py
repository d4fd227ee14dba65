"""Ranking compared with its baselines: boosted trees, slices, GAUC and calibration, for both kinds of split."""

from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from nestrec.data.dataset import Dataset
from nestrec.data.formats.format_registry import prepare
from nestrec.data.incremental.append import append
from nestrec.data.samples.split import SplitConfig, split_dataset
from nestrec.distributed import Topology
from nestrec.tasks import ranking_evaluator
from nestrec.tasks.learned_baselines import (
    NUM_FOLDS,
    SMOOTHING,
    BoostedTrees,
    EventTable,
    _limit_threads,
    _Sums,
    fold_of,
)
from nestrec.tasks.metrics import MAX_VALUES, MIN_MEMBERS, Targets, slice_masks, sliced_features
from nestrec.tasks.ranking_evaluator import RankingEvaluator
from nestrec.tasks.task import Evaluation
from support.featured_log import write_featured_log

NUM_EVENTS = 1_500


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Clicks depend on an interaction of a number and a device, which no sum of rates can represent."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    lines = ["user,item,at,clicked,device,place,topic"]
    for second in range(NUM_EVENTS):
        value = draw.random()
        device = draw.choice(["phone", "tv"])
        item = draw.integers(20)
        chance = 0.9 if (0.3 < value < 0.7) == (device == "phone") else 0.1
        row = (draw.integers(40), item, second, int(draw.random() < chance), device, f"{value:.4f}", f"t{item % 3}")
        lines.append(",".join(map(str, row)))
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    log = {
        "time": "at",
        "actions": {"click": "clicked"},
        "categories": ("device",),
        "numbers": ("place",),
        "transforms": {"place": "standard"},
    }
    prepare("log", folder / "log.csv", folder / "out", log=log, item_columns={"categories": ("topic",)})
    return Dataset.open(folder / "out")


def evaluate_constant_model(dataset: Dataset, split: SplitConfig, **options: object) -> Evaluation:
    """Evaluates a model with constant scores on the test split."""
    user_split = split_dataset(split, dataset)
    first, end = user_split.held_out("test")
    rows = dataset.rows(np.arange(dataset.num_samples))
    actions, offsets = rows.lists["actions"]
    held_out = np.concatenate([np.arange(a, b) for a, b in zip(offsets[:-1] + first, offsets[:-1] + end, strict=True)])
    label = (actions[held_out, None] & 1).astype(np.int64)
    user = np.repeat(np.arange(len(first)), end - first)
    arguments = {
        "baselines": ranking_evaluator.BASELINES,
        "category": "device",
        "slices": ("items", "event_device"),
        **options,
    }
    results = RankingEvaluator(dataset, user_split, ("click",), **arguments)  # type: ignore[arg-type]
    return results.evaluate("test", np.zeros(label.shape), label, user, Topology.single())


def test_slices_by_history_length_include_first_events(dataset: Dataset) -> None:
    positions = np.repeat([0, 1, 4, 5, 50, 120], 10)
    none = np.zeros(60, np.int64)
    masks = slice_masks(("history",), dataset, Targets(none, none, positions, none, none))
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {
        "history 0": 10,
        "history 1-4": 20,
        "history 5-9": 10,
        "history 50-99": 10,
        "history 100+": 10,
    }


def test_slices_cover_events_of_appended_users(tmp_path: Path) -> None:
    """New users of appended events are in a layer, not in a row group of the prepared dataset."""
    for name, users, start in (("log.csv", range(20), 0), ("more.csv", range(15, 30), 100)):
        events = [f"{user},{user % 7},{start + second},{second % 2}" for user in users for second in range(20)]
        (tmp_path / name).write_text("\n".join(["user,item,at,clicked", *events]) + "\n")
    prepare("log", tmp_path / "log.csv", tmp_path / "data", log={"time": "at", "actions": {"click": "clicked"}})
    append(tmp_path / "more.csv", tmp_path / "data")
    split = SplitConfig(kind="time", test_fraction=0.4)
    evaluation = evaluate_constant_model(
        Dataset.open(tmp_path / "data"), split, category="", baselines=(), slices=("items", "users")
    )
    assert evaluation.slices["new users"].count > 0
    assert evaluation.slices["new users"].count + evaluation.slices["known users"].count == len(
        evaluation.details["users"]
    )


def test_boosted_trees_beat_logistic_and_slices_add_up(dataset: Dataset) -> None:
    evaluation = evaluate_constant_model(dataset, SplitConfig(test_fraction=0.2, valid_fraction=0.1))
    metrics = evaluation.metrics
    assert metrics["boosted trees"]["auc/click"].low > 0.8
    assert metrics["logistic"]["auc/click"].high < 0.7
    assert metrics["boosted trees"]["gauc/click"].mean > 0.75
    assert metrics["boosted trees"]["calibration/click"].mean == pytest.approx(1, abs=0.25)
    assert metrics["model"]["auc/click"].mean == metrics["model"]["gauc/click"].mean == 0.5
    devices = {name: s.count for name, s in evaluation.slices.items() if name.startswith("event_device")}
    assert set(devices) == {"event_device=phone", "event_device=tv"}
    assert sum(devices.values()) == len(evaluation.details["label"]) == 300
    assert evaluation.notes == ("measured on 300 events of 40 users",)


def test_ranking_evaluates_leave_one_out_splits(dataset: Dataset) -> None:
    evaluation = evaluate_constant_model(dataset, SplitConfig(kind="leave_one_out"), baselines=("logistic",))
    assert set(evaluation.details) == {"logit", "label", "users"}
    assert evaluation.details["users"].tolist() == list(range(dataset.num_samples))
    assert evaluation.details["label"].shape == evaluation.details["logit"].shape == (dataset.num_samples, 1)
    assert list(evaluation.metrics) == ["model", "logistic"]


def test_ranking_split_with_one_label_explains_missing_metrics(dataset: Dataset) -> None:
    split = split_dataset(SplitConfig(kind="leave_one_out"), dataset)
    results = RankingEvaluator(dataset, split, ("click",), baselines=(), category="", slices=())
    count = dataset.num_samples
    arguments = np.zeros((count, 1)), np.ones((count, 1), np.int64), np.arange(count), Topology.single()
    evaluation = results.evaluate("test", *arguments)
    assert np.isnan(evaluation.score)
    assert evaluation.notes[0].startswith("all 40 events have the same value of 'click'")


def test_boosted_trees_without_package_are_skipped_with_note(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking_evaluator, "is_available", lambda: False)
    evaluation = evaluate_constant_model(dataset, SplitConfig())
    assert list(evaluation.metrics) == ["model", "logistic"]
    assert "pip install '.[trees]'" in evaluation.notes[0]
    monkeypatch.setattr(ranking_evaluator, "MAX_EVENTS", 10)
    assert list(evaluate_constant_model(dataset, SplitConfig()).metrics) == ["model"]


def test_id_rates_of_training_events_come_from_other_folds() -> None:
    ids, label, fold = np.array([1, 1, 2, 1, 2, 0]), np.array([1, 0, 1, 1, 0, 1]), np.array([0, 1, 0, 0, 3, 2])
    sums = _Sums.of(ids, label, fold)
    positive, total = sums.of_others(ids, fold)
    for i in range(len(ids)):
        others = [j for j in range(len(ids)) if ids[j] == ids[i] and fold[j] != fold[i]]
        assert (positive[i], total[i]) == (sum(label[j] for j in others), len(others))
    assert [x.tolist() for x in sums.of_others(np.array([1, 9]), None)] == [[2, 0], [3, 0]]
    assert set(fold_of(100).tolist()) == set(range(NUM_FOLDS))


@pytest.mark.parametrize(("limit", "cores", "expected"), [(1, 16, 1), (6, 16, 6), (12, 16, 8), (12, 1, 1)])
def test_boosted_trees_limit_their_threads(
    monkeypatch: pytest.MonkeyPatch, limit: int, cores: int, expected: int
) -> None:
    import sklearn.ensemble  # noqa: F401  # loads its OpenMP library

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    with threadpool_limits(limit, user_api="openmp"), _limit_threads():
        num_threads = {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "openmp"}
    assert num_threads == {expected}


def test_slices_by_category_equal_reference_implementation(tmp_path: Path) -> None:
    dataset = Dataset.open(write_featured_log(tmp_path))
    rows = dataset.rows(np.arange(dataset.num_samples))
    items, offsets = rows.lists["item_ids"]
    user = np.repeat(np.arange(dataset.num_samples), np.diff(offsets))
    before = np.arange(len(items)) - offsets[user]
    targets = Targets(items.astype(np.int64), user, before, np.zeros_like(user), np.zeros_like(user))
    owned = {"item": items - 1, "user": user, "event": np.arange(len(items))}
    for feature in sliced_features(dataset):
        keys = dataset.vocabulary(feature.column).column("key").to_pylist()
        if feature.is_list:
            values, bounds = dataset.item_lists(feature)
            target_ids = [values[bounds[i] : bounds[i + 1]].tolist() for i in items]
        else:
            column = {
                "item": lambda name: dataset.items().column(name).to_numpy(),
                "user": lambda name: rows.scalars[name],
                "event": lambda name: rows.lists[name][0],
            }[feature.owner](feature.column)
            target_ids = [[int(column[i])] for i in owned[feature.owner]]
        masks = slice_masks((feature.column,), dataset, targets)
        expected = {f"{feature.column}={key}": [i + 1 in ids for ids in target_ids] for i, key in enumerate(keys)} | {
            f"{feature.column}: unknown": [ids == [0] for ids in target_ids]
        }
        expected = {name: mask for name, mask in expected.items() if sum(mask) >= MIN_MEMBERS}
        assert len(keys) <= MAX_VALUES, "every value has a slice"
        assert {name: mask.tolist() for name, mask in masks.items()} == expected
    names = {feature.column for feature in sliced_features(dataset)}
    assert names == {"event_device", "user_country", "item_brand", "item_tags"}


def test_slices_separate_new_rare_and_known(dataset: Dataset) -> None:
    events = np.repeat([0, 1, 5, 6], [10, 11, 12, 13])
    none = np.zeros(46, np.int64)
    masks = slice_masks(("items", "users"), dataset, Targets(none, none, none, events, events[::-1]))
    assert {name: mask.tolist() for name, mask in masks.items()} == {
        "new items": (events == 0).tolist(),
        "rare items": (np.isin(events, [1, 5])).tolist(),
        "other items": (events == 6).tolist(),
        "new users": (events[::-1] == 0).tolist(),
        "known users": (events[::-1] > 0).tolist(),
    }


def test_ranking_targets_count_training_events(dataset: Dataset) -> None:
    split = split_dataset(SplitConfig(test_fraction=0.2, valid_fraction=0.1), dataset)
    results = RankingEvaluator(dataset, split, ("click",), baselines=(), category="", slices=())
    targets = results._targets("test")
    items, offsets = dataset.rows(np.arange(dataset.num_samples)).lists["item_ids"]
    trained = [int(items[offsets[u] + i]) for u in range(dataset.num_samples) for i in range(split.train_end[u])]
    first, end = split.held_out("test")
    held_out = [(u, i, int(items[offsets[u] + i])) for u in range(dataset.num_samples) for i in range(first[u], end[u])]
    assert targets.user.tolist() == [u for u, _, _ in held_out]
    assert targets.position.tolist() == [i for _, i, _ in held_out]
    assert targets.item.tolist() == [item for _, _, item in held_out]
    assert targets.item_events.tolist() == [trained.count(item) for _, _, item in held_out]
    assert targets.user_events.tolist() == [split.train_end[u] for u, _, _ in held_out]


@pytest.mark.skipif(not ranking_evaluator.is_available(), reason="needs scikit-learn")
def test_boosted_trees_read_smoothed_rates_and_counts() -> None:
    ids = {"item": np.array([1, 1, 2, 3]), "user": np.array([0, 1, 1, 0]), "device": np.array([0, 1, 0, 1])}
    label = np.array([1, 1, 0, 0])
    hours = 3_600_000 * np.array([5, 23, 24, 50])
    events = EventTable(ids, {"place": np.array([0.5, 1.5, 2.5, np.nan])}, hours)
    trees = BoostedTrees(events, label)
    queries = EventTable(
        {"item": np.array([1, 9]), "user": np.array([1, 0]), "device": np.array([1, 0])},
        {"place": np.array([7.0, 8.0])},
        hours[:2],
    )

    def rate(positive: int, total: int) -> float:
        return (positive + SMOOTHING * 0.5) / (total + SMOOTHING)

    # Columns: rate and number of events of item, user and device; then the numbers, and the hour of the day.
    assert trees._columns(queries, None).tolist() == [
        [rate(2, 2), 2, rate(1, 2), 2, rate(1, 2), 1, 7.0, 5],
        [rate(0, 0), 0, rate(1, 2), 2, rate(1, 2), 0, 8.0, 23],
    ]
    assert trees._model.l2_regularization == 1.0
