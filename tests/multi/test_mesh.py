"""Device mesh of replica groups and shards."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engine_jobs import create_topology, mesh, train

from nestrec.distributed import Communicator, Topology
from nestrec.distributed.collectives import all_gather_json, all_gather_rows
from nestrec.distributed.topology import ParallelConfig
from nestrec.distributed.topology import mesh as mesh_of
from nestrec.trace.tracer import CollectiveLog
from support.rank_pool import RankPool


@pytest.fixture(scope="module")
def two_by_two() -> Iterator[RankPool]:
    pool = RankPool(4, ParallelConfig(num_replicas=2))
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("kind", "num_micro_batches"), [pytest.param("sgd", 1, marks=pytest.mark.slow), ("rowwise_adagrad", 2), ("adam", 1)]
)
def test_replica_groups_equal_one_rank_and_each_other(two_by_two, kind, num_micro_batches):
    alone = train(Topology.single(), kind, 60)
    results = two_by_two.run(train, kind, 60, num_micro_batches)
    for result in results:
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=1e-9)
        for name, vectors in alone["vectors"].items():
            assert float((result["vectors"][name] - vectors).norm() / vectors.norm()) < 1e-9
        assert result["digests"] == results[0]["digests"]
        assert result["issued"] == results[0]["issued"]


def test_ranks_form_replica_groups_of_shards(two_by_two):
    coordinates = two_by_two.run(mesh)
    assert coordinates == [
        {"replica": 0, "shard": 0, "keys": 1 + 2, "replicas": 1 + 3, "dense": 10, "slots": 30},
        {"replica": 0, "shard": 1, "keys": 1 + 2, "replicas": 2 + 4, "dense": 10, "slots": 30},
        {"replica": 1, "shard": 0, "keys": 3 + 4, "replicas": 1 + 3, "dense": 10, "slots": 30},
        {"replica": 1, "shard": 1, "keys": 3 + 4, "replicas": 2 + 4, "dense": 10, "slots": 30},
    ]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (ParallelConfig(num_replicas=3), "must divide the number of ranks"),
        (ParallelConfig(transport="copy_engine"), "--parallel.transport=host or collectives"),
    ],
)
def test_mesh_rejects_impossible_options(pools, ranks, message):
    outcomes = pools[2].outcomes(create_topology, ranks)
    assert all(outcome.kind == "UserError" and message in outcome.text for outcome in outcomes)


def test_mesh_follows_replica_layout():
    assert mesh_of(8, 2, "shards_contiguous") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh_of(8, 2, "replicas_contiguous") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_communicator_of_existing_group_gathers(pools):
    assert pools[2].run(gather_over_custom_group) == [[0, 1]] * 2


def gather_over_custom_group(topology: Topology) -> list[int]:
    communicator = Communicator("custom", topology.rank, topology.world, topology.control.group, CollectiveLog())
    return all_gather_json(communicator, topology.rank)


def test_mesh_all_gather_of_unequal_counts(pools):
    for rows, counts in pools[2].run(gather_rows_of_ranks, [1, 3]) + pools[2].run(gather_rows_of_ranks, [3, 0]):
        assert counts in ([1, 3], [3, 0])
        assert rows == [[rank, i] for rank, count in enumerate(counts) for i in range(count)]


def gather_rows_of_ranks(topology: Topology, counts: list[int]) -> tuple[list[list[int]], list[int]]:
    rows = torch.tensor([[topology.rank, i] for i in range(counts[topology.rank])], dtype=torch.int64)
    gathered, gathered_counts = all_gather_rows(topology.keys, topology.keys, rows.view(-1, 2))
    return gathered.tolist(), gathered_counts
