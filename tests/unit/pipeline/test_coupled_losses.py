"""Losses over a whole batch are refused where it is cut into micro-batches, in every schedule (coupled samples)."""

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
from nestrec.tasks.task import compute_of, sequence_info
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from nestrec.training.training_session import open_data
from support.tiny_runs import config_of, make_datasets

IN_BATCH = {"task.negatives.sampler": "in_batch", "training.max_steps": 4, "batch.micro_batches": 1}


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


class BatchContrast(RetrievalTask):
    """A task of a user's own: each token against the targets of all tokens of the batch."""

    couples_samples = "batch"

    def loss(self, batch, rows, index):
        query_TD = self.model(gather_rows(rows["items"], index["history"]), sequence_info(batch))
        target_TD = self.model.item_vectors(gather_rows(rows["items"], index["positive"]))
        own_T = torch.arange(len(query_TD))
        return torch.nn.functional.cross_entropy(query_TD @ target_TD.T, own_T, reduction="sum")


class CutContrast(BatchContrast):
    """The same loss with a false promise."""

    couples_samples = "micro_batch"


def trained(
    data: Path, task_class: type[RetrievalTask], schedule: str, num_micro_batches: int
) -> tuple[list[float], str]:
    """Losses and final rows of four steps."""
    cfg = config_of("hstu", data, {"batch.micro_batches": num_micro_batches})
    topology = Topology.single()
    torch.manual_seed(1)
    task = task_class(cfg.task, open_data(cfg.data, topology), seed=1, dtype="float32")
    engine = EmbeddingEngine(task.tables, topology)
    dense = DenseOptimizer(task.model, cfg.optimizer, topology, topology.device)
    compute = compute_of(task, topology.device, "fp32")
    pipeline = PipelineCore.build(compute, engine, dense, schedule)
    feed = LookaheadIterator(BatchLoader(task.assembler, cfg.batch, seed=1).starting_at(BatchPosition(0, 0)))
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
def test_a_batch_whose_loss_couples_all_its_samples_is_not_cut(tiny_data, schedule):
    with pytest.raises(UserError, match="the loss couples the samples of the whole batch") as refused:
        trained(tiny_data, BatchContrast, schedule, 2)
    assert (refused.value.option, refused.value.value) == ("batch.micro_batches", 2)
    assert "give 1" in refused.value.remedy


def test_uncut_such_a_loss_is_that_of_serial_and_cut_it_would_be_another(tiny_data):
    expected = trained(tiny_data, BatchContrast, "serial", 1)
    for schedule in ("dual_buffer", "frozen_window", "nested"):
        assert trained(tiny_data, BatchContrast, schedule, 1) == expected
    losses, _ = trained(tiny_data, CutContrast, "nested", 2)
    assert losses[0] < 0.95 * expected[0][0]  # half of the negatives are missing


@pytest.mark.parametrize("num_micro_batches", [3, "auto"])
@pytest.mark.parametrize("schedule", ["frozen_window", "nested"])
def test_negatives_of_the_whole_batch_are_refused_before_training(tiny_data, tmp_path, schedule, num_micro_batches):
    given = {
        **IN_BATCH,
        "task.negatives.reach": "batch",
        "pipeline.schedule": schedule,
        "batch.micro_batches": num_micro_batches,
    }
    with pytest.raises(UserError, match=r"task\.negatives\.reach=micro_batch"):
        Trainer(config_of("hstu", tiny_data, given), tmp_path / "run", Topology.single())
    assert not (tmp_path / "run").exists()


def test_negatives_of_the_whole_batch_are_those_of_its_only_micro_batch(tiny_data, tmp_path):
    digests = []
    for reach in ("micro_batch", "batch"):
        given = {**IN_BATCH, "task.negatives.reach": reach, "pipeline.schedule": "nested"}
        Trainer(config_of("hstu", tiny_data, given), tmp_path / reach, Topology.single()).train()
        digests.append(run_digest(tmp_path / reach))
    assert digests[0] == digests[1]


def test_reach_says_nothing_where_no_token_meets_another(tiny_data, tmp_path):
    given = {"task.negatives.reach": "batch", "batch.micro_batches": 2, "pipeline.schedule": "nested"}
    assert Trainer(config_of("hstu", tiny_data, given), tmp_path, Topology.single()).session.task.couples_samples == (
        "micro_batch"
    )
