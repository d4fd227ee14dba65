"""Losses that couple all samples of a batch are rejected if a batch has several micro-batches, in every schedule."""

from pathlib import Path

import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.data.batch_loader import BatchLoader
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine
from nestrec.ops.embedding.row_gather import gather_rows
from nestrec.pipeline import SCHEDULES, LearningRates, LookaheadIterator, PipelineCore, TrainingStep
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer
from nestrec.tasks.retrieval_task import RetrievalTask
from nestrec.tasks.task import make_loss_compute, sequence_info
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from nestrec.training.training_session import open_dataset
from support.tiny_runs import config_of, make_datasets

IN_BATCH = {"task.negatives.sampler": "in_batch", "training.max_steps": 4, "batch.num_micro_batches": 1}


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


class BatchContrast(RetrievalTask):
    """A custom task: the negatives of a token are the targets of all tokens of the batch."""

    couples_samples = "batch"

    def loss(self, batch, rows, index):
        query_TD = self.model(gather_rows(rows["items"], index["history"]), sequence_info(batch))
        target_TD = self.model.item_vectors(gather_rows(rows["items"], index["positive"]))
        own_T = torch.arange(len(query_TD))
        return torch.nn.functional.cross_entropy(query_TD @ target_TD.T, own_T, reduction="sum")


class MisdeclaredContrast(BatchContrast):
    """A variant that wrongly declares that it couples only the samples of a micro-batch."""

    couples_samples = "micro_batch"


def train_four_steps(
    data: Path, task_class: type[RetrievalTask], schedule: str, num_micro_batches: int
) -> tuple[list[float], str]:
    """Return the losses of four steps and the digest of the final rows."""
    cfg = config_of("hstu", data, {"batch.num_micro_batches": num_micro_batches})
    topology = Topology.single()
    torch.manual_seed(1)
    task = task_class(cfg.task, open_dataset(cfg.data, topology), seed=1, dtype="float32")
    engine = EmbeddingEngine(task.tables, topology)
    dense = DenseOptimizer(task.model, cfg.optimizer, topology, topology.device)
    compute = make_loss_compute(task, topology.device, "fp32")
    pipeline = PipelineCore.build(compute, engine, dense, schedule)
    feed = LookaheadIterator(BatchLoader(task.collator, cfg.batch, seed=1).iterate_from(BatchPosition(0, 0)))
    rates = LearningRates(dense=0.01, tables=0.05)
    losses = []
    try:
        for number in range(1, 5):
            step = TrainingStep(number=number, batch=next(feed), rates=rates, is_fence=number == 4)
            losses.append(float(pipeline.schedule.advance(step, feed).loss))
        return losses, engine.digest("items")
    finally:
        pipeline.close()
        feed.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_coupled_loss_of_batch_requires_one_micro_batch(tiny_data, schedule):
    with pytest.raises(UserError, match="the loss depends on all samples of a batch") as raised:
        train_four_steps(tiny_data, BatchContrast, schedule, 2)
    assert (raised.value.option, raised.value.value) == ("batch.num_micro_batches", 2)
    assert "use 1" in raised.value.remedy


def test_coupled_loss_of_one_micro_batch_equals_serial(tiny_data):
    expected = train_four_steps(tiny_data, BatchContrast, "serial", 1)
    for schedule in ("dual_buffer", "frozen_window", "nested"):
        assert train_four_steps(tiny_data, BatchContrast, schedule, 1) == expected
    losses, _ = train_four_steps(tiny_data, MisdeclaredContrast, "nested", 2)
    assert losses[0] < 0.95 * expected[0][0]  # half of the negatives are missing


@pytest.mark.parametrize("num_micro_batches", [3, "auto"])
@pytest.mark.parametrize("schedule", ["frozen_window", "nested"])
def test_coupled_loss_batch_negatives_are_checked_at_start(tiny_data, tmp_path, schedule, num_micro_batches):
    options = {
        **IN_BATCH,
        "task.negatives.scope": "batch",
        "pipeline.schedule": schedule,
        "batch.num_micro_batches": num_micro_batches,
    }
    with pytest.raises(UserError, match=r"task\.negatives\.scope=micro_batch"):
        Trainer(config_of("hstu", tiny_data, options), tmp_path / "run", Topology.single())
    assert not (tmp_path / "run").exists()


def test_coupled_loss_batch_negatives_equal_micro_batch(tiny_data, tmp_path):
    digests = []
    for scope in ("micro_batch", "batch"):
        options = {**IN_BATCH, "task.negatives.scope": scope, "pipeline.schedule": "nested"}
        Trainer(config_of("hstu", tiny_data, options), tmp_path / scope, Topology.single()).train()
        digests.append(run_digest(tmp_path / scope))
    assert digests[0] == digests[1]


def test_coupled_loss_scope_is_ignored_without_shared_negatives(tiny_data, tmp_path):
    options = {"task.negatives.scope": "batch", "batch.num_micro_batches": 2, "pipeline.schedule": "nested"}
    assert Trainer(config_of("hstu", tiny_data, options), tmp_path, Topology.single()).session.task.couples_samples == (
        "micro_batch"
    )
