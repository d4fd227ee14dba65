"""Exchanges by hosts: a row crosses between hosts once for all ranks of a host; every schedule equals serial."""

import os

import numpy as np
import pytest
import torch
from schedule_jobs import DIM, Job, batches_of, same, train, train_until_refused

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.distributed.topology import ParallelConfig, groups_by_host
from nestrec.embedding.hashing import owner_of
from nestrec.embedding.routing.hierarchical_exchange import check_rows_are_whole
from nestrec.embedding.table_config import TableConfig

BY_HOSTS = ParallelConfig(hierarchy=True)
EXACT = ["dual_buffer", "frozen_window", "nested", "priority"]
HOSTS, RANKS = 2, 2


def on_two_hosts(topology: Topology, function, *args):
    """Four ranks as if two of them lived on each of two hosts."""
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    return function(topology, *args)


def equal_to_serial(topology: Topology, schedules: list[str], job: Job) -> dict[str, bool]:
    expected = train(topology, "serial", job)
    return {schedule: same(train(topology, schedule, job), expected) for schedule in schedules}


@pytest.mark.parametrize(
    ("schedules", "window_cache", "stream"),
    [
        (["nested", "priority"], False, "zipf"),
        (["frozen_window", "priority"], True, "distance_one"),
        pytest.param(EXACT, False, "all_equal", marks=pytest.mark.slow),
        pytest.param(EXACT, True, "alternating", marks=pytest.mark.slow),
        pytest.param(EXACT, True, "zipf", marks=pytest.mark.slow),
    ],
)
def test_every_schedule_by_hosts_equals_serial_by_hosts_bit_for_bit(pools, schedules, window_cache, stream):
    job = Job(stream=stream, num_steps=12, fences=(5,), window_cache=window_cache, ranks=BY_HOSTS)
    found = pools[4].run(on_two_hosts, equal_to_serial, schedules, job)
    assert found == [dict.fromkeys(schedules, True)] * 4


@pytest.mark.parametrize("window_cache", [False, True])
def test_by_hosts_equals_one_rank_to_rounding(pools, window_cache):
    job = Job(dtype="float64", num_steps=10, window_cache=window_cache)
    expected = train(Topology.single(), "serial", job)
    by_hosts = Job(dtype="float64", num_steps=10, window_cache=window_cache, ranks=BY_HOSTS)
    for found in pools[4].run(on_two_hosts, train, "serial", by_hosts):
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=1e-9, atol=0)
        assert float((found["vectors"] - expected["vectors"]).norm() / expected["vectors"].norm()) < 1e-9


def rows_between_hosts(job: Job) -> int:
    """By definition: for each micro-batch and host the distinct keys of its ranks that the other host owns."""
    found = 0
    for host in range(HOSTS):
        ranks = [batches_of(job, _Numbered(rank), 1) for rank in range(host * RANKS, (host + 1) * RANKS)]
        for batches in zip(*ranks, strict=True):
            for parts in zip(*(batch.micro_batches for batch in batches), strict=True):
                for features in (("item", "target"), ("user",)):
                    keys = np.unique(np.concatenate([part.keys[f].reshape(-1) for part in parts for f in features]))
                    found += int((owner_of(keys, HOSTS * RANKS) // RANKS != host).sum())
    return found


class _Numbered:
    world = HOSTS * RANKS

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_a_row_crosses_between_hosts_once_a_host(pools):
    job = Job(num_steps=6, num_micro_batches=2, ranks=BY_HOSTS)
    statistics = [found["statistics"] for found in pools[4].run(on_two_hosts, train, "serial", job)]
    rows = rows_between_hosts(job)
    sent = {leg: sum(getattr(s, leg).bytes_sent for s in statistics) for leg in ("keys", "vectors", "gradients")}
    assert sent == {"keys": rows * 10, "vectors": rows * 4 * DIM, "gradients": rows * 4 * DIM}
    flat = [found["statistics"] for found in pools[4].run(train, "serial", Job(num_steps=6, num_micro_batches=2))]
    assert sum(s.vectors.bytes_sent for s in flat) > 1.3 * sent["vectors"]


def test_a_mistake_in_the_keys_of_one_rank_is_told_to_all_ranks_of_all_hosts(pools):
    job = Job(num_steps=6, bad_step=3, ranks=BY_HOSTS, window_cache=True)
    found = pools[4].run(on_two_hosts, train_until_refused, "serial", job)
    assert {result["steps"] for result in found} == {2}
    assert len({result["error"] for result in found}) == 1
    assert "found on rank 3" in found[0]["error"]


def test_groups_are_cut_at_hosts():
    assert groups_by_host([[0, 1, 2, 3], [4, 5, 6, 7]], 2) == (
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
    )
    assert groups_by_host([[0, 2], [1, 3]], 4) == ([[0, 2], [1, 3]], [[0], [2], [1], [3]])
    with pytest.raises(UserError, match=r"ranks\.hierarchy"):
        groups_by_host([[0, 1, 2]], 2)


def test_rows_that_cross_in_half_precision_are_refused():
    whole = TableConfig(name="t", dim=4, num_rows=9)
    check_rows_are_whole([whole])
    half = TableConfig(name="t", dim=4, num_rows=9, features=("a", "b"), half_features=("b",))
    with pytest.raises(UserError, match=r"ranks\.hierarchy"):
        check_rows_are_whole([half])
