"""What a schedule cannot do is said before it begins."""

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, StoreConfig, TableConfig
from nestrec.embedding.table_config import Table
from nestrec.pipeline import TrainingPipeline


def pipeline_of(schedule: str, ttl_steps: int) -> TrainingPipeline:
    store = StoreConfig(eviction="ttl", ttl_steps=ttl_steps)
    table = TableConfig(name="t", dim=2, store=store)
    return TrainingPipeline(torch.nn.Linear(1, 1), [table], schedule=schedule, topology=Topology.single())


@pytest.mark.parametrize("schedule", ["dual_buffer", "nested", "priority"])
def test_rows_that_do_not_outlive_the_next_step_are_refused_where_two_batches_are_in_flight(schedule):
    words = r"tables.t.store.ttl_steps=0: rows must outlive the next step under the schedule " + schedule
    with pytest.raises(UserError, match=words):
        pipeline_of(schedule, 0)
    pipeline_of(schedule, 1).close()


def test_one_batch_at_a_time_needs_no_row_to_outlive_it():
    pipeline_of("serial", 0).close()


RATES = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1), lambda n: 1.0)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"micro_batches": 0}, "micro_batches=0: must be a whole number from 1"),
        ({"micro_batches": "4"}, "micro_batches = '4'"),
        ({"precision": "fp16"}, "precision = 'fp16'.*\n.*'bf16'"),
        ({"couples_samples": "all"}, "couples_samples = 'all'"),
        ({"device": "tpu"}, "device=tpu: is no device"),
        ({"schedule": 3}, "schedule = '3'"),
        ({"tables": []}, "tables = .*must be a list of tables"),
        ({"tables": Table("t", rows=4, dim=2)}, "must be a list of tables"),
        ({"tables": ["t"]}, "tables=t: is no table"),
        ({"tables": 3}, "tables=3: must be a list of tables"),
        ({"dense_optimizer": "adam"}, r"dense_optimizer = 'adam'.*\n.*model.parameters\(\)"),
        ({"dense_optimizer": {"lr": 0.1}}, "dense_optimizer={'lr': 0.1}: is no optimiser"),
        ({"dense_optimizer": RATES}, r"LambdaLR.*: is no optimiser\n.*stepped in the loop"),
        ({"dense_optimizer": torch.optim.LBFGS(torch.nn.Linear(1, 1).parameters())}, "computes the loss several times"),
        ({"model": lambda vectors, batch: (vectors["t"].sum(), 1)}, "model = .*is no module"),
        ({"model": torch.nn.Linear}, "model=.*: is no module"),
        ({"model": torch.nn.LazyLinear(1)}, "weight of the model=weight: has no values yet"),
        ({"weight": 3}, "weight=3: is no function of a batch"),
        ({"table_learning_rate": "0.1"}, "table_learning_rate=0.1: must be a number from 0"),
        ({"topology": 2}, r"topology=2: is no Topology.*nestrec.distributed.topology.Topology"),
        ({"spec": "nested"}, "spec=nested: is no ScheduleSpec"),
        ({"dense_optimizer": torch.optim.Adam(torch.nn.Linear(1, 1).parameters())}, "2 weights that are not the model"),
    ],
)
def test_an_argument_that_means_nothing_is_refused_and_not_ignored(given, words):
    usual = {"model": torch.nn.Linear(1, 1), "tables": [Table("t", rows=4, dim=2)], "topology": Topology.single()}
    with pytest.raises(UserError, match=words):
        TrainingPipeline(**{**usual, **given})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rows": 4.5}, "tables.t.num_rows = 4.5"),
        ({"dim": "2"}, "tables.t.dim = '2'"),
        ({"dtype": "int8"}, "tables.t.dtype = 'int8'"),
        ({"placement": "all"}, "tables.t.placement = 'all'"),
        ({"store": "ram"}, "tables.t.store.kind = 'ram'"),
        ({"optimizer": "adm"}, r"tables.t.optimizer.kind = 'adm'.*\n.*'adam'"),
        ({"init": "zero"}, r"tables.t.init.kind = 'zero'.*\n.*'zeros'"),
    ],
)
def test_a_table_is_checked_by_name_and_type(given, words):
    with pytest.raises(UserError, match=words):
        _ = Table("t", **{"rows": 4, "dim": 2, **given}).config


def test_numbers_of_numpy_and_one_feature_by_its_name_are_what_they_mean():
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


def test_micro_batches_that_would_mostly_be_empty_are_refused_before_anything_is_computed():
    words = "micro_batches=100000: is more than the samples of the first batch, of which there are 6"
    with pytest.raises(UserError, match=words):
        small_batches(100_000, 6)
    assert small_batches(32, 6) == 1
    assert small_batches(40, 50, 3) == 2  # the last may be small


@pytest.mark.parametrize("store", ["device", "dram"])
def test_a_table_that_no_machine_holds_is_refused_with_its_rows(store):
    words = r"tables.t.rows=10000000000000: needs [\d,]+ GiB on each rank(.|\n)*rows=None"
    with pytest.raises(UserError, match=words):
        EmbeddingEngine([Table("t", rows=10**13, dim=4, store=store).config], Topology.single())
