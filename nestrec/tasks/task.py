"""The task interface: what a learning objective provides to training, and the plugin spec for tasks of other packages.

A `Task` has samples (a collator), embedding tables, a model, a loss, and an evaluation. A `TaskSpec` registers it:

    CHURN = TaskSpec(config=ChurnTaskConfig, make=ChurnTask)

The config is a `@config` class whose field `kind` is the name of the task; `make` returns a `Task`. The other fields
have defaults that suit most tasks.

`resolve_placements` decides for tables with `placement=auto` whether they are replicated or sharded: whichever
transfers fewer bytes between ranks, estimated from the unique rows that a sample of the data looks up.
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
from nestrec.embedding.table_config import TrafficEstimate, estimate_traffic, with_placements
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
    """Results of the model and its baselines on one data split."""

    part: Part
    main_metric: str
    """Name of the metric that selects the best epoch; larger is better."""
    metrics: Mapping[str, Mapping[str, ConfidenceInterval]]
    """Metrics by name of each system (`model`, `popularity`, ...)."""
    details: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Arrays with one value per user or event, for paired comparisons."""
    notes: tuple[str, ...] = ()
    """Remarks that are needed to interpret the results."""
    slices: Mapping[str, SliceResult] = field(default_factory=dict)
    """Results per slice of the users or events, by name."""

    @property
    def score(self) -> float:
        """Mean of the model's main metric; larger is better."""
        return self.metrics["model"][self.main_metric].mean

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON representation, with [mean, low, high] per system and metric."""
        systems = {s: {m: [v.mean, v.low, v.high] for m, v in values.items()} for s, values in self.metrics.items()}
        notes = {"notes": list(self.notes)} if self.notes else {}
        slices = {"slices": {name: result.to_plain() for name, result in self.slices.items()}} if self.slices else {}
        return {"part": self.part, "headline": self.main_metric, "metrics": systems, **notes, **slices}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """Training cost per token, for planning and sample balancing."""

    flops: ForwardFlops
    """Operations of a forward pass, including head and loss."""
    activations: float
    """Number of activation elements per token that are saved for the backward pass."""


class Task(ABC):
    """Base class of learning objectives: embedding tables, samples, model, loss and evaluation."""

    model: nn.Module
    tables: tuple[TableConfig, ...]
    collator: Collator
    num_ids: Mapping[str, int | None] | None = None
    """Number of ids in the dataset for each table; None until `set_tables` is called."""
    pooling: Mapping[str, Pooling] = MappingProxyType({})
    """Pooling of each multi-valued feature (embedding bag)."""
    bags: frozenset[str] = frozenset()
    """Names of the multi-valued features; `set_tables` sets their pooling."""
    couples_samples: Coupling = "micro_batch"
    """Scope in which the loss of a sample depends on other samples; `batch` forbids several micro-batches."""
    reads_stored_rows: bool = False
    """Whether the loss reads rows only through `gather_rows` and `unit_rows`, and so accepts 16-bit rows as stored
    (nestrec.ops.embedding.row_gather); other losses get float32 copies."""
    remedy_if_empty: str
    """Remedy of the error that is raised if the dataset has no training or no held-out samples."""

    @abstractmethod
    def num_held_out(self, part: Part) -> int:
        """Return the number of users, events or rows that a split is measured on."""

    def set_tables(self, chosen: ResolvedTables) -> None:
        """Replace the task's tables by those that the run resolved; called before the model is moved to its device."""
        widths = {table.name: table.dim for table in self.tables}
        for table in chosen.tables:
            if table.dim != widths[table.name]:
                raise UserError(
                    f"the model of this task requires embeddings of dimension {widths[table.name]}",
                    option=f"tables.{table.name}.dim",
                    value=table.dim,
                    remedy="remove the option",
                )
        self.tables = chosen.tables
        self.num_ids = chosen.num_ids

    @abstractmethod
    def loss(
        self, batch: MicroBatch, rows: Mapping[str, torch.Tensor], index: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Compute the sum (not the mean) of the losses of a micro-batch.

        Args:
            batch: The micro-batch on the device.
            rows: For each table, the unique rows of the micro-batch, with the shape (U, D).
            index: For each feature, the indices of its keys into the rows of its table (inverse indices).

        Returns:
            A scalar tensor with a gradient.
        """

    def cost(self) -> TrainingCost | None:
        """Return the training cost per token; None if it is unknown, in which case runs cannot be planned."""
        return None

    def check_batches(self, batch: BatchConfig, world: int) -> None:  # noqa: B027 - most tasks accept any batch
        """Raise a UserError if the task cannot be trained with these batches on `world` ranks."""

    def choose_loss_variant(
        self, batch: BatchConfig, topology: Topology, saved: str | None
    ) -> tuple[str, dict[str, float]] | None:
        """Choose the implementation of the loss if the config leaves it to measurement. Collective.

        Args:
            batch: Batch options of the run.
            topology: Ranks of the run.
            saved: The choice of a resumed run, which is kept; None to measure.

        Returns:
            The choice and the milliseconds of each measured variant; None if there is nothing to choose. Variants may
            differ in rounding only.
        """
        return None

    def set_windows(self, windows: Sequence[TimeWindow], past: EventIndex | None, *, replay_fraction: float) -> None:
        """Let `collator` return the samples of these time windows, in order.

        Args:
            windows: The time windows.
            past: Index of the dataset's events; None builds it.
            replay_fraction: Fraction of a window's samples that are drawn from older events (experience replay).
        """
        raise self.no_windows_error()

    def windows_by_time(self, cfg: WindowsConfig, start_ms: int) -> list[TimeWindow]:
        """Cut the training events from a time onward (Unix milliseconds) into time windows."""
        raise self.no_windows_error()

    def evaluate_window(self, engine: EmbeddingEngine, window: TimeWindow) -> dict[str, ConfidenceInterval]:
        """Compute metrics of a time window with the current model (test-then-train); inserts no rows. Collective."""
        raise self.no_windows_error()

    def set_context_ring(self, ring: RingCommunicator) -> None:
        """Enable context parallelism: micro-batches contain slices of samples, one per rank of a context group.

        Raises:
            UserError: If the task needs complete samples.
        """
        raise context_parallel_error("samples of this task cannot be divided", "parallel.context_parallel", ring.size)

    def no_windows_error(self) -> UserError:
        """Return the error of tasks whose samples have no time."""
        remedy = "set --batch.order shuffled, or implement `set_windows`, `windows_by_time` and `evaluate_window`"
        problem = "samples of this task have no time"
        return UserError(problem, option="batch.order", value="chronological", remedy=remedy)

    @abstractmethod
    def evaluate(self, engine: EmbeddingEngine, part: Part) -> Evaluation:
        """Measure the model on held-out data; inserts no rows. Collective."""


def context_parallel_error(problem: str, field: str, value: Any) -> UserError:
    """Return the error for an option that cannot be combined with context parallelism."""
    return UserError(
        f"{problem}, but with context parallelism each rank has only a slice of every sample",
        option=field,
        value=value,
        remedy="remove parallel.context_parallel, or the option that needs complete samples",
    )


def sequence_info(batch: MicroBatch, ring: RingCommunicator | None = None) -> SequenceInfo:
    """Return the sequence layout of a micro-batch; `ring` connects the ranks that have the other slices, if any."""
    tensors = batch.tensors
    if batch.token_partition is not None:
        assert ring is not None
    return SequenceInfo(
        offsets=tensors["offsets"],
        max_length=batch.max_length,
        position_T=tensors["position"],
        token_key_T=tensors["token_key"],
        time_T=tensors.get("time"),
        query_time_T=tensors.get("query_time"),
        context=None
        if batch.token_partition is None or ring is None
        else ContextParallelGroup(batch.token_partition, ring),
    )


def make_loss_compute(
    task: Task,
    device: torch.device,
    precision: Precision,
    loss: Loss | None = None,
    empty_pass: Callable[[], None] | None = None,
) -> LossCompute:
    """Return the forward and backward computation of a task, as pipeline schedules call it.

    Args:
        task: The task.
        device: Device of the model.
        precision: Precision of matrix products.
        loss: Loss function to use instead of the task's own.
        empty_pass: Called instead of a pass if a micro-batch is empty, to keep collectives aligned.
    """
    return LossCompute(
        loss or task.loss,
        device,
        precision,
        task.couples_samples,
        reads_stored_rows=task.reads_stored_rows,
        empty_pass=empty_pass,
    )


def batches_of_rank(users: NDArray[np.int64], batch_users: int, rank: int, world: int) -> list[NDArray[np.int64]]:
    """Return the batches of users that this rank evaluates; all ranks get the same number, the last may be empty."""
    num_batches = -(-len(users) // batch_users)
    rounds = -(-num_batches // world)
    starts = [(r * world + rank) * batch_users for r in range(rounds)]
    return [users[s : s + batch_users] for s in starts]


def sum_over_ranks(topology: Topology, values: NDArray[Any]) -> NDArray[Any]:
    """Return the elementwise sum over all ranks (all-reduce)."""
    total = torch.from_numpy(values.copy())
    all_reduce_sum(topology.control, total)
    return total.numpy()


_MAX_COUNTED = 4096


def resolve_placements(
    task: Task, batch: BatchConfig, topology: Topology, *, window_cache: bool
) -> tuple[TableConfig, ...]:
    """Return the tables of a task with `auto` placements resolved; the result is equal on all ranks."""
    if not any(table.placement == "auto" for table in task.tables):
        return tuple(task.tables)
    can_replicate = topology.num_shards > 1 and topology.num_replicas == 1 and topology.hosts is None
    return with_placements(task.tables, _estimate_traffic(task, batch, topology, window_cache) if can_replicate else {})


def _estimate_traffic(
    task: Task, batch: BatchConfig, topology: Topology, window_cache: bool
) -> dict[str, TrafficEstimate]:
    tokens = task.collator.tokens
    samples = np.flatnonzero(tokens > 0)
    size = batch.batch_size or max(1, round((batch.batch_tokens or 1) / max(1.0, float(tokens[samples].mean()))))
    parts = batch.num_micro_batches if isinstance(batch.num_micro_batches, int) and not window_cache else 1
    used, requested = (
        _count_unique_rows(task, _spread(samples, n)) for n in (size, -(-size // (topology.world * parts)))
    )
    return {
        table.name: estimate_traffic(
            vector_bytes=table.dim * table.weight_dtype.itemsize,
            gradient_bytes=table.dim * table.state_dtype.itemsize,
            ranks=topology.num_shards,
            used_rows=used[table.name],
            requested_rows=requested[table.name],
            micro_batches=parts,
        )
        for table in task.tables
    }


def _spread(samples: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return `count` evenly spaced samples, at most `_MAX_COUNTED`."""
    index = np.linspace(0, len(samples) - 1, min(count, len(samples), _MAX_COUNTED))
    return samples[index.astype(np.int64)]


def _count_unique_rows(task: Task, samples: NDArray[np.int64]) -> Mapping[str, int]:
    """Return the number of unique rows of each table that these samples look up."""
    keys = task.collator.collate(samples, task.collator.read(samples), 0).keys
    counts = {}
    for table in task.tables:
        unique = np.unique(np.concatenate([np.asarray(keys[name]).reshape(-1) for name in table.feature_names]))
        counts[table.name] = min(len(unique), table.num_rows or len(unique))
    return counts


class TaskConfigBase(Protocol):
    """Fields that the config of every task has."""

    @property
    def kind(self) -> str:
        """Name of the task."""


class TaskFactory(Protocol):
    """Builds a task for a dataset; raises a UserError if the dataset does not fit."""

    def __call__(self, cfg: Any, dataset: Dataset, *, seed: int, dtype: Literal["float32", "float64"]) -> Task:
        """Return the task for a config and a dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """Plugin spec of a task; a feature that needs a field which is None is not available for the task."""

    config: type
    """`@config` class of the task."""
    make: TaskFactory
    """Class of the task, or a function that builds it."""
    store_field: str | None = None
    """Name of the config field, a `StoreConfig`, with the storage tier of the largest table; the planner does not move
    that table if the user sets the field."""
    serving: Any = None
    """The `ServingSpec` of the task's models: one of the built-in names `retrieval`, `ranking` and `rows`, a
    `module:attribute`, or the object itself; None if such models cannot be exported."""
