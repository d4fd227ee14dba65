"""Tables whose placement is left open: the rows that batches use are counted in samples of the data."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nestrec.data.batch_loader import BatchConfig, Collator, MicroBatch
from nestrec.distributed import Topology
from nestrec.embedding import TableConfig
from nestrec.embedding.table_config import TrafficEstimate
from nestrec.tasks.task import _MOST_COUNTED, Task, _crossed, _distinct, _spread, placed


class Pairs(Collator):
    """Sample s reads the rows s, s + 1 and 3 of every table; samples 0 and 5 are empty."""

    tokens = np.array([0, 3, 3, 3, 3, 0, 3, 3, 3, 3])

    def read(self, samples: Any) -> Any:
        return samples + 1

    def assemble(self, samples: Any, rows: Any, epoch: int) -> MicroBatch:
        keys = np.stack([samples, rows, np.full_like(samples, 3)], axis=1)
        return MicroBatch(samples, {"item": keys, "few": keys % 4}, {}, 3, keys.size)


class PairsTask(Task):
    assembler = Pairs()
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


TOKENS = BatchConfig(batch_samples=None, batch_tokens=12, micro_batches=2)
SAMPLES = BatchConfig(batch_samples=4, micro_batches=2)


@pytest.mark.parametrize("batch", [TOKENS, SAMPLES])
def test_traffic_counts_rows_of_step_and_micro_batch(batch: BatchConfig) -> None:
    # A step has the samples 1, 3, 6 and 9, of 8 rows; a micro-batch of a rank has sample 1, of 3 rows.
    found = _crossed(PairsTask(), batch, two_ranks(), window_cache=False)
    assert found["items"] == TrafficEstimate(
        sharded=0.5 * 2 * 3 * (8 + 8 + 8), replicated=0.5 * (2 * 3 * (8 * 2 + 8) + 8 * 8)
    )
    assert found["hashed"] == TrafficEstimate(
        sharded=0.5 * 2 * 2 * (8 + 8 + 8), replicated=0.5 * (2 * 2 * (8 * 2 + 8) + 2 * 8)
    )


@pytest.mark.parametrize(("micro_batches", "window_cache"), [(2, True), ("auto", False), (1, False)])
def test_traffic_counts_whole_batches_of_ranks(micro_batches: Any, window_cache: bool) -> None:
    # A rank has the samples 1 and 9, of 5 rows.
    batch = replace(SAMPLES, micro_batches=micro_batches)
    found = _crossed(PairsTask(), batch, two_ranks(), window_cache)
    assert found["items"] == TrafficEstimate(sharded=0.5 * 5 * (8 + 8 + 8), replicated=0.5 * (5 * (8 * 2 + 8) + 8 * 8))


def test_traffic_rounds_uneven_micro_batches_up() -> None:
    # 5 samples on 4 parts: two of them in the largest, 1 and 9, of 5 rows.
    found = _crossed(PairsTask(), replace(SAMPLES, batch_samples=5), two_ranks(), window_cache=False)
    assert found["items"].sharded == 0.5 * 2 * 5 * (8 + 8 + 8)


def test_placement_replicates_the_table_that_crosses_less() -> None:
    tables = placed(PairsTask(), SAMPLES, two_ranks(), window_cache=False)
    assert [table.placement for table in tables] == ["sharded", "replicated", "sharded"]
    for topology in (Topology.single(), two_ranks(num_replicas=2)):
        tables = placed(PairsTask(), SAMPLES, topology, window_cache=False)
        assert {table.placement for table in tables} == {"sharded"}


def test_spread_reaches_from_the_first_sample_to_the_last() -> None:
    samples = np.arange(100) + 10
    assert _spread(samples, 5).tolist() == [10, 34, 59, 84, 109]
    assert _spread(samples, 1).tolist() == [10]
    assert _spread(samples, 1000).tolist() == samples.tolist()
    many = _spread(np.arange(3 * _MOST_COUNTED), 2 * _MOST_COUNTED)
    assert (len(many), many[0], many[-1]) == (_MOST_COUNTED, 0, 3 * _MOST_COUNTED - 1)


def test_distinct_rows_are_counted_over_all_features() -> None:
    # Of table `hashed`, which has two rows, the features read 1, 2, 3, 9 and 10.
    assert _distinct(PairsTask(), np.array([1, 9])) == {"items": 5, "few": 3, "hashed": 2}
