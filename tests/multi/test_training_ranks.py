"""Training on 1, 2 and 4 ranks has equal results.

With a batch size of 13 and 40 users (or 120 rows), the last batch of every epoch has one sample (or three). So most of
four ranks have no sample in it, and in the other steps, most ranks have one sample more or fewer than others.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from training_jobs import (
    largest_difference,
    measure,
    save_again,
    terminate_one_rank,
    train,
    train_through_crashes,
    train_with_slow_rank,
)

from nestrec.distributed import Topology
from nestrec.training.state import run_digest
from support.tiny_runs import FAMILIES, make_datasets

UNEVEN = {"batch.batch_size": 13, "training.epochs": 1000, "training.eval_every_epochs": 8}
# The limit of rows applies per shard, so that other numbers of ranks would evict other rows.
UNBOUNDED = {"task.table_store.eviction_policy": "none", "task.table_store.max_rows": "none"}
BACKGROUND = {"training.checkpoint_async": True, "training.incremental_checkpoints": 2, "training.max_checkpoints": 1}

pytestmark = pytest.mark.timeout(300)  # starting Python and torch a dozen times takes long on a busy machine


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return str(folder)


def options(family: str, **more: object) -> dict[str, object]:
    training = {f"training.{name}": value for name, value in more.items()}
    return {**UNEVEN, **(UNBOUNDED if family == "rows" else {}), **training}


@pytest.mark.parametrize(
    ("family", "num_steps"),
    [("hstu", 13), ("ranking", 13), *(pytest.param(f, 100, marks=pytest.mark.slow) for f in FAMILIES)],
)
def test_training_float64_equal_on_1_2_and_4_ranks(  # noqa: PLR0917
    pools, data: str, tmp_path: Path, family: str, num_steps: int, capsys
) -> None:
    more = options(family, weight_dtype="float64", max_steps=num_steps)
    alone = train(Topology.single(), family, data, str(tmp_path / "1"), more)
    assert alone["state"].position.epoch >= 2
    for world in (2, 4):
        ranks = pools[world].run(train, family, data, str(tmp_path / str(world)), more)
        difference = largest_difference(ranks, alone)
        with capsys.disabled():
            print(
                f"\n{family}, {world} ranks and 1 rank, float64, {num_steps} steps: largest difference {difference:.1e}"
            )
        assert difference < 1e-9
        assert {rank["state"].consumed for rank in ranks} == {alone["state"].consumed}
        np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=1e-9)
        if family == "ranking" and world == 4:
            assert min(rank["slots"]["item_topic"] for rank in ranks) == 0


@pytest.mark.parametrize("family", ["ranking", pytest.param("hstu", marks=pytest.mark.slow)])
def test_time_windows_on_2_ranks_warm_start_from_4(pools, data: str, tmp_path: Path, family: str) -> None:
    first = {"training.max_steps": 4, "training.eval_every_epochs": 0, "training.weight_dtype": "float64"}
    pools[4].run(train, family, data, str(tmp_path / "first"), first)
    windows = {"batch.order": "chronological", "windows.hours": 96, "windows.replay_fraction": 0.3}
    more = {**first, **windows, "training.max_steps": 8, "batch.batch_size": 13}
    first_run = tmp_path / "first"
    alone = train(Topology.single(), family, data, str(tmp_path / "1"), more, start_from=first_run)
    ranks = pools[2].run(train, family, data, str(tmp_path / "2"), more, first_run)
    assert largest_difference(ranks, alone) < 1e-9
    assert {rank["state"].consumed for rank in ranks} == {alone["state"].consumed}
    records = [
        [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
            if '"window"' in line
        ]
        for name in ("1", "2")
    ]
    assert len(records[0]) == len(records[1]) == alone["state"].windows_predicted > 2
    for record, expected in zip(*records, strict=True):
        for name, values in record["metrics"].items():
            pair = [np.array(side, np.float64) for side in (values, expected["metrics"][name])]  # null becomes NaN
            np.testing.assert_allclose(*pair, rtol=1e-9)


@pytest.mark.parametrize(
    ("family", "num_steps"),
    [("hstu", 12), *(pytest.param(f, 50, marks=pytest.mark.slow) for f in FAMILIES)],
)
def test_training_float32_close_on_1_2_and_4_ranks(  # noqa: PLR0917
    pools, data: str, tmp_path: Path, family: str, num_steps: int, capsys
) -> None:
    """Gradients are compared by the first moments after one step, which are the gradients times a constant."""
    one_step = options(family, max_steps=1)
    many_steps = options(family, max_steps=num_steps)
    if family == "rows":
        one_step["task.table_optimizer.kind"] = "adam"
        one_step["task.table_store.admission_threshold"] = 1
    first = train(Topology.single(), family, data, str(tmp_path / "first-1"), one_step)
    alone = train(Topology.single(), family, data, str(tmp_path / "1"), many_steps)
    for world in (2, 4):
        ranks = pools[world].run(train, family, data, str(tmp_path / f"first-{world}"), one_step)
        gradients = max(largest_difference(ranks, first, names=part) for part in ("exp_avg", "state_m"))
        ranks = pools[world].run(train, family, data, str(tmp_path / str(world)), many_steps)
        losses = float(np.max(np.abs(np.array(ranks[0]["losses"]) / alone["losses"] - 1)))
        with capsys.disabled():
            print(f"\n{family}, {world} ranks and 1 rank, float32: gradients {gradients:.1e}, losses {losses:.1e}")
        assert gradients < 1e-5
        assert losses < 1e-4


@pytest.mark.parametrize(
    ("family", "world"), [("hstu", 2), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ("hstu", "rows"))]
)
def test_training_repeated_run_is_bitwise(pools, data: str, tmp_path: Path, family: str, world: int) -> None:
    more = {**UNEVEN, "training.max_steps": 12}
    for name in ("a", "b"):
        pools[world].run(train, family, data, str(tmp_path / name), more)
    assert run_digest(tmp_path / "a") == run_digest(tmp_path / "b")


@pytest.mark.parametrize(
    ("family", "world"), [("rows", 2), *(pytest.param("hstu", world, marks=pytest.mark.slow) for world in (2, 4))]
)
def test_ranks_resume_exactly_from_incremental_checkpoints(
    pools, data: str, tmp_path: Path, family: str, world: int
) -> None:
    more = {**UNEVEN, "training.max_steps": 24, "training.checkpoint_every_steps": 3}
    uninterrupted = pools[world].run(train, family, data, str(tmp_path / "uninterrupted"), more)
    resumed = pools[world].run(
        train_through_crashes, family, data, str(tmp_path / "cut"), {**more, **BACKGROUND}, [2, 11, 5]
    )
    assert [rank["digests"] for rank in uninterrupted] == resumed
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "uninterrupted")


@pytest.mark.parametrize(
    "family", ["sasrec", "ranking", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hstu", "rows"))]
)
def test_full_catalog_metrics_equal_one_rank(pools, data: str, tmp_path: Path, family: str) -> None:
    more = options(family, max_steps=12)
    if family in ("hstu", "sasrec"):
        more |= {"task.evaluation.batch_size": 9, "task.evaluation.num_sampled_negatives": 20}
    else:
        more |= {"task.evaluation.batch_size": 4}
    train(Topology.single(), family, data, str(tmp_path), more)
    alone = measure(Topology.single(), family, data, str(tmp_path), more)
    for world in (2, 4):
        for details in pools[world].run(measure, family, data, str(tmp_path), more):
            for part, values in alone.items():
                assert set(values) == set(details[part])
                assert all(np.array_equal(details[part][name], values[name]) for name in values)


@pytest.mark.parametrize("family", [pytest.param("ranking", marks=pytest.mark.slow), "rows"])
def test_checkpoint_of_4_ranks_loads_on_2_1_3_and_4(pools, data: str, tmp_path: Path, family: str) -> None:
    """The digest of the tables, including keys that wait for admission, does not depend on the number of ranks."""
    more = {**UNEVEN, "training.max_steps": 10}
    start = pools[4].run(train, family, data, str(tmp_path / "4"), more)[0]["digests"]
    expected = run_digest(tmp_path / "4")
    for before, now in (("4", "2"), ("2", "1"), ("1", "3"), ("3", "4-again")):
        arguments = (family, data, str(tmp_path / before), str(tmp_path / now), more)
        world = int(now[0])
        ranks = [save_again(Topology.single(), *arguments)] if world == 1 else pools[world].run(save_again, *arguments)
        assert all(digests == start for digests in ranks)
        assert run_digest(tmp_path / now) == expected


def test_training_resumes_on_other_number_of_ranks(pools, data: str, tmp_path: Path) -> None:
    more = options("hstu", weight_dtype="float64", checkpoint_every_steps=4)
    alone = train(Topology.single(), "hstu", data, str(tmp_path / "alone"), {**more, "training.max_steps": 24})
    run = str(tmp_path / "run")
    steps = "training.max_steps"
    pools[4].run(train, "hstu", data, run, {**more, **BACKGROUND, steps: 9})
    train(Topology.single(), "hstu", data, run, {**more, **BACKGROUND, steps: 14})
    ranks = pools[2].run(train, "hstu", data, run, {**more, **BACKGROUND, steps: 24})
    assert largest_difference(ranks, alone) < 1e-9
    assert ranks[0]["state"].consumed == alone["state"].consumed


@pytest.mark.parametrize("eviction", ["lru", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("none", "ttl"))])
def test_max_rows_holds_after_resume_on_more_ranks(pools, data: str, tmp_path: Path, eviction: str) -> None:
    """Hashing assigns more than a quarter of the rows to some of four shards, and these must not grow further."""
    store = {
        "eviction_policy": eviction,
        "max_rows": 48,
        "admission_threshold": 1,
        "ttl_steps": 3 if eviction == "ttl" else "none",
    }
    more = {"batch.batch_size": 40, "training.epochs": 9, **{f"task.table_store.{n}": v for n, v in store.items()}}
    run = str(tmp_path / "run")
    steps = "training.max_steps"
    alone = train(Topology.single(), "rows", data, run, {**more, steps: 4})
    num_rows = [
        len(rank["rows"]["categories"][0]["keys"])
        for rank in (
            alone,
            *pools[4].run(train, "rows", data, run, {**more, steps: 10, "training.checkpoint_every_steps": 7}),
        )
    ]
    assert num_rows[0] == 48
    assert 44 <= sum(num_rows[1:]) <= 48, num_rows
    pools[4].run(train, "rows", data, run, {**more, steps: 14})
    shutil.copytree(run, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000014")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000010")
    pools[4].run(train, "rows", data, str(tmp_path / "cut"), {**more, steps: 14})
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "run")


@pytest.mark.parametrize("schedule", ["semi_async", pytest.param("serial", marks=pytest.mark.slow)])
def test_sigterm_on_one_rank_stops_all_at_one_step(pools, data: str, tmp_path: Path, schedule: str) -> None:
    more = {**UNEVEN, "training.max_steps": 12, "pipeline.schedule": schedule}
    pools[2].run(train, "sasrec", data, str(tmp_path / "uninterrupted"), more)
    stopped_at = pools[2].run(terminate_one_rank, "sasrec", data, str(tmp_path / "cut"), more)
    assert stopped_at in ([6, 6], [7, 7])
    pools[2].run(train, "sasrec", data, str(tmp_path / "cut"), more)
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "uninterrupted")


def test_sigterm_between_averages_stops_at_next_average(pools, data: str, tmp_path: Path) -> None:
    """A stop is a fence, which would average the weights at a step at which the uninterrupted run does not."""
    more = {
        "training.max_steps": 12,
        "training.epochs": 9,
        "training.eval_every_epochs": 0,
        "parallel.num_replicas": 2,
        "replica_sync.mode": "weights",
        "replica_sync.every_steps": 5,
    }
    pools[2].run(train, "hstu", data, str(tmp_path / "uninterrupted"), more)
    assert pools[2].run(terminate_one_rank, "hstu", data, str(tmp_path / "cut"), more) == [10, 10]
    pools[2].run(train, "hstu", data, str(tmp_path / "cut"), more)
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "uninterrupted")


def test_slow_rank_is_reported_once(pools, data: str, tmp_path: Path) -> None:
    more = {"training.max_steps": 20, "training.epochs": 1000, "training.eval_every_epochs": 0}
    pools[2].run(train_with_slow_rank, "hstu", data, str(tmp_path / "run"), more)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert [step["slow_rank"] for step in steps] == [1] * 4
    (event,) = [record["text"] for record in records if record["kind"] == "event" and "rank" in record["text"]]
    assert event.startswith("rank 1 is slow: it takes "), "it is reported once, although it remains slow"
