"""Jobs with one model on tables of different widths, types, stores, optimizers, ids and pooling modes."""

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
    """Settings of a training job; the result must be bitwise identical for every exact schedule."""

    folder: str
    types: str = "mixed"
    micro_batches: int = 3
    window_cache: bool = False
    eviction_policy: str = "lru"
    num_steps: int = 8
    num_samples: int = 12
    placement: str = "sharded"
    """Placement of the tables that can be replicated."""


class ProjectionModel(nn.Module):
    """A model with a projection per feature, because the tables have different widths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        widths = {"item": 16, "seen": 16, "tags": 4, "words": 6, "user": MODEL_DIM}
        self.project = nn.ModuleDict({name: nn.Linear(width, MODEL_DIM) for name, width in widths.items()})

    def forward(self, vectors: Any, batch: Any) -> tuple[torch.Tensor, int]:
        state = sum(torch.tanh(self.project[name](vectors[name])) for name in ("seen", "tags", "words", "user"))
        item = self.project["item"](vectors["item"])
        return ((state * item).sum(1) - batch["label"]).square().sum(), len(batch["label"])


def tables_of(job: TablesJob) -> list[TableConfig]:
    """Return the tables: `items` is read by two features, one of them a bag; `users` is dynamic, `words` is hashed."""
    tags_dtype, words_dtype = ("float32", "float32") if job.types == "float32" else ("bfloat16", "float16")
    limits = {"lru": {"max_rows": 12}, "lfu": {"max_rows": 12}, "ttl": {"ttl_steps": 2}, "none": {}}
    users = StoreConfig(admission_threshold=2, eviction_policy=job.eviction_policy, **limits[job.eviction_policy])
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
            dtype=tags_dtype,
            store=StoreConfig(kind="dram"),
            placement=job.placement,
        ),
        TableConfig(
            name="words",
            dim=6,
            num_rows=17,
            is_hashed=True,
            seed=3,
            dtype=words_dtype,
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
    """Return this rank's samples of a step; the global batch is equal on any number of ranks, and has empty bags."""
    draw = np.random.default_rng([7, step])
    count = job.num_samples
    local_slice = slice(*(np.linspace(0, count, topology.world + 1).astype(int)[topology.rank : topology.rank + 2]))

    def bags(bound: int) -> Jagged:
        keys, lengths = draw.integers(0, bound, (count, 4)), draw.integers(0, 5, count)
        return Jagged.from_rows(
            [torch.from_numpy(k[:n]) for k, n in list(zip(keys, lengths, strict=True))[local_slice]]
        )

    words = bags(2**40)
    weights = torch.from_numpy(np.random.default_rng([8, step, topology.rank]).random(len(words.values)))
    return {
        "item": draw.integers(0, 60, count)[local_slice],
        "seen": bags(60),
        "tags": bags(30),
        "words": words,
        "words/weight": Jagged(weights.float(), words.offsets),
        "user": ((draw.zipf(1.3, count) % 40) * 2**50)[local_slice],
        "label": torch.from_numpy(draw.random(count)[local_slice]).float(),
    }


def train(
    topology: Topology, schedule: str, job: TablesJob, check: Callable[[EmbeddingEngine], None] = lambda engine: None
) -> tuple[str, list[float]]:
    """Train with a fence after half of the steps.

    Args:
        topology: Ranks.
        schedule: Name of the schedule.
        job: Settings.
        check: Called with the engine after the last step.

    Returns:
        Digest of tables and weights, and the losses.
    """
    options = PipelineConfig(schedule=schedule, window_cache=job.window_cache)
    pipeline = TrainingPipeline(
        ProjectionModel(),
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
        check(pipeline.engine)
        return pipeline.digest(), losses
    finally:
        pipeline.close()


def train_replicated(topology: Topology, schedule: str, job: TablesJob) -> tuple[str, list[float]]:
    """Train with replicated tables, and check that the replicas are equal on all ranks."""

    def check_replicas(engine: EmbeddingEngine) -> None:
        for name in ("items", "tags"):
            shard = engine.shards[name]
            rows = shard.read(np.arange(shard.table.num_rows))
            assert all(torch.equal(rows, other) for other in all_gather_equal(topology.control, rows)), name

    return train(topology, schedule, replace(job, placement="replicated"), check_replicas)


def compare_replicated(topology: Topology, schedules: list[str], job: TablesJob) -> dict[str, bool]:
    """Return whether each schedule has equal results with replicated and with sharded tables.

    Exact schedules are compared with `serial`, the others with themselves.
    """
    serial = train(topology, "serial", job)
    is_equal = {}
    for schedule in schedules:
        expected = serial if SCHEDULES.find(schedule).is_exact else train(topology, schedule, job)
        is_equal[schedule] = train_replicated(topology, schedule, job) == expected
    return is_equal


def compare(topology: Topology, schedules: list[str], job: TablesJob) -> dict[str, bool]:
    """Return whether the result of each schedule is equal to that of `serial`."""
    expected = train(topology, "serial", job)
    return {schedule: train(topology, schedule, job) == expected for schedule in schedules}
