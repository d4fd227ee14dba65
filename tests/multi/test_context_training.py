"""Training with context parallelism has the same results as training without.

Histories have 1 to 11 tokens and groups have 2 and 4 ranks. Many histories have fewer tokens than ranks, and then some
parts are empty.
"""

from pathlib import Path

import numpy as np
import pytest
from training_jobs import largest_difference, train

from nestrec.distributed import Topology
from nestrec.training.state import run_digest
from support.tiny_runs import make_datasets

pytestmark = pytest.mark.timeout(300)

STEPS = {"batch.batch_size": 13, "training.epochs": 9, "training.max_steps": 7, "training.eval_every_epochs": 1}
TIMES = {"task.encoder.time_bias": True}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "hstu": ("hstu", {}),
    "hstu without biases": ("hstu", {"task.encoder.position_bias": False, "task.encoder.time_bias": False}),
    "hstu with time": ("hstu", {**TIMES, "task.encoder.time_encoding": "buckets"}),
    "hstu with functional time": ("hstu", {**TIMES, "task.encoder.time_encoding": "functional"}),
    "hstu with attention window": (
        "hstu",
        {"task.encoder.attention.window": 3, "task.encoder.attention.num_prefix_tokens": 1},
    ),
    "hstu with full softmax": ("hstu", {"task.loss": "full"}),
    "sasrec": ("sasrec", {}),
    "fuxi": ("hstu", {"task.encoder": '{"kind": "fuxi", "ffn_dim": 8, "num_time_buckets": 20}'}),
}
GROUPS = ((2, 2), (4, 2), (4, 4))
"""Numbers of ranks, and sizes of their context-parallel groups."""
FAST_CASES = (("hstu with time", ((2, 2), (4, 4))), ("sasrec", ((4, 2),)))
SCHEDULES = ("serial", "nested", "dual_buffer", "frozen_window", "priority")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "groups"), [*FAST_CASES, *(pytest.param(name, GROUPS, marks=pytest.mark.slow) for name in MODELS)]
)
def test_context_parallel_training_equals_one_rank(  # noqa: PLR0917
    pools, data: str, tmp_path: Path, name: str, groups: tuple[tuple[int, int], ...], capsys
) -> None:
    family, model = MODELS[name]
    more = {**STEPS, **model, "training.weight_dtype": "float64"}
    alone = train(Topology.single(), family, data, str(tmp_path / "1"), more)
    for world, context in groups:
        run = str(tmp_path / f"{world}-{context}")
        ranks = pools[world].run(train, family, data, run, {**more, "parallel.context_parallel": context})
        difference = largest_difference(ranks, alone)
        with capsys.disabled():
            print(f"\n{name}, {world} ranks in groups of {context} and 1 rank, float64: difference {difference:.1e}")
        assert difference < 1e-9
        np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=1e-9)
        assert {rank["state"].consumed for rank in ranks} == {alone["state"].consumed}


def test_context_parallel_float32_equals_data_parallel(pools, data: str, tmp_path: Path) -> None:
    """Gradients are compared by the first moments after one step, which are the gradients times a constant."""
    one_step = {**STEPS, "training.max_steps": 1}
    alone = train(Topology.single(), "hstu", data, str(tmp_path / "alone"), one_step)
    for context in (1, 2, 4):
        ranks = pools[4].run(
            train, "hstu", data, str(tmp_path / str(context)), {**one_step, "parallel.context_parallel": context}
        )
        gradients = max(largest_difference(ranks, alone, names=part) for part in ("exp_avg", "state_m"))
        assert gradients < 1e-5
        np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=1e-5)


@pytest.mark.parametrize(
    ("context", "schedules"),
    [(2, SCHEDULES[:2]), *(pytest.param(n, SCHEDULES, marks=pytest.mark.slow) for n in (2, 4))],
)
def test_context_parallel_schedules_are_bitwise(
    pools, data: str, tmp_path: Path, context: int, schedules: tuple[str, ...]
) -> None:
    # With small buckets, dense all-reduces start inside the backward pass, between steps of the ring.
    more = {**STEPS, "parallel.context_parallel": context, "parallel.grad_bucket_mib": 0.0005}
    for schedule in schedules:
        pools[4].run(train, "hstu", data, str(tmp_path / schedule), {**more, "pipeline.schedule": schedule})
    digests = [run_digest(tmp_path / schedule) for schedule in schedules]
    assert all(digest == digests[0] for digest in digests)


def test_context_parallel_run_resumes_in_other_groups(pools, data: str, tmp_path: Path) -> None:
    more = {**STEPS, "training.weight_dtype": "float64", "training.eval_every_epochs": 0}
    alone = train(Topology.single(), "hstu", data, str(tmp_path / "alone"), {**more, "training.max_steps": 8})
    run = str(tmp_path / "run")
    exchange = {"parallel.context_parallel": 2, "balance.mode": "exchange", "balance.policy": "greedy"}
    pools[4].run(train, "hstu", data, run, {**more, "training.max_steps": 3, "parallel.context_parallel": 4})
    pools[4].run(train, "hstu", data, run, {**more, **exchange, "training.max_steps": 5, "parallel.num_replicas": 2})
    ranks = pools[2].run(train, "hstu", data, run, {**more, "training.max_steps": 8})
    assert largest_difference(ranks, alone) < 1e-9


@pytest.mark.parametrize(
    ("more", "option"),
    [
        ({"parallel.context_parallel": 3}, "parallel.context_parallel"),
        ({"task.negatives.sampler": "in_batch"}, "task.negatives.sampler"),
        ({"task.negatives.logit_sharing": 2}, "task.negatives.logit_sharing"),
        ({"task.encoder.attention.truncate_to": 4}, "attention.truncate_to"),
        ({"batch.order": "chronological", "windows.hours": 96}, "batch.order"),
        ({"balance.policy": "power", "balance.tune_every_steps": 5}, "balance.tune_every_steps"),
        ({"parallel.dense": "fsdp"}, "parallel.dense"),
    ],
)
def test_context_parallel_rejects_unsupported_options(
    pools, data: str, tmp_path: Path, more: dict[str, object], option: str
) -> None:
    for failure in pools[2].outcomes(
        train, "hstu", data, str(tmp_path), {**STEPS, "parallel.context_parallel": 2, **more}
    ):
        assert failure.kind == "UserError"
        assert option in failure.text


def test_context_parallel_rejects_unsupported_tasks(pools, data: str, tmp_path: Path) -> None:
    for family in ("ranking", "rows"):
        for failure in pools[2].outcomes(train, family, data, str(tmp_path), {"parallel.context_parallel": 2}):
            assert failure.kind == "UserError"
            assert "parallel.context_parallel" in failure.text
