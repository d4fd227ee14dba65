"""One model on tables that have nothing in common: widths, types, stores, optimisers, ids and ways to pool."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_equal
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.jagged import Jagged
from nestrec.pipeline import PipelineConfig, TrainingPipeline
from nestrec.pipeline.schedule_spec import SCHEDULES

MODEL_DIM = 8
POOLED = {"seen": "sum", "tags": "mean", "words": "weighted"}


@dataclass(frozen=True)
class TablesJob:
    """What is trained; every schedule must end with the same bits."""

    folder: str
    types: str = "mixed"
    micro_batches: int = 3
    window_cache: bool = False
    eviction: str = "lru"
    num_steps: int = 8
    num_samples: int = 12
    placement: str = "sharded"
    """of the tables that may be held whole by every rank"""


class Mixed(nn.Module):
    """A network of its own for each width."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        widths = {"item": 16, "seen": 16, "tags": 4, "words": 6, "user": MODEL_DIM}
        self.project = nn.ModuleDict({f"of_{name}": nn.Linear(width, MODEL_DIM) for name, width in widths.items()})

    def forward(self, vectors: Any, batch: Any) -> tuple[torch.Tensor, int]:
        state = sum(torch.tanh(self.project[f"of_{name}"](vectors[name])) for name in ("seen", "tags", "words", "user"))
        item = self.project["of_item"](vectors["item"])
        return ((state * item).sum(1) - batch["label"]).square().sum(), len(batch["label"])


def tables_of(job: TablesJob) -> list[TableConfig]:
    """`items` is read by two features, one of them a bag; `users` is dynamic, `words` hashed."""
    small, smaller = ("float32", "float32") if job.types == "float32" else ("bfloat16", "float16")
    keeping = {"lru": {"max_rows": 12}, "lfu": {"max_rows": 12}, "ttl": {"ttl_steps": 2}, "none": {}}[job.eviction]
    users = StoreConfig(admission_count=2, eviction=job.eviction, **keeping)
    disk = StoreConfig(kind="disk", folder=job.folder, cache_rows=8)
    return [
        TableConfig(
            name="items",
            dim=16,
            num_rows=60,
            features=("item", "seen"),
            seed=1,
            optimizer=RowOptimizerConfig(kind="adam"),
            placement=job.placement,
        ),
        TableConfig(
            name="tags",
            dim=4,
            num_rows=30,
            seed=2,
            dtype=small,
            store=StoreConfig(kind="dram"),
            placement=job.placement,
        ),
        TableConfig(
            name="words",
            dim=6,
            num_rows=17,
            is_hashed=True,
            seed=3,
            dtype=smaller,
            store=disk,
            optimizer=RowOptimizerConfig(kind="sgd"),
        ),
        TableConfig(
            name="users",
            dim=MODEL_DIM,
            features=("user",),
            seed=4,
            store=users,
            optimizer=RowOptimizerConfig(kind="adagrad"),
        ),
    ]


def batch_of(job: TablesJob, topology: Topology, step: int) -> dict[str, Any]:
    """This rank's samples of a step: the same global batch on any number of ranks, some bags of it empty."""
    draw = np.random.default_rng([7, step])
    count = job.num_samples
    mine = slice(*(np.linspace(0, count, topology.world + 1).astype(int)[topology.rank : topology.rank + 2]))

    def bags(bound: int) -> Jagged:
        keys, lengths = draw.integers(0, bound, (count, 4)), draw.integers(0, 5, count)
        return Jagged.from_rows([torch.from_numpy(k[:n]) for k, n in list(zip(keys, lengths, strict=True))[mine]])

    words = bags(2**40)
    weights = torch.from_numpy(np.random.default_rng([8, step, topology.rank]).random(len(words.values)))
    return {
        "item": draw.integers(0, 60, count)[mine],
        "seen": bags(60),
        "tags": bags(30),
        "words": words,
        "words/weight": Jagged(weights.float(), words.offsets),
        "user": ((draw.zipf(1.3, count) % 40) * 2**50)[mine],
        "label": torch.from_numpy(draw.random(count)[mine]).float(),
    }


def train(
    topology: Topology, schedule: str, job: TablesJob, look: Callable[[EmbeddingEngine], None] = lambda engine: None
) -> tuple[str, list[float]]:
    """Digest of tables and weights, and the losses; a fence after half of the steps. look: at what is left."""
    options = PipelineConfig(schedule=schedule, window_cache=job.window_cache)
    pipeline = TrainingPipeline(
        Mixed(),
        tables_of(job),
        schedule=options,
        micro_batches=job.micro_batches,
        pooled=POOLED,
        topology=topology,
        device="cpu",
    )
    try:
        batches = (batch_of(job, topology, step) for step in range(job.num_steps))
        losses = [float(loss) for loss in pipeline.run(batches, fence_every=max(1, job.num_steps // 2))]
        look(pipeline.engine)
        return pipeline.digest(), losses
    finally:
        pipeline.close()


def train_held_whole(topology: Topology, schedule: str, job: TablesJob) -> tuple[str, list[float]]:
    """The same with replicated tables, whose copies are alike on all ranks."""

    def look(engine: EmbeddingEngine) -> None:
        for name in ("items", "tags"):
            shard = engine.shards[name]
            rows = shard.read(np.arange(shard.table.num_rows))
            assert all(torch.equal(rows, other) for other in all_gather_equal(topology.control, rows)), name

    return train(topology, schedule, replace(job, placement="replicated"), look)


def held_whole_equals(topology: Topology, schedules: list[str], job: TablesJob) -> dict[str, bool]:
    """Whether each schedule with replicated tables ends where it does with sharded ones: an exact one where `serial`
    does."""
    serial = train(topology, "serial", job)
    found = {}
    for schedule in schedules:
        expected = serial if SCHEDULES.find(schedule).is_exact else train(topology, schedule, job)
        found[schedule] = train_held_whole(topology, schedule, job) == expected
    return found


def compare(topology: Topology, schedules: list[str], job: TablesJob) -> dict[str, bool]:
    """Whether each schedule ends where `serial` does."""
    expected = train(topology, "serial", job)
    return {schedule: train(topology, schedule, job) == expected for schedule in schedules}
