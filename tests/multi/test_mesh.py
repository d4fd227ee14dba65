"""Replica groups times shards."""

from collections.abc import Iterator

import numpy as np
import pytest
from engine_jobs import mesh, torchrun_like, train

from nestrec.distributed import Topology
from nestrec.distributed.options import RanksConfig
from nestrec.testing.ranks import RankPool


@pytest.fixture(scope="module")
def two_by_two() -> Iterator[RankPool]:
    pool = RankPool(4, RanksConfig(replicas=2))
    yield pool
    pool.close()


@pytest.mark.parametrize(("kind", "num_parts"), [("sgd", 1), ("rowwise_adagrad", 2), ("adam", 1)])
def test_replica_groups_train_as_one_rank_and_stay_alike(two_by_two, kind, num_parts):
    alone = train(Topology.single(), kind, 60)
    results = two_by_two.run(train, kind, 60, num_parts)
    for result in results:
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=1e-9)
        for name, vectors in alone["vectors"].items():
            assert float((result["vectors"][name] - vectors).norm() / vectors.norm()) < 1e-9
        assert result["digests"] == results[0]["digests"]
        assert result["issued"] == results[0]["issued"]


def test_ranks_form_replica_groups_of_shards(two_by_two):
    places = two_by_two.run(mesh)
    assert places == [
        {"replica": 0, "shard": 0, "keys": 1 + 2, "replicas": 1 + 3, "dense": 10, "slots": 30},
        {"replica": 0, "shard": 1, "keys": 1 + 2, "replicas": 2 + 4, "dense": 10, "slots": 30},
        {"replica": 1, "shard": 0, "keys": 3 + 4, "replicas": 1 + 3, "dense": 10, "slots": 30},
        {"replica": 1, "shard": 1, "keys": 3 + 4, "replicas": 2 + 4, "dense": 10, "slots": 30},
    ]


def test_a_number_of_replicas_that_does_not_divide_the_ranks_is_an_error(pools):
    assert {o.kind for o in pools[2].outcomes(torchrun_like, 3)} == {"UserError"}
