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
    """Settings of a training job, without the schedule, so that each job has one correct result."""

    stream: str = "zipf"
    optimizer: str = "adam"
    store: str = "device"
    folder: str = ""
    window_cache: bool = False
    num_micro_batches: int = 3
    num_steps: int = 60
    num_samples: int = 12
    shares: tuple[int, ...] | None = None
    """Number of samples per rank; if None, the numbers are nearly equal."""
    short_steps: Mapping[int, int] = field(default_factory=dict)
    """Steps with fewer samples, and their number of samples."""
    fences: tuple[int, ...] = ()
    """Steps after which the state is compared."""
    restart_after: int | None = None
    """Fence at which the state is saved, discarded and loaded again."""
    admission: Mapping[str, Any] = field(default_factory=dict)
    """Store options of the dynamic table."""
    broken: str | None = None
    """Name of the rule of correctness that the schedule violates."""
    bad_step: int | None = None
    """Step in which the last rank looks up a key that is out of range."""
    stale_steps: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    """Type of tables and dense weights; if tables have 16 bits, dense weights are float32."""
    moment_scale: float = 1.0
    dense_rate: float = 0.01
    ranks: ParallelConfig = field(default_factory=ParallelConfig)
    replica_sync: ReplicaSyncConfig = field(default_factory=ReplicaSyncConfig)


def keys_of(stream: str, step: int, num_samples: int) -> dict[str, np.ndarray]:
    """Return the keys of a global batch. Streams are named by the overlap of their batches."""
    draw = np.random.default_rng([hash_of(stream), step])
    shape = (num_samples, LENGTH)
    if stream == "zipf":
        item = np.minimum(draw.zipf(1.2, shape), NUM_ROWS) - 1
    elif stream == "distance_one":  # half of the keys of a step occur in the next step, none in the step after it
        item = (24 * step + draw.integers(0, 48, shape)) % NUM_ROWS
    elif stream == "distance_two":  # even and odd steps share no keys; two even or two odd steps share nearly all
        item = 100 * (step % 2) + draw.integers(0, 30, shape)
    elif stream == "alternating":  # the halves of a batch have different keys, and swap them in every step
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
        local_samples = np.arange(counts[: topology.rank].sum(), counts[: topology.rank + 1].sum())
        parts = [
            MicroBatch(part, {name: values[part] for name, values in keys.items()}, {}, LENGTH, len(part))
            for part in np.array_split(local_samples, job.num_micro_batches)
        ]
        yield Batch(
            BatchPosition(0, step),
            float(num_samples),
            np.arange(num_samples),
            tuple(parts),
            tokens=np.full(len(local_samples), LENGTH),
        )


class Training:
    """Engine, model and schedule of a rank, with records of its results."""

    def __init__(self, topology: Topology, schedule: str, job: Job) -> None:
        self.topology = topology
        self.schedule = schedule
        self.job = job
        self.losses: list[torch.Tensor] = []
        self.fence_states: dict[int, Any] = {}
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
            **self._state(),
            "losses": torch.stack(self.losses).tolist(),
            "fence_states": self.fence_states,
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
                self.fence_states[number] = self._state()
        self.pipeline.schedule.close()
        self.spans += self.pipeline.tracer.take()

    def _state(self) -> dict[str, Any]:
        dense = {
            name: hashlib.sha256(t.cpu().numpy().tobytes()).hexdigest() for name, t in self.dense.tensors().items()
        }
        return {"tables": [self.engine.digest(name) for name in self.engine.tables], "dense": dense}

    def _uses(self) -> dict[str, list[list[int]]]:
        """Return the keys, use counts and last steps of the rows of dynamic tables."""
        chunks = {
            name: list(self.engine.snapshot(name)) for name, t in self.engine.tables.items() if t.num_rows is None
        }
        columns = ("keys", "uses", "last_step")
        # A shard can be empty and then has no chunk.
        return {
            name: [[n for chunk in table for n in chunk[column].tolist()] for column in columns]
            for name, table in chunks.items()
        }

    def _restart(self) -> None:
        rows = {name: list(self.engine.snapshot(name)) for name in self.engine.tables}
        pending = {name: self.engine.pending_key_state(name) for name in self.engine.tables}
        tensors = {name: t.clone() for name, t in self.dense.tensors().items()}
        self.engine.close()
        self._open()
        self.dense.load(tensors)
        for name in self.engine.tables:
            self.engine.load(name, rows[name])
            self.engine.load_pending_key_state(name, pending[name])


def train(topology: Topology, schedule: str, job: Job) -> dict[str, Any]:
    """Train and return the state after the last step and after every fence."""
    return Training(regrouped(topology, job.ranks), schedule, job).run()


def train_until_rejected(topology: Topology, schedule: str, job: Job, last: int | None = None) -> dict[str, Any]:
    """Train until a batch is rejected, or until step `last`, and return the results of the steps and the error."""
    training = Training(regrouped(topology, job.ranks), schedule, job)
    try:
        training.steps(1, last or job.num_steps)
        error = None
    except UserError as caught:
        error = str(caught)
        training.pipeline.schedule.abort(caught)
    losses = torch.stack(training.losses).tolist()
    training.engine.close()
    return {"error": error, "steps": len(losses), "losses": losses, "fence_states": training.fence_states}


_topologies: dict[ParallelConfig, Topology] = {}


def regrouped(topology: Topology, ranks: ParallelConfig) -> Topology:
    """Return a topology of the same ranks with other options; process groups are created once per process."""
    if topology.world == 1 or ranks == ParallelConfig():
        return topology
    if ranks not in _topologies:
        _topologies[ranks] = Topology.of_process_group(topology.device, ranks, timeout_s=60.0)
    return _topologies[ranks]


def all_vectors(engine: EmbeddingEngine) -> torch.Tensor:
    """Return the vectors of all keys that training can have used, on every rank."""
    items = np.arange(NUM_ROWS)
    vectors = engine.lookup_readonly({"item": items, "user": (np.arange(NUM_ROWS) // 3 - 9) * 2**50})
    return torch.cat([vectors["item"], vectors["user"]])


def compare(topology: Topology, schedules: list[str], job: Job) -> dict[str, bool]:
    """Return whether each schedule is bitwise identical to `serial` without a broken rule."""
    expected = train(topology, "serial", replace(job, broken=None))
    return {name: same(train(topology, name, job), expected) for name in schedules}


def same(result: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(result[name] == expected[name] for name in ("tables", "dense", "losses", "fence_states"))
