"""Samples exchanged between ranks: every sample arrives exactly once, on the rank of the partition, unchanged."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nestrec.balance import POLICIES, BalanceConfig, CostModel, balance
from nestrec.balance.sample_exchange import SampleExchange, exchange_samples
from nestrec.data.batch_order import contiguous_bounds
from nestrec.data.dataset import DatasetRows
from nestrec.data.flat_arrays import offsets_of_lengths
from nestrec.data.synthetic.synthetic_logs import lengths as draw_lengths
from nestrec.distributed.topology import Communicator, Topology
from support.rank_pool import RankPool

COST = CostModel(token=1.0, token_squared=1 / 5120, candidate=3.0)


@pytest.fixture(params=[2, 4])
def ranks(pools, request: pytest.FixtureRequest) -> tuple[RankPool, int]:
    return pools[request.param], request.param


def sample_rows(ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> DatasetRows:
    """Return rows whose values encode sample and position, in columns of different widths and lengths."""
    offsets = offsets_of_lengths(lengths)
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    items = np.repeat(ids, lengths) * 100_000 + positions
    extras = np.repeat(ids, ids % 3).astype(np.int16)
    return DatasetRows(
        indices=ids,
        scalars={"label": (ids % 2).astype(bool), "score": ids / 7.0},
        lists={"items": (items, offsets), "extras": (extras, offsets_of_lengths(ids % 3))},
    )


def global_batch(num_samples: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    ids = np.random.default_rng(0).permutation(10 * num_samples)[:num_samples]
    return ids, draw_lengths("turbogr-kuai", num_samples, 5).astype(np.int64), ids % 11


def exchange(topology: Topology, policy: str, num_samples: int, counts: list[int] | None) -> SampleExchange:
    ids, lengths, candidates = global_batch(num_samples)
    bounds = contiguous_bounds(num_samples, topology.world) if counts is None else offsets_of_lengths(np.array(counts))
    part = slice(bounds[topology.rank], bounds[topology.rank + 1])
    cfg = BalanceConfig(policy=policy, cost=COST)
    rows = sample_rows(ids[part], lengths[part])
    return exchange_samples(topology.control, cfg, rows, lengths[part], candidates[part])


def assert_rows_equal(rows: DatasetRows, expected: DatasetRows) -> None:
    assert rows.indices.tolist() == expected.indices.tolist()
    for name, values in expected.scalars.items():
        assert rows.scalars[name].dtype == values.dtype
        assert rows.scalars[name].tolist() == values.tolist()
    for name, (values, offsets) in expected.lists.items():
        assert rows.lists[name][0].dtype == values.dtype
        assert rows.lists[name][0].tolist() == values.tolist()
        assert rows.lists[name][1].tolist() == offsets.tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_sample_exchange_equals_partition(ranks: tuple[RankPool, int], policy: str) -> None:
    pool, world = ranks
    ids, lengths, candidates = global_batch(64)
    groups = balance(BalanceConfig(policy=policy, cost=COST), lengths, world, candidates=candidates)
    for group, result in zip(groups, pool.run(exchange, policy, 64, None), strict=True):
        assert_rows_equal(result.rows, sample_rows(ids[group], lengths[group]))
        assert result.lengths.tolist() == lengths[group].tolist()


@pytest.mark.parametrize("policy", ["refined", "karmarkar_karp", "token_threshold"])
def test_sample_exchange_of_unequal_counts_is_lossless(ranks: tuple[RankPool, int], policy: str) -> None:
    pool, world = ranks
    for counts in ([0] * (world - 1) + [30], [1] + [0] * (world - 1), [0] * world):
        results = pool.run(exchange, policy, sum(counts), counts)
        received = np.sort(np.concatenate([r.rows.indices for r in results]))
        assert received.tolist() == np.sort(global_batch(sum(counts))[0]).tolist()


def test_sample_exchange_refined_balances_ranks(ranks: tuple[RankPool, int]) -> None:
    pool, _ = ranks
    before, after = pool.run(exchange, "fixed", 64, None), pool.run(exchange, "refined", 64, None)
    assert before[0].metrics.imbalance > 0.05
    assert after[0].metrics.imbalance < 0.01
    assert len({(r.metrics, r.moved_bytes) for r in after}) == 1


def counted_bytes(topology: Topology) -> tuple[int, int]:
    """Return the reported number of moved bytes, and the bytes that this rank sent in the all-to-all."""
    import nestrec.balance.sample_exchange as module

    original = module.all_to_all_rows
    sent = []

    def counting(communicator: Communicator, rows: Any, send: list[int], receive: list[int]) -> Any:
        sent.append(sum(n for rank, n in enumerate(send) if rank != communicator.rank) * rows.shape[1])
        return original(communicator, rows, send, receive)

    module.all_to_all_rows = counting
    try:
        return exchange(topology, "refined", 64, None).moved_bytes, sum(sent)
    finally:
        module.all_to_all_rows = original


def test_sample_exchange_reports_bytes_sent(ranks: tuple[RankPool, int]) -> None:
    pool, _ = ranks
    results = pool.run(counted_bytes)
    assert results[0][0] == sum(sent for _, sent in results) > 0


def test_sample_exchange_fixed_moves_no_samples(ranks: tuple[RankPool, int]) -> None:
    pool, _ = ranks
    assert [r.moved_bytes for r in pool.run(exchange, "fixed", 64, None)] == [0] * ranks[1]


def test_sample_exchange_of_one_rank_keeps_samples() -> None:
    ids, lengths, _ = global_batch(9)
    alone = exchange_samples(
        Topology.single().control, BalanceConfig(policy="refined"), sample_rows(ids, lengths), lengths
    )
    assert_rows_equal(alone.rows, sample_rows(ids, lengths))
    assert alone.moved_bytes == 0
