"""Replica groups times shards."""

from engine_jobs import mesh, torchrun_like

from nestrec.testing.ranks import RankPool


def test_ranks_form_replica_groups_of_shards():
    pool = RankPool(4, num_replicas=2)
    places = pool.run(mesh)
    pool.close()
    assert places == [
        {"replica": 0, "shard": 0, "keys": 1 + 2, "replicas": 1 + 3, "dense": 10, "slots": 30},
        {"replica": 0, "shard": 1, "keys": 1 + 2, "replicas": 2 + 4, "dense": 10, "slots": 30},
        {"replica": 1, "shard": 0, "keys": 3 + 4, "replicas": 1 + 3, "dense": 10, "slots": 30},
        {"replica": 1, "shard": 1, "keys": 3 + 4, "replicas": 2 + 4, "dense": 10, "slots": 30},
    ]


def test_a_number_of_replicas_that_does_not_divide_the_ranks_is_an_error(pools):
    assert {o.kind for o in pools[2].outcomes(torchrun_like, 3)} == {"UserError"}
