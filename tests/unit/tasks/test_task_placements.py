"""Tables with automatic placement: traffic is estimated from the rows that sampled batches use."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nestrec.data.batch_loader import BatchConfig, Collator, MicroBatch
from nestrec.distributed import Topology
from nestrec.embedding import TableConfig
from nestrec.embedding.table_config import TrafficEstimate
from nestrec.tasks.task import _MAX_COUNTED, Task, _count_unique_rows, _estimate_traffic, _spread, resolve_placements


class Pairs(Collator):
    """Sample s reads the rows s, s + 1 and 3 of every table; samples 0 and 5 are empty."""

    tokens = np.array([0, 3, 3, 3, 3, 0, 3, 3, 3, 3])

    def read(self, samples: Any) -> Any:
        return samples + 1

    def collate(self, samples: Any, rows: Any, epoch: int) -> MicroBatch:
        keys = np.stack([samples, rows, np.full_like(samples, 3)], axis=1)
        return MicroBatch(samples, {"item": keys, "few": keys % 4}, {}, 3, keys.size)


class PairsTask(Task):
    collator = Pairs()
    tables = (
        TableConfig(name="items", dim=2, num_rows=100, features=("item",), placement="auto"),
        TableConfig(name="few", dim=64, num_rows=4, placement="auto"),
        TableConfig(name="hashed", dim=2, num_rows=2, is_hashed=True, features=("item", "few"), placement="sharded"),
    )

    def num_held_out(self, part: Any) -> int:
        raise NotImplementedError

    def loss(self, batch: Any, rows: Any, index: Any) -> Any:
        raise NotImplementedError

    def evaluate(self, engine: Any, part: Any) -> Any:
        raise NotImplementedError


def two_ranks(num_replicas: int = 1) -> Topology:
    return replace(Topology.single(), world=2, num_replicas=num_replicas)


TOKENS = BatchConfig(batch_size=None, batch_tokens=12, num_micro_batches=2)
SAMPLES = BatchConfig(batch_size=4, num_micro_batches=2)


@pytest.mark.parametrize("batch", [TOKENS, SAMPLES])
def test_placement_traffic_counts_rows_of_step_and_micro_batch(batch: BatchConfig) -> None:
    # A step has samples 1, 3, 6 and 9 with 8 rows; a micro-batch of a rank has sample 1 with 3 rows.
    traffic = _estimate_traffic(PairsTask(), batch, two_ranks(), window_cache=False)
    assert traffic["items"] == TrafficEstimate(
        sharded=0.5 * 2 * 3 * (8 + 8 + 8), replicated=0.5 * (2 * 3 * (8 * 2 + 8) + 8 * 8)
    )
    assert traffic["hashed"] == TrafficEstimate(
        sharded=0.5 * 2 * 2 * (8 + 8 + 8), replicated=0.5 * (2 * 2 * (8 * 2 + 8) + 2 * 8)
    )


@pytest.mark.parametrize(("micro_batches", "window_cache"), [(2, True), ("auto", False), (1, False)])
def test_placement_traffic_counts_full_batches_of_ranks(micro_batches: Any, window_cache: bool) -> None:
    # A rank has samples 1 and 9 with 5 rows.
    batch = replace(SAMPLES, num_micro_batches=micro_batches)
    traffic = _estimate_traffic(PairsTask(), batch, two_ranks(), window_cache)
    assert traffic["items"] == TrafficEstimate(
        sharded=0.5 * 5 * (8 + 8 + 8), replicated=0.5 * (5 * (8 * 2 + 8) + 8 * 8)
    )


def test_placement_traffic_rounds_uneven_micro_batches_up() -> None:
    # Of 4 micro-batches with 5 samples, the largest has samples 1 and 9 with 5 rows.
    traffic = _estimate_traffic(PairsTask(), replace(SAMPLES, batch_size=5), two_ranks(), window_cache=False)
    assert traffic["items"].sharded == 0.5 * 2 * 5 * (8 + 8 + 8)


def test_placement_replicates_the_table_with_less_traffic() -> None:
    tables = resolve_placements(PairsTask(), SAMPLES, two_ranks(), window_cache=False)
    assert [table.placement for table in tables] == ["sharded", "replicated", "sharded"]
    for topology in (Topology.single(), two_ranks(num_replicas=2)):
        tables = resolve_placements(PairsTask(), SAMPLES, topology, window_cache=False)
        assert {table.placement for table in tables} == {"sharded"}


def test_placement_samples_spread_from_first_to_last() -> None:
    samples = np.arange(100) + 10
    assert _spread(samples, 5).tolist() == [10, 34, 59, 84, 109]
    assert _spread(samples, 1).tolist() == [10]
    assert _spread(samples, 1000).tolist() == samples.tolist()
    many = _spread(np.arange(3 * _MAX_COUNTED), 2 * _MAX_COUNTED)
    assert (len(many), many[0], many[-1]) == (_MAX_COUNTED, 0, 3 * _MAX_COUNTED - 1)


def test_placement_unique_rows_are_counted_over_all_features() -> None:
    # The features read the ids 1, 2, 3, 9 and 10 of table `hashed`, which has two rows.
    assert _count_unique_rows(PairsTask(), np.array([1, 9])) == {"items": 5, "few": 3, "hashed": 2}
