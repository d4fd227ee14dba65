"""After a fence step no operation is in flight, so that a reader of the tables sees the state after that step."""

import threading

import pytest
import torch

from nestrec.data.batch_loader import Batch
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.embedding import TableConfig
from nestrec.pipeline import LearningRates, TrainingPipeline, TrainingStep
from nestrec.pipeline.lanes import Label


@pytest.mark.parametrize("lane", ["transfer", "communication", "lookup"])
def test_fence_waits_for_every_lane(lane):
    tables = [TableConfig(name="t", dim=2)]
    pipeline = TrainingPipeline(torch.nn.Linear(1, 1), tables, schedule="nested", topology=Topology.single())
    runner = pipeline.schedule._runner
    go = threading.Event()
    done = threading.Event()
    batch = Batch(BatchPosition(), 1.0, torch.arange(1).numpy(), (), tokens=torch.arange(1).numpy())
    timer = threading.Timer(0.2, go.set)
    with runner.step(TrainingStep(number=1, batch=batch, rates=LearningRates(dense=0.1, tables=0.1), is_fence=True)):
        label = Label(name="slow", kind="lookup", step=1)
        getattr(runner.lanes, lane).submit(lambda span: go.wait(30) and done.set(), label)
        timer.start()
    assert done.is_set()
    pipeline.close()
