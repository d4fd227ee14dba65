"""Every schedule reports rows that are no longer finite, even if they do not affect the loss."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from nestrec.data.batch_loader import Batch, MicroBatch
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, TableConfig
from nestrec.pipeline import SCHEDULES, LearningRates, LookaheadIterator, PipelineCore, TrainingStep
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer, OptimizerConfig

NUM_STEPS, BAD_STEP, BAD_KEY = 7, 3, 31


class Gradients:
    """A constant loss with a huge gradient for one row."""

    couples_samples = "micro_batch"

    def transfer(self, part: MicroBatch) -> MicroBatch:
        return part

    def forward_backward(
        self, part: MicroBatch, rows: Mapping[str, torch.Tensor], index: Mapping[str, torch.Tensor], weight: float
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        found = {name: torch.ones_like(vectors) for name, vectors in rows.items()}
        if BAD_KEY in part.keys["bad"]:
            found["bad"][index["bad"][part.keys["bad"] == BAD_KEY].long()] = 3e38
        return torch.zeros(()), found


def batch_of(number: int) -> Batch:
    """Return a batch of two micro-batches with unique keys and a shared one; only batch BAD_STEP has BAD_KEY."""
    bad = [BAD_KEY] if number == BAD_STEP else []
    keys = [{"good": np.array([0, 2 * number + part]), "bad": np.array([*bad, 1, 40 + number])} for part in range(2)]
    parts = [MicroBatch(np.array([part]), keys[part], {}, max_length=1, num_tokens=1) for part in range(2)]
    return Batch(BatchPosition(0, number), 1.0, np.array([0, 1]), tuple(parts))


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_finite_row_check_reports_within_next_steps(schedule, optimizer):
    tables = [
        TableConfig(name=name, dim=4, num_rows=60, optimizer=RowOptimizerConfig(kind=optimizer))
        for name in ("good", "bad")
    ]
    engine = EmbeddingEngine(tables, Topology.single())
    dense = DenseOptimizer(
        torch.nn.Linear(1, 1), OptimizerConfig(), Topology.single(), torch.device("cpu"), engine.finite_row_check
    )
    pipeline = PipelineCore.build(Gradients(), engine, dense, schedule)
    feed = LookaheadIterator(batch_of(number) for number in range(1, NUM_STEPS + 1))
    is_finite = []
    for number in range(1, NUM_STEPS + 1):
        step = TrainingStep(
            number=number, batch=next(feed), rates=LearningRates(dense=0.1, tables=10.0), is_fence=number == NUM_STEPS
        )
        is_finite.append(torch.isfinite(pipeline.schedule.advance(step, feed).rows).tolist())
    assert is_finite[: BAD_STEP - 1] == [[True, True]] * (BAD_STEP - 1)
    assert is_finite[BAD_STEP + 1 :] == [[True, False]] * (NUM_STEPS - BAD_STEP - 1), (
        "the table must be reported at most one step late"
    )
    engine.clear("bad")
    assert torch.isfinite(engine.finite_row_check.non_finite_markers()).all(), "clearing a table resets its check"
    pipeline.close()
