"""Hierarchical all-to-all: a row is sent between hosts once for all ranks of a host; every schedule equals serial."""

import os

import numpy as np
import pytest
import torch
from schedule_jobs import DIM, Job, batches_of, same, train, train_until_rejected

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.distributed.topology import ParallelConfig, groups_by_host
from nestrec.embedding.hashing import owner_of
from nestrec.embedding.routing.hierarchical_exchange import check_full_precision
from nestrec.embedding.table_config import TableConfig

HIERARCHICAL = ParallelConfig(hierarchical_all_to_all=True)
EXACT = ["dual_buffer", "frozen_window", "nested", "priority"]
HOSTS, RANKS = 2, 2


def on_two_hosts(topology: Topology, function, *args):
    """Call a function on four ranks as if they were on two hosts with two ranks each."""
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
def test_hierarchical_all_to_all_schedules_equal_serial(pools, schedules, window_cache, stream):
    job = Job(stream=stream, num_steps=12, fences=(5,), window_cache=window_cache, ranks=HIERARCHICAL)
    results = pools[4].run(on_two_hosts, equal_to_serial, schedules, job)
    assert results == [dict.fromkeys(schedules, True)] * 4


@pytest.mark.parametrize("window_cache", [False, True])
def test_hierarchical_all_to_all_equals_one_rank(pools, window_cache):
    job = Job(dtype="float64", num_steps=10, window_cache=window_cache)
    expected = train(Topology.single(), "serial", job)
    hierarchical = Job(dtype="float64", num_steps=10, window_cache=window_cache, ranks=HIERARCHICAL)
    for result in pools[4].run(on_two_hosts, train, "serial", hierarchical):
        torch.testing.assert_close(torch.tensor(result["losses"]), torch.tensor(expected["losses"]), rtol=1e-9, atol=0)
        assert float((result["vectors"] - expected["vectors"]).norm() / expected["vectors"].norm()) < 1e-9


def rows_between_hosts(job: Job) -> int:
    """Return the expected number of rows: for each micro-batch and host, its unique keys that the other host owns."""
    num_rows = 0
    for host in range(HOSTS):
        ranks = [batches_of(job, _RankOfFour(rank), 1) for rank in range(host * RANKS, (host + 1) * RANKS)]
        for batches in zip(*ranks, strict=True):
            for parts in zip(*(batch.micro_batches for batch in batches), strict=True):
                for features in (("item", "target"), ("user",)):
                    keys = np.unique(np.concatenate([part.keys[f].reshape(-1) for part in parts for f in features]))
                    num_rows += int((owner_of(keys, HOSTS * RANKS) // RANKS != host).sum())
    return num_rows


class _RankOfFour:
    """A stand-in for the topology of a rank."""

    world = HOSTS * RANKS

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_hierarchical_all_to_all_sends_row_once_per_host(pools):
    job = Job(num_steps=6, num_micro_batches=2, ranks=HIERARCHICAL)
    statistics = [result["statistics"] for result in pools[4].run(on_two_hosts, train, "serial", job)]
    rows = rows_between_hosts(job)
    sent = {leg: sum(getattr(s, leg).bytes_sent for s in statistics) for leg in ("keys", "vectors", "gradients")}
    assert sent == {"keys": rows * 10, "vectors": rows * 4 * DIM, "gradients": rows * 4 * DIM}
    flat = [result["statistics"] for result in pools[4].run(train, "serial", Job(num_steps=6, num_micro_batches=2))]
    assert sum(s.vectors.bytes_sent for s in flat) > 1.3 * sent["vectors"]


def test_hierarchical_all_to_all_key_error_reaches_all_ranks(pools):
    job = Job(num_steps=6, bad_step=3, ranks=HIERARCHICAL, window_cache=True)
    results = pools[4].run(on_two_hosts, train_until_rejected, "serial", job)
    assert {result["steps"] for result in results} == {2}
    assert len({result["error"] for result in results}) == 1
    assert "detected on rank 3" in results[0]["error"]


def test_groups_by_host_splits_groups_at_hosts():
    assert groups_by_host([[0, 1, 2, 3], [4, 5, 6, 7]], 2) == (
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
    )
    assert groups_by_host([[0, 2], [1, 3]], 4) == ([[0, 2], [1, 3]], [[0], [2], [1], [3]])
    with pytest.raises(UserError, match=r"parallel\.hierarchical_all_to_all"):
        groups_by_host([[0, 1, 2]], 2)


def test_hierarchical_all_to_all_rejects_half_precision():
    full = TableConfig(name="t", dim=4, num_rows=9)
    check_full_precision([full])
    half = TableConfig(name="t", dim=4, num_rows=9, features=("a", "b"), half_precision_features=("b",))
    with pytest.raises(UserError, match=r"parallel\.hierarchical_all_to_all"):
        check_full_precision([half])
