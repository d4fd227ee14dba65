"""Unsupported options and arguments of a pipeline are rejected when it is created."""

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, StoreConfig, TableConfig
from nestrec.embedding.table_config import Table
from nestrec.pipeline import TrainingPipeline


def pipeline_of(schedule: str, ttl_steps: int) -> TrainingPipeline:
    store = StoreConfig(eviction_policy="ttl", ttl_steps=ttl_steps)
    table = TableConfig(name="t", dim=2, store=store)
    return TrainingPipeline(torch.nn.Linear(1, 1), [table], schedule=schedule, topology=Topology.single())


@pytest.mark.parametrize("schedule", ["dual_buffer", "nested", "priority"])
def test_pipeline_rejects_ttl_shorter_than_pipeline_depth(schedule):
    words = r"tables.t.store.ttl_steps=0: the schedule " + schedule + " requires that rows outlive"
    with pytest.raises(UserError, match=words):
        pipeline_of(schedule, 0)
    pipeline_of(schedule, 1).close()


def test_pipeline_serial_accepts_shortest_ttl():
    pipeline_of("serial", 0).close()


RATES = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1), lambda n: 1.0)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"micro_batches": 0}, "micro_batches=0: must be a positive integer"),
        ({"micro_batches": "4"}, "micro_batches=4:"),
        ({"precision": "fp16"}, "precision=fp16: .*'bf16'"),
        ({"couples_samples": "all"}, "couples_samples=all:"),
        ({"device": "tpu"}, "device=tpu: not a torch device"),
        ({"schedule": 3}, "schedule=3:"),
        ({"tables": []}, "tables=.*must be a list of tables"),
        ({"tables": Table("t", rows=4, dim=2)}, "must be a list of tables"),
        ({"tables": ["t"]}, "tables=t: must be a table"),
        ({"tables": 3}, "tables=3: must be a list of tables"),
        ({"dense_optimizer": "adam"}, r"dense_optimizer=adam: .*model.parameters\(\)"),
        ({"dense_optimizer": {"lr": 0.1}}, "dense_optimizer={'lr': 0.1}: must be an OptimizerConfig"),
        ({"dense_optimizer": RATES}, r"LambdaLR.*: must be an OptimizerConfig.*in the training loop"),
        (
            {"dense_optimizer": torch.optim.LBFGS(torch.nn.Linear(1, 1).parameters())},
            "evaluates the loss several times",
        ),
        ({"model": lambda vectors, batch: (vectors["t"].sum(), 1)}, "model=.*: must be an nn.Module"),
        ({"model": torch.nn.Linear}, "model=.*: must be an nn.Module"),
        ({"model": torch.nn.LazyLinear(1)}, "weight of the model=weight: the weight is not initialized"),
        ({"weight": 3}, "weight=3: must be a function of a batch"),
        ({"table_learning_rate": "0.1"}, "table_learning_rate=0.1: must be a number of 0 or more"),
        ({"topology": 2}, r"topology=2: must be of class Topology.*nestrec.distributed.topology.Topology"),
        ({"spec": "nested"}, "spec=nested: must be of class ScheduleSpec"),
        (
            {"dense_optimizer": torch.optim.Adam(torch.nn.Linear(1, 1).parameters())},
            "2 of its weights are not weights of the model",
        ),
    ],
)
def test_pipeline_rejects_invalid_arguments(given, words):
    usual = {"model": torch.nn.Linear(1, 1), "tables": [Table("t", rows=4, dim=2)], "topology": Topology.single()}
    with pytest.raises(UserError, match=words):
        TrainingPipeline(**{**usual, **given})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rows": 4.5}, "tables.t.num_rows=4.5:"),
        ({"dim": "2"}, "tables.t.dim=2:"),
        ({"dtype": "int8"}, "tables.t.dtype=int8:"),
        ({"placement": "all"}, "tables.t.placement=all:"),
        ({"store": "ram"}, "tables.t.store.kind=ram:"),
        ({"optimizer": "adm"}, r"tables.t.optimizer.kind=adm: .*'adam'"),
        ({"init": "zero"}, r"tables.t.init.kind=zero: .*'zeros'"),
    ],
)
def test_pipeline_checks_table_names_and_types(given, words):
    with pytest.raises(UserError, match=words):
        _ = Table("t", **{"rows": 4, "dim": 2, **given}).config


def test_pipeline_accepts_numpy_numbers_and_single_feature():
    table = Table("t", rows=np.int64(4), dim=np.int32(2), features="history", init="zeros").config
    assert table.init.kind == "zeros"
    assert (table.num_rows, table.dim, table.features) == (4, 2, ("history",))
    assert type(table.num_rows) is int


class Total(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, vectors, batch):
        return (self.scale * vectors["t"]).sum(), len(batch["t"])


def small_batches(micro_batches: int, *sizes: int) -> int:
    model = Total()
    adam = torch.optim.Adam(model.parameters())
    pipeline = TrainingPipeline(model, [Table("t", rows=99, dim=2)], dense_optimizer=adam, micro_batches=micro_batches)
    try:
        return len(list(pipeline.run({"t": np.arange(size)} for size in sizes)))
    finally:
        pipeline.close()


def test_pipeline_rejects_mostly_empty_micro_batches():
    words = "micro_batches=100000: exceeds the number of samples of the first batch, which is 6"
    with pytest.raises(UserError, match=words):
        small_batches(100_000, 6)
    assert small_batches(32, 6) == 1
    assert small_batches(40, 50, 3) == 2  # the last may be small


@pytest.mark.parametrize("store", ["device", "dram"])
def test_pipeline_rejects_table_larger_than_memory(store):
    words = r"tables.t.num_rows=10000000000000: requires [\d,]+ GiB per rank(.|\n)*rows=None"
    with pytest.raises(UserError, match=words):
        EmbeddingEngine([Table("t", rows=10**13, dim=4, store=store).config], Topology.single())
