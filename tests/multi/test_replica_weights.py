"""Weights averaged over replica groups: equal to the bit to a simulation in one process that averages every row."""

from dataclasses import replace

import numpy as np
import pytest
from replica_simulation import simulate
from schedule_jobs import Job, regrouped, same, train

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding import EmbeddingEngine, InitConfig, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig, check_tables_can_differ

TWO = ParallelConfig(replicas=2)
EVERY = ["serial", "dual_buffer", "frozen_window", "nested", "priority"]


def job_of(every: int, **more) -> Job:
    sync = ReplicaSyncConfig(mode="weights", every=every, state_every=more.pop("state_every", 1))
    return Job(ranks=TWO, replica_sync=sync, num_steps=13, fences=(6,), **more)


@pytest.mark.parametrize(
    ("every", "scale"),
    [(1, 1.0), (4, 2.0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 2.0), (4, 1.0)))],
)
def test_averaged_copies_equal_the_simulation_of_every_row(pools, every, scale):
    job = job_of(every, optimizer="rowwise_adagrad", moment_scale=scale, stream="alternating")
    results = pools[2].run(train, "serial", job)
    for result, expected in zip(results, simulate(job, 2), strict=True):
        assert result["losses"] == expected["losses"]
        assert {step: seen["tables"] for step, seen in result["seen"].items()} == expected["seen"]


@pytest.mark.parametrize(("every", "state_every", "optimizer"), [(1, 3, "adam"), (2, 2, "rowwise_adagrad")])
def test_moments_can_follow_more_seldom(pools, every, state_every, optimizer):
    job = job_of(every, state_every=state_every, optimizer=optimizer, window_cache=True)
    results = pools[2].run(train, "nested", job)
    for result, expected in zip(results, simulate(job, 2), strict=True):
        assert {step: seen["tables"] for step, seen in result["seen"].items()} == expected["seen"]


@pytest.mark.parametrize(("every", "scale"), [(1, 2.0), (4, 1.0)])
def test_groups_of_two_shards_equal_the_simulation(pools, every, scale):
    # The dense weights stay: four ranks add their gradients in an order of the backend's own.
    job = job_of(every, optimizer="rowwise_adagrad", moment_scale=scale, dense_rate=0.0)
    results = pools[4].run(train, "serial", job)
    for result, expected in zip(results, np.repeat(simulate(job, 4), 2), strict=True):
        assert {step: seen["tables"] for step, seen in result["seen"].items()} == expected["seen"]


@pytest.mark.parametrize(
    ("world", "job", "schedules"),
    [
        (2, job_of(1, stream="distance_one"), ["dual_buffer", "frozen_window"]),
        (2, job_of(4, stream="alternating", store="dram"), ["nested", "priority"]),
        (4, job_of(2, state_every=2, window_cache=True, shares=(9, 0, 1, 2)), ["nested", "priority"]),
        pytest.param(2, job_of(1, stream="distance_one"), EVERY[1:], marks=pytest.mark.slow),
        pytest.param(2, job_of(4, stream="alternating", store="dram"), EVERY[1:], marks=pytest.mark.slow),
        pytest.param(
            4, job_of(2, state_every=2, window_cache=True, shares=(9, 0, 1, 2)), EVERY[1:], marks=pytest.mark.slow
        ),
    ],
)
def test_exact_schedules_equal_serial_while_weights_are_averaged(pools, world, job, schedules):
    serial = pools[world].run(train, "serial", job)
    assert len({tuple(result["tables"]) for result in serial}) == 1
    for schedule in schedules:
        results = pools[world].run(train, schedule, job)
        assert all(same(a, b) for a, b in zip(results, serial, strict=True)), schedule
        assert all(a["uses"] == b["uses"] for a, b in zip(results, serial, strict=True)), schedule
        assert all(result["issued"] == results[0]["issued"] for result in results)


@pytest.mark.parametrize("schedule", ["nested", "semi_async", "stale"])
def test_a_resumed_run_equals_one_that_went_on(pools, schedule):
    job = job_of(4, state_every=2)
    whole = pools[2].run(train, schedule, job)
    cut = pools[2].run(train, schedule, replace(job, fences=(), restart_after=6))
    for a, b in zip(whole, cut, strict=True):
        assert all(a[name] == b[name] for name in ("tables", "dense", "losses", "uses"))
    assert whole[0]["tables"] == whole[1]["tables"]


def alternate(topology: Topology, sync: ReplicaSyncConfig) -> list[float]:
    """Key 5 is used by the first group in step 1, and only by the second in step 2; its weight after each step."""
    engine = EmbeddingEngine(
        [
            TableConfig(
                name="t",
                dim=1,
                num_rows=8,
                dtype="float64",
                init=InitConfig(kind="zeros"),
                optimizer=RowOptimizerConfig(kind="sgd"),
            )
        ],
        regrouped(topology, TWO),
        replica_sync=sync,
    )
    weights = []
    for step in (1, 2):
        routed = engine.route({"t": np.array([5 if topology.rank == step - 1 else step])}, step=step)
        working = engine.fetch(routed, step=step)
        (vectors,) = engine.exchange_vectors(routed, working).values()
        engine.accumulate(routed, working, {"t": vectors + 1})
        engine.update(working, learning_rate=1.0)
        engine.write_back(working)
        weights.append(float(engine.lookup_readonly({"t": np.array([5])})["t"]))
    return weights


def test_a_key_of_one_group_at_t_and_only_of_the_other_at_t_plus_1_has_one_history(pools):
    # A gradient is the weight before plus one. One group: 0 - 1 = -1, then -1 - 0 = -1.
    assert pools[2].run(alternate, ReplicaSyncConfig()) == [[-1.0, -1.0]] * 2
    # Averaged in every step, steps of twice the gradient: (-2 + 0) / 2, then (-1 - 2 * 0 + -1) / 2.
    assert pools[2].run(alternate, ReplicaSyncConfig(mode="weights")) == [[-1.0, -1.0]] * 2
    # Averaged in step 2 alone: one copy made its step in step 1, the other in step 2.
    by_two = pools[2].run(alternate, ReplicaSyncConfig(mode="weights", every=2))
    assert by_two == [[-2.0, -2.0], [0.0, -2.0]]


def test_copies_of_all_tables_are_averaged_in_one_pair_of_exchanges(pools):
    job = job_of(1, optimizer="adam")
    for result in pools[2].run(train, "serial", job):
        # The slices to those who average them, and the means back; all columns of two tables in each.
        assert result["issued"].count("replicas.all_to_all") == 2 * job.num_steps


def test_only_touched_rows_are_averaged(pools):
    job = job_of(1, stream="alternating", optimizer="sgd")
    for result in pools[2].run(train, "serial", job):
        assert 0 < result["statistics"].replicas.rows < 18 * 200


def test_tables_that_count_uses_are_refused():
    table = TableConfig(name="t", dim=2, store=StoreConfig(admission_count=2))
    with pytest.raises(UserError, match=r"tables\.\w+\.(eviction|admission_count|max_rows) = .*counts uses of keys"):
        check_tables_can_differ([table])
