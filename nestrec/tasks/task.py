"""What a task brings to training: samples, tables, a model, a loss, and a way to measure it.

Which tables every rank holds whole, of those that leave it open: where that is fewer bytes between ranks.

How many rows a micro-batch of a rank asks for, and a step over all ranks, is counted in samples of the data.

What a task says of itself: the seam through which things to learn of other packages join in.

    CHURN = TaskSpec(config=ChurnTaskConfig, make=ChurnTask)

Its config is a `@config` class whose field `kind` is the name of the task. `make` gives a `Task`: its tables, samples,
model, loss and measurements. Everything else has an answer that serves most tasks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nestrec.base.errors import UserError
from nestrec.data.batch_loader import BatchConfig, Collator, MicroBatch
from nestrec.data.dataset import Dataset
from nestrec.data.samples.split import Part
from nestrec.data.samples.time_windows import EventIndex, TimeWindow, WindowsConfig
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_reduce_sum
from nestrec.embedding import EmbeddingEngine, TableConfig
from nestrec.embedding.table_config import TrafficEstimate, bytes_crossed, with_placements
from nestrec.models import SequenceInfo
from nestrec.models.backbone_spec import ForwardFlops
from nestrec.ops.context_parallel.ring_sum import ContextParallelGroup, RingCommunicator
from nestrec.ops.embedding.row_gather import Pooling
from nestrec.pipeline import Coupling
from nestrec.pipeline.exchange_window import Loss, LossCompute, Precision
from nestrec.tasks.metrics import ConfidenceInterval, SliceResult
from nestrec.tasks.table_overrides import ResolvedTables


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results on one part of the data, of the model and of its baselines."""

    part: Part
    headline: str
    """name of the metric that chooses the best epoch; larger is better"""
    metrics: Mapping[str, Mapping[str, ConfidenceInterval]]
    """name of the system ("model", "popularity", ...) to metric to value"""
    details: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """values of each user or event, for paired comparisons"""
    notes: tuple[str, ...] = ()
    """what a reader of the figures must know"""
    slices: Mapping[str, SliceResult] = field(default_factory=dict)
    """the same on parts of the users or events, by name"""

    @property
    def score(self) -> float:
        """The mean of the headline metric, of the model; larger is better."""
        return self.metrics["model"][self.headline].mean

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it: for each system and metric [mean, low, high]."""
        systems = {s: {m: [v.mean, v.low, v.high] for m, v in values.items()} for s, values in self.metrics.items()}
        notes = {"notes": list(self.notes)} if self.notes else {}
        slices = {"slices": {name: found.to_plain() for name, found in self.slices.items()}} if self.slices else {}
        return {"part": self.part, "headline": self.headline, "metrics": systems, **notes, **slices}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """What a token costs in training, for planning."""

    flops: ForwardFlops
    """of a forward pass, head and loss included"""
    activations: float
    """numbers a token that are kept from forward to backward"""


class Task(ABC):
    """One small subclass for each thing that can be learned: its tables, samples, model, loss and measurements."""

    model: nn.Module
    tables: tuple[TableConfig, ...]
    assembler: Collator
    num_ids: Mapping[str, int | None] | None = None
    """table to how many ids the dataset knows of it; none until the task has taken its tables"""
    pooling: Mapping[str, Pooling] = MappingProxyType({})
    """feature with several ids at a place to how they become one vector"""
    bags: frozenset[str] = frozenset()
    """features that have several ids at a place; `take` says how they become one vector"""
    couples_samples: Coupling = "micro_batch"
    """`batch` where the loss of a sample depends on all others of a rank's batch: it is then never cut into several
    micro-batches"""
    reads_stored_rows: bool = False
    """whether its loss asks `gather_rows` and `unit_rows` alone for rows, and so takes 16-bit ones as they are stored
    (nestrec.ops.embedding.row_gather); others are given float32 copies"""
    remedy_if_empty: str
    """what to do about a dataset that gives no samples, or none to measure by"""

    @abstractmethod
    def num_held_out(self, part: Part) -> int:
        """Users, events or rows that a part is measured on."""

    def take(self, chosen: ResolvedTables) -> None:
        """Have these tables, which a run has made of the task's own; before the model goes to its device."""
        widths = {table.name: table.dim for table in self.tables}
        for table in chosen.tables:
            if table.dim != widths[table.name]:
                raise UserError(
                    f"the model of this task takes vectors of {widths[table.name]} numbers",
                    option=f"tables.{table.name}.dim",
                    value=table.dim,
                    remedy="leave it out",
                )
        self.tables = chosen.tables
        self.num_ids = chosen.num_ids

    @abstractmethod
    def loss(
        self, batch: MicroBatch, rows: Mapping[str, torch.Tensor], index: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Sum of the losses of a micro-batch on the device.

        rows: for each table the (U, D) unique rows of the micro-batch; index: for each feature the places of its keys
        in the rows of its table.
        """

    def cost(self) -> TrainingCost | None:
        """What training costs a token; none where it is not known, and then nothing can be planned."""
        return None

    def check_batches(self, batch: BatchConfig, world: int) -> None:  # noqa: B027 - most tasks learn from any
        """Raise a UserError where batches of this size, on so many ranks, cannot be learned from."""

    def settle(self, batch: BatchConfig, topology: Topology, saved: str | None) -> tuple[str, dict[str, float]] | None:
        """Choose what the config leaves to measurement, as a run began (`saved`) or as is best here. Collective.

        The choice and the milliseconds of what was tried; none where nothing is left open. Results may differ in
        rounding only.
        """
        return None

    def take_windows(self, windows: Sequence[TimeWindow], past: EventIndex | None, *, replay_share: float) -> None:
        """From here on `assembler` gives the samples of these windows, one after the other.

        past: of the dataset's events; none reads it.
        """
        raise self.no_windows()

    def windows_by_time(self, cfg: WindowsConfig, start_ms: int) -> list[TimeWindow]:
        """The training events from a time on, cut into windows."""
        raise self.no_windows()

    def predict(self, engine: EmbeddingEngine, window: TimeWindow) -> dict[str, ConfidenceInterval]:
        """Metrics of the events of a window, as the model is now; inserts no row. Collective."""
        raise self.no_windows()

    def take_context(self, ring: RingCommunicator) -> None:
        """From here on micro-batches may hold parts of samples (`MicroBatch.parts`), of which the ranks of a context
        group compute one each; a UserError where the task needs whole ones."""
        raise whole_samples_only("samples of this task are not divided", "ranks.context", ring.size)

    def no_windows(self) -> UserError:
        """For tasks that do not know the time of their samples."""
        remedy = "take --batch.order shuffled, or let its task answer `take_windows`, `windows_by_time` and `predict`"
        problem = "samples of this task have no time"
        return UserError(problem, option="batch.order", value="chronological", remedy=remedy)

    @abstractmethod
    def evaluate(self, engine: EmbeddingEngine, part: Part) -> Evaluation:
        """Measure the model on held-out data; inserts no row."""


def whole_samples_only(problem: str, field: str, value: Any) -> UserError:
    """For what cannot be computed where ranks hold parts of samples."""
    return UserError(
        f"{problem}, and the ranks of a context group each hold a part of every sample",
        option=field,
        value=value,
        remedy="leave ranks.context out, or change what needs whole samples",
    )


def sequence_info(batch: MicroBatch, ring: RingCommunicator | None = None) -> SequenceInfo:
    """ring: of the ranks that hold the other parts, where the micro-batch holds one."""
    tensors = batch.tensors
    if batch.parts is not None:
        assert ring is not None
    return SequenceInfo(
        offsets=tensors["offsets"],
        max_length=batch.max_length,
        position_T=tensors["position"],
        token_key_T=tensors["token_key"],
        time_T=tensors.get("time"),
        query_time_T=tensors.get("query_time"),
        context=None if batch.parts is None or ring is None else ContextParallelGroup(batch.parts, ring),
    )


def compute_of(
    task: Task,
    device: torch.device,
    precision: Precision,
    loss: Loss | None = None,
    empty_pass: Callable[[], None] | None = None,
) -> LossCompute:
    """Forward and backward of a task's loss, as schedules call them. loss: in the place of the task's own."""
    return LossCompute(
        loss or task.loss,
        device,
        precision,
        task.couples_samples,
        reads_stored_rows=task.reads_stored_rows,
        empty_pass=empty_pass,
    )


def share_of_ranks(users: NDArray[np.int64], batch_users: int, rank: int, world: int) -> list[NDArray[np.int64]]:
    """The batches of users that this rank measures: every rank gets equally many, the last ones maybe empty."""
    num_batches = -(-len(users) // batch_users)
    rounds = -(-num_batches // world)
    starts = [(r * world + rank) * batch_users for r in range(rounds)]
    return [users[s : s + batch_users] for s in starts]


def sum_over_ranks(topology: Topology, values: NDArray[Any]) -> NDArray[Any]:
    """Elementwise sum over all ranks, on every rank."""
    total = torch.from_numpy(values.copy())
    all_reduce_sum(topology.control, total)
    return total.numpy()


_MOST_COUNTED = 4096


def placed(task: Task, batch: BatchConfig, topology: Topology, *, window_cache: bool) -> tuple[TableConfig, ...]:
    """The tables of a task, none of them left open. The same on every rank."""
    if not any(table.placement == "auto" for table in task.tables):
        return tuple(task.tables)
    can_be = topology.num_shards > 1 and topology.num_replicas == 1 and topology.hosts is None
    return with_placements(task.tables, _crossed(task, batch, topology, window_cache) if can_be else {})


def _crossed(task: Task, batch: BatchConfig, topology: Topology, window_cache: bool) -> dict[str, TrafficEstimate]:
    tokens = task.assembler.tokens
    samples = np.flatnonzero(tokens > 0)
    size = batch.batch_samples or max(1, round((batch.batch_tokens or 1) / max(1.0, float(tokens[samples].mean()))))
    parts = batch.micro_batches if isinstance(batch.micro_batches, int) and not window_cache else 1
    used, asked = (_distinct(task, _spread(samples, n)) for n in (size, -(-size // (topology.world * parts))))
    return {
        table.name: bytes_crossed(
            vector_bytes=table.dim * table.weight_dtype.itemsize,
            gradient_bytes=table.dim * table.state_dtype.itemsize,
            ranks=topology.num_shards,
            used=used[table.name],
            asked=asked[table.name],
            micro_batches=parts,
        )
        for table in task.tables
    }


def _spread(samples: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """So many of them, from one end to the other."""
    places = np.linspace(0, len(samples) - 1, min(count, len(samples), _MOST_COUNTED))
    return samples[places.astype(np.int64)]


def _distinct(task: Task, samples: NDArray[np.int64]) -> Mapping[str, int]:
    """Table to the rows that these samples ask for."""
    keys = task.assembler.assemble(samples, task.assembler.read(samples), 0).keys
    found = {}
    for table in task.tables:
        asked = np.unique(np.concatenate([np.asarray(keys[name]).reshape(-1) for name in table.feature_names]))
        found[table.name] = min(len(asked), table.num_rows or len(asked))
    return found


class TaskConfigBase(Protocol):
    """What the config of every task has."""

    @property
    def kind(self) -> str:
        """the task"""


class TaskFactory(Protocol):
    """Puts a task together, on a dataset that fits it; a UserError where it does not."""

    def __call__(self, cfg: Any, dataset: Dataset, *, seed: int, dtype: Literal["float32", "float64"]) -> Task: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """The spec of a task. What it leaves at none it cannot answer, and who needs the answer says so."""

    config: type
    """its `@config` class"""
    make: TaskFactory
    """the class of the task, or a function that makes it"""
    store_field: str | None = None
    """field of the config, a `StoreConfig`, that says where its largest table lives, which plans leave there where it
    is given"""
    serving: Any = None
    """The `ServingSpec` of the task's models: one of the built-in names `retrieval`, `ranking` and `rows`, a
    `module:attribute`, or the object itself; None if such models cannot be exported."""
