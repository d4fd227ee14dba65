"""Training jobs that ranks run under any schedule: generated key streams, two tables, a tiny dense model."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from broken_schedules import broken
from torch import nn

from nestrec.base.errors import UserError
from nestrec.data.batch_loader import Batch, MicroBatch
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.ops.embedding.row_gather import gather_rows
from nestrec.pipeline import LearningRates, LookaheadIterator, PipelineConfig, PipelineCore, TrainingStep
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer, OptimizerConfig
from nestrec.pipeline.exchange_window import LossCompute
from nestrec.trace import Span

NUM_ROWS, LENGTH, DIM = 4000, 4, 8


@dataclass(frozen=True)
class Job:
    """What is trained. The schedule is given beside it, so that one job has one right answer."""

    stream: str = "zipf"
    optimizer: str = "adam"
    store: str = "device"
    folder: str = ""
    window_cache: bool = False
    num_micro_batches: int = 3
    num_steps: int = 60
    num_samples: int = 12
    shares: tuple[int, ...] | None = None
    """samples of each rank; none: near equal"""
    short_steps: Mapping[int, int] = field(default_factory=dict)
    """step to its number of samples, where it has fewer"""
    fences: tuple[int, ...] = ()
    """steps after which the tables are looked at"""
    restart_after: int | None = None
    """a fence at which everything is saved, thrown away and loaded again"""
    admission: Mapping[str, Any] = field(default_factory=dict)
    """store options of the dynamic table"""
    broken: str | None = None
    """rule of correctness to break"""
    bad_step: int | None = None
    """step in which the last rank asks for a key that no table has"""
    stale_steps: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    """of tables and dense weights; dense weights beside 16-bit tables are float32"""
    moment_scale: float = 1.0
    dense_rate: float = 0.01
    ranks: ParallelConfig = field(default_factory=ParallelConfig)
    replica_sync: ReplicaSyncConfig = field(default_factory=ReplicaSyncConfig)


def keys_of(stream: str, step: int, num_samples: int) -> dict[str, np.ndarray]:
    """The keys of a global batch. Streams are named by the overlaps that they force."""
    draw = np.random.default_rng([hash_of(stream), step])
    shape = (num_samples, LENGTH)
    if stream == "zipf":
        item = np.minimum(draw.zipf(1.2, shape), NUM_ROWS) - 1
    elif stream == "distance_one":  # half of a step's keys are the next step's, none those of the one after
        item = (24 * step + draw.integers(0, 48, shape)) % NUM_ROWS
    elif stream == "distance_two":  # even and odd steps share nothing, steps of one kind nearly everything
        item = 100 * (step % 2) + draw.integers(0, 30, shape)
    elif stream == "alternating":  # the keys of the first half of the samples are those of the other half a step later
        item = 100 * ((step + (np.arange(num_samples) >= num_samples // 2)) % 2)[:, None] + draw.integers(0, 30, shape)
    elif stream == "all_equal":
        item = np.full(shape, 7)
    else:
        assert stream == "no_overlap"
        item = (48 * step + draw.permutation(48)[: num_samples * LENGTH].reshape(shape)) % NUM_ROWS
    return {"item": item, "user": (item[:, 0] // 3 - 9) * 2**50, "target": item[::-1, 1].copy()}


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mix, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def forward(self, history: torch.Tensor, target: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
        state = torch.tanh(self.mix(history).mean(1) + user)
        return (self.out(state * target).squeeze(1).sin() + 0.1 * (history**2).sum((1, 2))).sum()


def tiny_loss(model: nn.Module):
    def loss(micro_batch, rows, index):
        items = rows["items"]
        return model(
            gather_rows(items, index["item"]),
            gather_rows(items, index["target"]),
            gather_rows(rows["users"], index["user"]),
        )

    return loss


def tables_of(job: Job) -> list[TableConfig]:
    optimizer = RowOptimizerConfig(kind=job.optimizer, moment_scale=job.moment_scale)
    common = {"dim": DIM, "optimizer": optimizer, "dtype": job.dtype}
    store = {"kind": job.store, "folder": job.folder, "cache_rows": 16}
    return [
        TableConfig(
            name="items", num_rows=NUM_ROWS, features=("item", "target"), seed=1, store=StoreConfig(**store), **common
        ),
        TableConfig(name="users", features=("user",), seed=2, store=StoreConfig(**store, **job.admission), **common),
    ]


def batches_of(job: Job, topology: Topology, first_step: int) -> Iterator[Batch]:
    for step in range(first_step, job.num_steps + 1):
        num_samples = job.short_steps.get(step, job.num_samples)
        keys = keys_of(job.stream, step, num_samples)
        if step == job.bad_step:
            keys["item"][-1, 0] = NUM_ROWS
        world = topology.world
        counts = np.minimum(np.array(job.shares or [num_samples] * world), num_samples)
        if job.shares is None or num_samples != job.num_samples:
            counts = np.diff(np.linspace(0, num_samples, world + 1).astype(int))
        mine = np.arange(counts[: topology.rank].sum(), counts[: topology.rank + 1].sum())
        parts = [
            MicroBatch(part, {name: values[part] for name, values in keys.items()}, {}, LENGTH, len(part))
            for part in np.array_split(mine, job.num_micro_batches)
        ]
        yield Batch(
            BatchPosition(0, step),
            float(num_samples),
            np.arange(num_samples),
            tuple(parts),
            tokens=np.full(len(mine), LENGTH),
        )


class Training:
    """A rank's engine, model and schedule, and what is recorded of them."""

    def __init__(self, topology: Topology, schedule: str, job: Job) -> None:
        self.topology = topology
        self.schedule = schedule
        self.job = job
        self.losses: list[torch.Tensor] = []
        self.seen: dict[int, Any] = {}
        self.spans: list[Span] = []
        self._open()

    def run(self) -> dict[str, Any]:
        start = self.topology.log.count
        last = self.job.num_steps
        if self.job.restart_after is not None:
            self.steps(1, self.job.restart_after)
            self._restart()
            self.steps(self.job.restart_after + 1, last)
        else:
            self.steps(1, last)
        issued = self.topology.log.entries()[-(self.topology.log.count - start) :] if self.topology.world > 1 else []
        result = {
            **self._look(),
            "losses": torch.stack(self.losses).tolist(),
            "seen": self.seen,
            "issued": issued,
            "statistics": self.engine.statistics,
            "spans": self.spans,
            "vectors": all_vectors(self.engine),
            "uses": self._uses(),
        }
        self.engine.close()
        return result

    def _open(self) -> None:
        device = self.job.device
        self.engine = EmbeddingEngine(tables_of(self.job), self.topology, device, self.job.replica_sync)
        model = Tiny().to(device, torch.float64 if self.job.dtype == "float64" else torch.float32)
        self.dense = DenseOptimizer(model, OptimizerConfig(), self.topology, torch.device(device))
        stale_steps = self.job.stale_steps if self.schedule == "stale" else 1
        options = PipelineConfig(schedule=self.schedule, window_cache=self.job.window_cache, stale_steps=stale_steps)
        compute = LossCompute(tiny_loss(model), self.engine.device)
        self.pipeline = PipelineCore.build(
            compute,
            self.engine,
            self.dense,
            options,
            spec=broken(self.job.broken, self.schedule) if self.job.broken else None,
        )

    def steps(self, first: int, last: int) -> None:
        feed = LookaheadIterator(batches_of(self.job, self.topology, first))
        for number in range(first, last + 1):
            is_fence = number == last or number in self.job.fences
            rates = LearningRates(dense=self.job.dense_rate / number**0.5, tables=0.1 / number**0.5)
            step = TrainingStep(number=number, batch=next(feed), rates=rates, is_fence=is_fence)
            self.losses.append(self.pipeline.schedule.advance(step, feed).loss)
            if is_fence:
                self.seen[number] = self._look()
        self.pipeline.schedule.close()
        self.spans += self.pipeline.tracer.take()

    def _look(self) -> dict[str, Any]:
        dense = {
            name: hashlib.sha256(t.cpu().numpy().tobytes()).hexdigest() for name, t in self.dense.tensors().items()
        }
        return {"tables": [self.engine.digest(name) for name in self.engine.tables], "dense": dense}

    def _uses(self) -> dict[str, list[list[int]]]:
        """Of dynamic tables: keys, uses and last steps of their rows."""
        chunks = {
            name: list(self.engine.snapshot(name)) for name, t in self.engine.tables.items() if t.num_rows is None
        }
        columns = ("keys", "uses", "last_step")
        # A shard may have no row at all, and so no chunk.
        return {name: [[n for c in found for n in c[of].tolist()] for of in columns] for name, found in chunks.items()}

    def _restart(self) -> None:
        rows = {name: list(self.engine.snapshot(name)) for name in self.engine.tables}
        waiting = {name: self.engine.unsettled(name) for name in self.engine.tables}
        tensors = {name: t.clone() for name, t in self.dense.tensors().items()}
        self.engine.close()
        self._open()
        self.dense.load(tensors)
        for name in self.engine.tables:
            self.engine.load(name, rows[name])
            self.engine.load_unsettled(name, waiting[name])


def train(topology: Topology, schedule: str, job: Job) -> dict[str, Any]:
    """The state after the last step, and after every fence."""
    return Training(regrouped(topology, job.ranks), schedule, job).run()


def train_until_refused(topology: Topology, schedule: str, job: Job, last: int | None = None) -> dict[str, Any]:
    """Steps made, what they left, and why the next one was not; at most `last` steps of those that the feed holds."""
    training = Training(regrouped(topology, job.ranks), schedule, job)
    try:
        training.steps(1, last or job.num_steps)
        error = None
    except UserError as refused:
        error = str(refused)
        training.pipeline.schedule.abandon(refused)
    losses = torch.stack(training.losses).tolist()
    training.engine.close()
    return {"error": error, "steps": len(losses), "losses": losses, "seen": training.seen}


_topologies: dict[ParallelConfig, Topology] = {}


def regrouped(topology: Topology, ranks: ParallelConfig) -> Topology:
    """The same ranks in other replica groups; groups are made once in a process."""
    if topology.world == 1 or ranks == ParallelConfig():
        return topology
    if ranks not in _topologies:
        _topologies[ranks] = Topology.of_process_group(topology.device, ranks, timeout_s=60.0)
    return _topologies[ranks]


def all_vectors(engine: EmbeddingEngine) -> torch.Tensor:
    """Every vector that training can have touched, on every rank."""
    items = np.arange(NUM_ROWS)
    found = engine.lookup_readonly({"item": items, "user": (np.arange(NUM_ROWS) // 3 - 9) * 2**50})
    return torch.cat([found["item"], found["user"]])


def compare(topology: Topology, schedules: list[str], job: Job) -> dict[str, bool]:
    """Whether each schedule gives the bits of serial, which follows all rules."""
    expected = train(topology, "serial", replace(job, broken=None))
    return {name: same(train(topology, name, job), expected) for name in schedules}


def same(result: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(result[name] == expected[name] for name in ("tables", "dense", "losses", "seen"))
