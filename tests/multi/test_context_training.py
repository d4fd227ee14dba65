"""Training in context groups is the same training as without: ranks that hold parts of samples change no result.

Histories of 1 to 11 tokens on groups of 2 and 4 ranks: many are shorter than the group, and parts of them empty.
"""

from pathlib import Path

import numpy as np
import pytest
from training_jobs import largest_difference, train

from nestrec.distributed import Topology
from nestrec.training.state import run_digest
from support.tiny_runs import make_datasets

pytestmark = pytest.mark.timeout(300)

STEPS = {"batch.batch_samples": 13, "training.epochs": 9, "training.max_steps": 7, "training.evaluate_every_epochs": 1}
TIMES = {"task.encoder.time_bias": True}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "hstu": ("hstu", {}),
    "hstu without biases": ("hstu", {"task.encoder.position_bias": False, "task.encoder.time_bias": False}),
    "hstu with time": ("hstu", {**TIMES, "task.encoder.time_encoding": "buckets"}),
    "hstu with functional time": ("hstu", {**TIMES, "task.encoder.time_encoding": "functional"}),
    "hstu with a window": ("hstu", {"task.encoder.attention.window": 3, "task.encoder.attention.prefix": 1}),
    "hstu against the catalogue": ("hstu", {"task.loss": "full"}),
    "sasrec": ("sasrec", {}),
    "fuxi": ("hstu", {"task.encoder": '{"kind": "fuxi", "ffn_dim": 8, "num_time_buckets": 20}'}),
}
GROUPS = ((2, 2), (4, 2), (4, 4))
"""(ranks, of which so many hold a sample together)"""
OFTEN = (("hstu with time", ((2, 2), (4, 4))), ("sasrec", ((4, 2),)))
SCHEDULES = ("serial", "nested", "dual_buffer", "frozen_window", "priority")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "groups"), [*OFTEN, *(pytest.param(name, GROUPS, marks=pytest.mark.slow) for name in MODELS)]
)
def test_context_groups_train_what_one_rank_trains(  # noqa: PLR0917
    pools, data: str, tmp_path: Path, name: str, groups: tuple[tuple[int, int], ...], capsys
) -> None:
    family, model = MODELS[name]
    more = {**STEPS, **model, "training.dtype": "float64"}
    alone = train(Topology.single(), family, data, str(tmp_path / "1"), more)
    for world, context in groups:
        run = str(tmp_path / f"{world}-{context}")
        ranks = pools[world].run(train, family, data, run, {**more, "ranks.context": context})
        difference = largest_difference(ranks, alone)
        with capsys.disabled():
            print(f"\n{name}, {world} ranks in groups of {context} against 1, float64: at most {difference:.1e} apart")
        assert difference < 1e-9
        np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=1e-9)
        assert {rank["state"].consumed for rank in ranks} == {alone["state"].consumed}


def test_float32_agrees_to_rounding_with_data_groups_alone(pools, data: str, tmp_path: Path) -> None:
    """The first moments after one step are the gradients times a constant."""
    one = {**STEPS, "training.max_steps": 1}
    alone = train(Topology.single(), "hstu", data, str(tmp_path / "alone"), one)
    for context in (1, 2, 4):
        ranks = pools[4].run(train, "hstu", data, str(tmp_path / str(context)), {**one, "ranks.context": context})
        gradients = max(largest_difference(ranks, alone, names=part) for part in ("exp_avg", "state_m"))
        assert gradients < 1e-5
        np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=1e-5)


@pytest.mark.parametrize(
    ("context", "schedules"),
    [(2, SCHEDULES[:2]), *(pytest.param(n, SCHEDULES, marks=pytest.mark.slow) for n in (2, 4))],
)
def test_schedules_are_equal_to_the_bit_in_context_groups(
    pools, data: str, tmp_path: Path, context: int, schedules: tuple[str, ...]
) -> None:
    # Dense sums begin inside the backward pass, between steps of the ring.
    more = {**STEPS, "ranks.context": context, "ranks.dense_bucket_mib": 0.0005}
    for schedule in schedules:
        pools[4].run(train, "hstu", data, str(tmp_path / schedule), {**more, "pipeline.schedule": schedule})
    digests = [run_digest(tmp_path / schedule) for schedule in schedules]
    assert all(digest == digests[0] for digest in digests)


def test_a_run_goes_on_in_other_context_groups(pools, data: str, tmp_path: Path) -> None:
    more = {**STEPS, "training.dtype": "float64", "training.evaluate_every_epochs": 0}
    whole = train(Topology.single(), "hstu", data, str(tmp_path / "whole"), {**more, "training.max_steps": 8})
    run = str(tmp_path / "run")
    traded = {"ranks.context": 2, "balance.mode": "exchange", "balance.policy": "greedy"}
    pools[4].run(train, "hstu", data, run, {**more, "training.max_steps": 3, "ranks.context": 4})
    pools[4].run(train, "hstu", data, run, {**more, **traded, "training.max_steps": 5, "ranks.replicas": 2})
    ranks = pools[2].run(train, "hstu", data, run, {**more, "training.max_steps": 8})
    assert largest_difference(ranks, whole) < 1e-9


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"ranks.context": 3}, "ranks.context"),
        ({"task.negatives.sampler": "in_batch"}, "task.negatives.sampler"),
        ({"task.negatives.sharing": 2}, "task.negatives.sharing"),
        ({"task.encoder.attention.keep_last": 4}, "attention.keep_last"),
        ({"batch.order": "chronological", "windows.hours": 96}, "batch.order"),
        ({"balance.policy": "power", "balance.tune_every_steps": 5}, "balance.tune_every_steps"),
        ({"ranks.dense": "fsdp"}, "ranks.dense"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    pools, data: str, tmp_path: Path, more: dict[str, object], named: str
) -> None:
    for found in pools[2].outcomes(train, "hstu", data, str(tmp_path), {**STEPS, "ranks.context": 2, **more}):
        assert found.kind == "UserError"
        assert named in found.text


def test_tasks_that_are_not_divided_are_refused(pools, data: str, tmp_path: Path) -> None:
    for family in ("ranking", "rows"):
        for found in pools[2].outcomes(train, family, data, str(tmp_path), {"ranks.context": 2}):
            assert found.kind == "UserError"
            assert "ranks.context" in found.text
