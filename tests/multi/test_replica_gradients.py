"""Gradients summed over replica groups: equal to one group within tolerance, and replicas are bitwise identical."""

import functools
from dataclasses import replace

import pytest
import torch
from schedule_jobs import Job, same, train

from nestrec.distributed import Topology
from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding.routing import replica_reduction

EXACT = ["dual_buffer", "frozen_window", "nested", "priority"]
GROUPS = {
    2: ParallelConfig(num_replicas=2),
    4: ParallelConfig(num_replicas=2, replica_layout="replicas_contiguous"),
}
CASES = [
    # Every optimizer, exact schedule, number of ranks and cache setting occurs; the full grid is slow.
    (2, "sgd", "serial", False), (4, "adagrad", "nested", True), (2, "rowwise_adagrad", "dual_buffer", True),
    (4, "adam", "frozen_window", False), (2, "rowwise_adam", "nested", False), (4, "rowwise_adagrad", "serial", True),
    (2, "adam", "priority", True),
]  # fmt: skip


@functools.cache
def one_group(optimizer: str, num_steps: int) -> dict[str, object]:
    return train(Topology.single(), "serial", Job(dtype="float64", num_steps=num_steps, optimizer=optimizer))


def check_equality(pools, world: int, schedule: str, job: Job) -> None:
    job = replace(job, dtype="float64", ranks=GROUPS[world])
    expected = one_group(job.optimizer, job.num_steps)
    results = pools[world].run(train, schedule, job)
    for result in results:
        assert result["tables"] == results[0]["tables"]
        torch.testing.assert_close(torch.tensor(result["losses"]), torch.tensor(expected["losses"]), rtol=1e-9, atol=0)
        difference = (result["vectors"] - expected["vectors"]).norm() / expected["vectors"].norm()
        assert float(difference) < 1e-9


@pytest.mark.parametrize(("world", "optimizer", "schedule", "window_cache"), CASES)
def test_replica_gradients_equal_one_group(pools, world, optimizer, schedule, window_cache):
    check_equality(pools, world, schedule, Job(num_steps=10, optimizer=optimizer, window_cache=window_cache))


@pytest.mark.slow
@pytest.mark.parametrize("window_cache", [False, True])
@pytest.mark.parametrize("schedule", ["serial", *EXACT])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam"])
@pytest.mark.parametrize("world", [2, 4])
def test_replica_gradients_equal_one_group_full_grid(pools, world, optimizer, schedule, window_cache):
    check_equality(pools, world, schedule, Job(num_steps=100, optimizer=optimizer, window_cache=window_cache))


TWO_REPLICAS = (2, 2, Job(stream="distance_one", store="dram", fences=(5,)))
TWO_REPLICAS_OF_TWO_SHARDS = (4, 2, Job(stream="zipf", window_cache=True, shares=(9, 0, 1, 2), short_steps={8: 1}))
FOUR_REPLICAS = (
    4,
    4,
    Job(stream="distance_two", admission={"admission_threshold": 2, "eviction_policy": "lru", "max_rows": 12}),
)


@pytest.mark.parametrize(
    ("world", "replicas", "job", "schedules"),
    [
        (*TWO_REPLICAS, EXACT),
        (*TWO_REPLICAS_OF_TWO_SHARDS, ["nested", "priority"]),
        (*FOUR_REPLICAS, ["frozen_window", "nested"]),
        *(
            pytest.param(*groups, EXACT, marks=pytest.mark.slow)
            for groups in (TWO_REPLICAS_OF_TWO_SHARDS, FOUR_REPLICAS)
        ),
    ],
)
def test_replica_gradients_schedules_equal_serial(pools, world, replicas, job, schedules):
    job = replace(job, ranks=ParallelConfig(num_replicas=replicas), num_steps=10)
    serial = pools[world].run(train, "serial", job)
    assert len({tuple(result["tables"]) for result in serial}) == 1
    for schedule in schedules:
        results = pools[world].run(train, schedule, job)
        assert all(same(a, b) for a, b in zip(results, serial, strict=True)), schedule
        assert all(result["issued"] == results[0]["issued"] for result in results)


def test_replica_gradients_are_sent_once_for_touched_rows(pools):
    job = Job(stream="no_overlap", num_steps=8, ranks=ParallelConfig(num_replicas=2))
    for result in pools[2].run(train, "serial", job):
        sent = result["statistics"]
        # One shard per group: the owner gets each unique key of its batch once, and nothing else is sent.
        assert sent.replicas.rows <= sent.gradients.rows
        assert sent.replicas.bytes_sent == sent.replicas.rows * 8 * 4
        assert sent.gradients.bytes_sent == 0


def replica_bytes(topology: Topology, job: Job, *, is_direct: bool) -> tuple[list[str], int]:
    """Return the digests of the tables and the bytes sent between replicas.

    With `is_direct`, all sums over replicas are direct reductions; otherwise, they may be scattered reductions.
    """
    least = replica_reduction._FEWEST_HOLDERS
    replica_reduction._FEWEST_HOLDERS = 99 if is_direct else least
    try:
        result = train(topology, "nested", job)
    finally:
        replica_reduction._FEWEST_HOLDERS = least
    return result["tables"], result["statistics"].replicas.bytes_sent


@pytest.mark.parametrize("window_cache", [False, True])
def test_replica_gradients_reduce_scatter_is_bitwise(pools, window_cache):
    ranks = ParallelConfig(num_replicas=4)
    job = Job(
        num_steps=8, num_samples=96, num_micro_batches=2, ranks=ranks, window_cache=window_cache, stream="distance_two"
    )
    direct, scattered = (
        pools[4].run(functools.partial(replica_bytes, is_direct=is_direct), job) for is_direct in (True, False)
    )
    assert [tables for tables, _ in scattered] == [tables for tables, _ in direct]
    assert sum(sent for _, sent in scattered) < 0.8 * sum(sent for _, sent in direct)
