"""Weights averaged over replica groups: bitwise identical to a simulation in one process that averages every row."""

from dataclasses import replace

import numpy as np
import pytest
from replica_simulation import simulate
from schedule_jobs import Job, regrouped, same, train

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding import EmbeddingEngine, InitConfig, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig, check_weight_averaging

TWO = ParallelConfig(num_replicas=2)
EXACT = ["dual_buffer", "frozen_window", "nested", "priority"]


def job_of(every_steps: int, **more) -> Job:
    sync = ReplicaSyncConfig(mode="weights", every_steps=every_steps, state_every_averages=more.pop("state_every", 1))
    return Job(ranks=TWO, replica_sync=sync, num_steps=13, fences=(6,), **more)


@pytest.mark.parametrize(
    ("every", "scale"),
    [(1, 1.0), (4, 2.0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 2.0), (4, 1.0)))],
)
def test_replica_weights_equal_simulation(pools, every, scale):
    job = job_of(every, optimizer="rowwise_adagrad", moment_scale=scale, stream="alternating")
    results = pools[2].run(train, "serial", job)
    for result, expected in zip(results, simulate(job, 2), strict=True):
        assert result["losses"] == expected["losses"]
        assert {step: state["tables"] for step, state in result["fence_states"].items()} == expected["fence_states"]


@pytest.mark.parametrize(("every", "state_every", "optimizer"), [(1, 3, "adam"), (2, 2, "rowwise_adagrad")])
def test_replica_weights_average_state_less_often(pools, every, state_every, optimizer):
    job = job_of(every, state_every=state_every, optimizer=optimizer, window_cache=True)
    results = pools[2].run(train, "nested", job)
    for result, expected in zip(results, simulate(job, 2), strict=True):
        assert {step: state["tables"] for step, state in result["fence_states"].items()} == expected["fence_states"]


@pytest.mark.parametrize(("every", "scale"), [(1, 2.0), (4, 1.0)])
def test_replica_weights_of_two_shards_equal_simulation(pools, every, scale):
    # The dense weights are constant, because the backend determines the order in which it adds gradients of four ranks.
    job = job_of(every, optimizer="rowwise_adagrad", moment_scale=scale, dense_rate=0.0)
    results = pools[4].run(train, "serial", job)
    for result, expected in zip(results, np.repeat(simulate(job, 4), 2), strict=True):
        assert {step: state["tables"] for step, state in result["fence_states"].items()} == expected["fence_states"]


@pytest.mark.parametrize(
    ("world", "job", "schedules"),
    [
        (2, job_of(1, stream="distance_one"), ["dual_buffer", "frozen_window"]),
        (2, job_of(4, stream="alternating", store="dram"), ["nested", "priority"]),
        (4, job_of(2, state_every=2, window_cache=True, shares=(9, 0, 1, 2)), ["nested", "priority"]),
        pytest.param(2, job_of(1, stream="distance_one"), EXACT, marks=pytest.mark.slow),
        pytest.param(2, job_of(4, stream="alternating", store="dram"), EXACT, marks=pytest.mark.slow),
        pytest.param(
            4, job_of(2, state_every=2, window_cache=True, shares=(9, 0, 1, 2)), EXACT, marks=pytest.mark.slow
        ),
    ],
)
def test_replica_weights_schedules_equal_serial(pools, world, job, schedules):
    serial = pools[world].run(train, "serial", job)
    assert len({tuple(result["tables"]) for result in serial}) == 1
    for schedule in schedules:
        results = pools[world].run(train, schedule, job)
        assert all(same(a, b) for a, b in zip(results, serial, strict=True)), schedule
        assert all(a["uses"] == b["uses"] for a, b in zip(results, serial, strict=True)), schedule
        assert all(result["issued"] == results[0]["issued"] for result in results)


@pytest.mark.parametrize("schedule", ["nested", "semi_async", "stale"])
def test_replica_weights_resumed_run_is_exact(pools, schedule):
    job = job_of(4, state_every=2)
    uninterrupted = pools[2].run(train, schedule, job)
    resumed = pools[2].run(train, schedule, replace(job, fences=(), restart_after=6))
    for a, b in zip(uninterrupted, resumed, strict=True):
        assert all(a[name] == b[name] for name in ("tables", "dense", "losses", "uses"))
    assert uninterrupted[0]["tables"] == uninterrupted[1]["tables"]


def alternate(topology: Topology, sync: ReplicaSyncConfig) -> list[float]:
    """Return the weight of key 5 after each step; the first group uses the key in step 1, the second in step 2."""
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
        working = engine.fetch_rows(routed, step=step)
        (vectors,) = engine.exchange_vectors(routed, working).values()
        engine.accumulate(routed, working, {"t": vectors + 1})
        engine.update(working, learning_rate=1.0)
        engine.write_back(working)
        weights.append(float(engine.lookup_readonly({"t": np.array([5])})["t"]))
    return weights


def test_replica_weights_key_moving_between_groups(pools):
    # A gradient is the previous weight plus one. One group: 0 - 1 = -1, then -1 - 0 = -1.
    assert pools[2].run(alternate, ReplicaSyncConfig()) == [[-1.0, -1.0]] * 2
    # Averaged in every step, with updates of twice the gradient: (-2 + 0) / 2, then (-1 - 2 * 0 + -1) / 2.
    assert pools[2].run(alternate, ReplicaSyncConfig(mode="weights")) == [[-1.0, -1.0]] * 2
    # Averaged in step 2 only: one replica was updated in step 1, the other in step 2.
    by_two = pools[2].run(alternate, ReplicaSyncConfig(mode="weights", every_steps=2))
    assert by_two == [[-2.0, -2.0], [0.0, -2.0]]


def test_replica_weights_average_all_tables_in_one_exchange(pools):
    job = job_of(1, optimizer="adam")
    for result in pools[2].run(train, "serial", job):
        # One all-to-all sends slices to the ranks that average them, the other returns the means of both tables.
        assert result["issued"].count("replicas.all_to_all") == 2 * job.num_steps


def test_replica_weights_average_only_touched_rows(pools):
    job = job_of(1, stream="alternating", optimizer="sgd")
    for result in pools[2].run(train, "serial", job):
        assert 0 < result["statistics"].replicas.rows < 18 * 200


def test_replica_weights_reject_tables_that_count_uses():
    table = TableConfig(name="t", dim=2, store=StoreConfig(admission_threshold=2))
    with pytest.raises(
        UserError, match=r"tables\.\w+\.(eviction_policy|admission_threshold|max_rows)=.*uses of keys differ"
    ):
        check_weight_averaging([table])
