"""What a schedule cannot do is said before it begins."""

import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, StoreConfig, TableConfig
from nestrec.pipeline import TrainingPipeline


def pipeline_of(schedule: str, ttl_steps: int) -> TrainingPipeline:
    store = StoreConfig(eviction="ttl", ttl_steps=ttl_steps)
    engine = EmbeddingEngine([TableConfig(name="t", dim=2, store=store)], Topology.single())
    return TrainingPipeline(torch.nn.Linear(1, 1), engine, schedule=schedule)


@pytest.mark.parametrize("schedule", ["dual_buffer", "nested", "priority"])
def test_rows_that_do_not_outlive_the_next_step_are_refused_where_two_batches_are_in_flight(schedule):
    words = r"tables.t.store.ttl_steps = 0: rows must outlive the next step under the schedule " + schedule
    with pytest.raises(UserError, match=words):
        pipeline_of(schedule, 0)
    pipeline_of(schedule, 1).close()


def test_one_batch_at_a_time_needs_no_row_to_outlive_it():
    pipeline_of("serial", 0).close()
