"""`nestrec.TrainingPipeline`: trains your own module with sharded embedding tables, on any number of ranks.

    tables = [nestrec.Table("items", rows=1_000_000, dim=64), nestrec.Table("users", rows=None, dim=64)]
    pipeline = nestrec.TrainingPipeline(model, tables, schedule="nested", micro_batches=4)
    for loss in pipeline.run(batches):
        ...

The work is done by a `PipelineCore`, which the trainer, the rehearsal of a plan and the benchmarks build directly. This
module validates arguments, splits batches (plain mappings) into micro-batches and runs the training loop.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from nestrec.base.cuda import DeviceChoice, resolve_device
from nestrec.base.errors import BatchError, UserError, did_you_mean
from nestrec.data.batch_loader import Batch
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_equal
from nestrec.distributed.context_ring import ContextRing
from nestrec.embedding import EmbeddingEngine, TableConfig
from nestrec.embedding.routing.deduplicated_keys import FeatureKeys
from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.embedding.table_config import Table
from nestrec.jagged import Jagged
from nestrec.ops.embedding.row_gather import Pooling
from nestrec.pipeline.argument_checks import (
    check_batches,
    check_choices,
    check_fence,
    check_micro_batches,
    check_micro_batches_have_samples,
    check_model,
    check_optimizer,
    check_optional_types,
    check_weight,
    parse_learning_rate,
    parse_tables,
)
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer, OptimizerConfig
from nestrec.pipeline.exchange_window import Coupling, LossCompute, Precision, on_device
from nestrec.pipeline.pipeline_core import PipelineCore
from nestrec.pipeline.schedule_spec import PipelineConfig, ScheduleSpec
from nestrec.pipeline.schedule_types import LearningRates, LookaheadIterator, TrainingStep
from nestrec.pipeline.script_batches import (
    ModuleLoss,
    Samples,
    build_micro_batch,
    check_features,
    check_integer_keys,
    count_samples,
    declared_weight,
    parse_fields,
    split_samples,
)
from nestrec.trace import Tracer

T = TypeVar("T")
_END_OF_BATCHES: Any = object()
_GIVEN, _ENDED, _FAILED = range(3)
"""Status of a rank's next batch: it has one, it has no more, or it failed to produce one."""


class TrainingPipeline:
    """Trains a module and its embedding tables under a pipeline schedule, on one or many ranks.

    Creating it is collective: every rank builds the same pipeline. The model is moved to the device, and the weights of
    the first rank are broadcast.

    The loss of a step is the sum of the losses over all ranks, divided by the sum of the weights. Gradients accumulate
    over the micro-batches of a batch, followed by one update.

    Args:
        model: Module that is called as `model(vectors, batch)` and returns `(loss_sum, weight)`: the sum of the losses
            of the samples, and their weight. `vectors` maps each feature to its embeddings, (*shape of its keys, dim),
            as a `Jagged` if its keys are a `Jagged`. `batch` contains the fields of the batch, on the device. The
            module sees one micro-batch at a time, never one without samples.
        tables: Embedding tables. A field of a batch whose name is a feature of a table contains keys of that table.
        dense_optimizer: Optimizer of the model's weights: options of AdamW, or a torch optimizer of these weights.
        schedule: Name of the schedule, or the options of the pipeline. All exact schedules give results that are
            bitwise identical to `serial`.
        micro_batches: Number of micro-batches per batch of a rank. More than 32 are rejected if the first batch has
            fewer samples.
        pooled: Features for which the model gets one vector per sample, (samples, dim), instead of a `Jagged`: the sum
            over its keys, or the given pooling, such as `{"tags": "mean", "clicks": "weighted"}`. The weights of
            `clicks` are in the field `clicks/weight`, in the shape of the keys. On a CPU, pooling does not store the
            looked-up rows.
        weight: Function that returns the weight of a batch or of some of its samples before they are computed. It must
            agree with the weight that the model returns. The default is the number of samples.
        table_learning_rate: Learning rate of the tables. None: that of the dense optimizer.
        couples_samples: `batch` if the loss of a sample depends on all other samples of a rank's batch, which is then
            not split.
        precision: Precision of matrix products: fp32, tf32, bf16 or fp8.
        device: Device of the model; `auto` uses a GPU if one is available.
        replica_sync: Options for averaging the replicas of table rows (2D sparse parallelism).
        topology: Ranks and their communicators. By default, those of torchrun's environment variables.
        tracer: Tracer of the steps; a new one by default.
        spec: Schedule that is not registered under a name; its options are still taken from `schedule`.
        context: Ring for context parallelism (`parallel.context_parallel`), over which ranks that hold parts of the
            same samples exchange keys and values. The ranks of a context group must pass the same samples in the same
            order, each with its part of their tokens, and `weight` must return the weight of this part.

    Raises:
        UserError: An argument is not valid.

    Example:
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.score = torch.nn.Linear(64, 1)
        ...
        ...     def forward(self, vectors, batch):
        ...         logits = self.score(vectors["items"]).squeeze(1)
        ...         loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["label"], reduction="sum")
        ...         return loss, len(logits)
        >>> tables = [nestrec.Table("items", rows=1000, dim=64)]
        >>> pipeline = nestrec.TrainingPipeline(Model(), tables)
        >>> batches = [{"items": torch.tensor([3, 8]), "label": torch.tensor([1.0, 0.0])}]
        >>> for loss in pipeline.run(batches):
        ...     print(loss)
        >>> pipeline.close()
    """

    def __init__(
        self,
        model: nn.Module,
        tables: Sequence[Table | TableConfig],
        *,
        dense_optimizer: OptimizerConfig | torch.optim.Optimizer | None = None,
        schedule: str | PipelineConfig = "serial",
        micro_batches: int = 1,
        pooled: Collection[str] | Mapping[str, Pooling] = (),
        weight: Callable[[Samples], float] | None = None,
        table_learning_rate: float | None = None,
        couples_samples: Coupling = "micro_batch",
        precision: Precision = "fp32",
        device: DeviceChoice = "auto",
        replica_sync: ReplicaSyncConfig | None = None,
        topology: Topology | None = None,
        tracer: Tracer | None = None,
        spec: ScheduleSpec | None = None,
        context: ContextRing | None = None,
    ) -> None:
        check_choices(device=device, precision=precision, couples_samples=couples_samples)
        check_micro_batches(micro_batches)
        check_model(model)
        check_optimizer(dense_optimizer, model)
        check_weight(weight)
        table_learning_rate = parse_learning_rate(table_learning_rate)
        check_optional_types(
            topology=(topology, Topology),
            tracer=(tracer, Tracer),
            spec=(spec, ScheduleSpec),
            context=(context, ContextRing),
            replica_sync=(replica_sync, ReplicaSyncConfig),
        )
        self.options = schedule if isinstance(schedule, PipelineConfig) else PipelineConfig(schedule=str(schedule))
        if context is not None and context.size > 1:
            _check_context(weight, self.options)
        self._micro_batches = micro_batches
        self._weight = weight or _one_per_sample
        self.engine = _build_engine(tables, topology, device, replica_sync)
        self._features = {f: table.name for table in self.engine.tables.values() for f in table.feature_names}
        if dense_optimizer is None:
            dense_optimizer = OptimizerConfig(table_learning_rate=table_learning_rate)
        self.dense = _build_dense(model, dense_optimizer, self.engine)
        self._rates = _build_rates(dense_optimizer, table_learning_rate)
        self._loss = ModuleLoss(model, self._features, self._weight, pooled)
        compute = LossCompute(self._loss, self.engine.device, precision, couples_samples, reads_stored_rows=True)
        self._core = PipelineCore.build(
            compute, self.engine, self.dense, self.options, tracer=tracer, spec=spec, context=context
        )
        self.topology = self._core.topology
        """Ranks: `topology.rank` is the index of this process, `topology.world` the number of ranks."""
        self.tracer = self._core.tracer
        self.schedule = self._core.schedule
        self.number = 0
        """Number of completed steps."""
        self._is_idle = True
        self._end_reason: str | None = None
        """Reason why training has ended; None while it can continue."""
        self._shared_error: BaseException | None = None
        """Error in a batch that all ranks raise at the same step."""

    def run(self, batches: Iterable[Samples], *, fence_every: int | None = None) -> Iterator[torch.Tensor]:
        """Train on all batches, with the lookahead of the schedule.

        Every rank must pass the same number of batches; a batch can be empty. Do not leave the loop early, because
        later batches can be in flight: shorten `batches` instead (`itertools.islice`).

        Args:
            batches: Batches of this rank: mappings of field names to values.
            fence_every: Number of steps between fences. The tables are complete after a fence, and after the last
                batch. None: no other fences.

        Yields:
            The loss of each step, on the device.
        """
        self.check_idle()
        check_fence(fence_every)
        check_batches(batches)
        feed = LookaheadIterator(self._prepare(iter(batches)))
        while (batch := self._aborting_on_error(lambda: next(feed, None))) is not None:
            is_last = self._aborting_on_error(lambda: feed.peek(1)) is None
            is_fence = is_last or (fence_every is not None and (self.number + 1) % fence_every == 0)
            yield self._advance(batch, feed, is_fence=is_fence)

    def step(self, batch: Samples) -> torch.Tensor:
        """Train on one batch and return its loss, on the device.

        The following batches are unknown, so none of their work overlaps with this step; use `run` for that.
        """
        (loss,) = self.run([batch])
        return loss

    def lookup(self, keys: FeatureKeys) -> dict[str, torch.Tensor]:
        """Return the current embeddings of keys, without changing the tables.

        Collective: every rank must call it, with an empty mapping if it does not need any.

        Args:
            keys: Integer tensors or arrays of keys, by feature.

        Returns:
            (*shape of the keys, dim) float32 embeddings on the device, by feature. For a key without a row, the initial
            embedding that its row would get.
        """
        self.check_idle()
        for name in keys:
            if name not in self._features:
                remedy = did_you_mean(str(name), self._features)
                raise UserError("unknown feature", option="keys", value=name, remedy=remedy)
        integer_keys = {name: check_integer_keys(name, values) for name, values in keys.items()}
        embeddings = self._core.lookup(integer_keys)
        return {name: embeddings[name] for name in keys}

    def inputs(self, batch: Samples) -> tuple[dict[str, torch.Tensor | Jagged], dict[str, Any]]:
        """Return the arguments of the model for a full batch, with current embeddings, to evaluate between steps.

            with torch.no_grad():
                loss_sum, weight = model(*pipeline.inputs(batch))

        Rows are not created, counted or evicted. Collective: every rank must call it, with an empty batch if it does
        not have samples.

        Returns:
            `(vectors, batch)` as the model gets them, on the device, without features that are not in the batch.
        """
        self.check_idle()
        fields = parse_fields(batch, self._features)
        full = build_micro_batch(fields, self._features, np.arange(count_samples(fields)))
        return self._loss.inputs(on_device(full, self.engine.device), self._core.lookup(full.keys))

    def digest(self) -> str:
        """Return a hash of the tables and dense weights that does not depend on the number of ranks. Collective."""
        self.check_idle()
        return self._core.digest()

    def submit_collective(self, collective: Callable[[], T]) -> T:
        """Run a collective of the caller, ordered with those of the schedule, and wait for it.

        All ranks then run all collectives in the same order.
        """
        return self._core.submit_collective(collective)

    def close(self) -> None:
        """End the threads, and release the memory and files of the tables."""
        self._end_reason = self._end_reason or "it was closed"
        self._core.close()

    def abort(self, error: BaseException) -> None:
        """End the threads after a failure, without finishing the batches in flight."""
        self._end_reason = self._end_reason or f"a step failed ({type(error).__name__}: {error})"
        # If all ranks fail at the same step, lanes can finish their tasks: no rank waits for a missing collective.
        self.schedule.abort(BatchError(str(error)) if error is self._shared_error else error)

    def _advance(self, batch: Batch, feed: LookaheadIterator, *, is_fence: bool) -> torch.Tensor:
        self.number += 1
        self._is_idle = False
        step = TrainingStep(number=self.number, batch=batch, rates=self._rates(self.number), is_fence=is_fence)
        loss = self._aborting_on_error(lambda: self.schedule.advance(step, feed).loss)
        self._is_idle = is_fence
        return loss

    def _aborting_on_error(self, work: Callable[[], T]) -> T:
        """Return the result of `work`; if it fails while batches are in flight, abort the training."""
        try:
            return work()
        except BaseException as error:
            if not self._is_idle:
                self.abort(error)
            raise

    def check_idle(self) -> None:
        """Raise a UserError while batches are in flight, and after the pipeline has failed or was closed."""
        if self._end_reason is not None:
            raise UserError(
                f"training has ended: {self._end_reason}",
                option="pipeline",
                value=f"after step {self.number}",
                remedy="build a new TrainingPipeline",
            )
        if not self._is_idle:
            raise UserError(
                "batches are still in flight",
                option="pipeline.run",
                value=f"after step {self.number}",
                remedy="finish the loop over run() first; to end it sooner, pass fewer batches",
            )

    def _prepare(self, batches: Iterator[Samples]) -> Iterator[Batch]:
        """Yield the batches split into micro-batches, with the weight of the global batch.

        An error in a batch of one rank is sent to all ranks, so that none waits for that batch.
        """
        for number in itertools.count():
            try:
                samples = next(batches, _END_OF_BATCHES)
                batch = None if samples is _END_OF_BATCHES else self._split(number, samples)
            except Exception as error:
                self._shared_error = error
                self._global_weight(_FAILED, 0.0)
                raise
            weight = self._global_weight(_ENDED, 0.0) if batch is None else self._global_weight(_GIVEN, batch.weight)
            if batch is None:
                return
            yield replace(batch, weight=weight or 1.0)  # without samples, the sum is 0 and any divisor is correct

    def _split(self, number: int, fields: Samples) -> Batch:
        """Return the batch of this rank, split into micro-batches, with the weight of this rank's samples."""
        batch = parse_fields(fields, self._features)
        num_samples = count_samples(batch)
        check_features(batch, self._features)
        weight = declared_weight(self._weight(batch))
        if number == self.number == 0:  # only the first batch, because the last batch can be smaller
            check_micro_batches_have_samples(self._micro_batches, num_samples * self.topology.world)
        groups = split_samples(batch, self._features, self._micro_batches, self.options.clustering)
        micro_batches = tuple(build_micro_batch(batch, self._features, samples) for samples in groups)
        samples = np.arange(num_samples)
        tokens = np.ones(num_samples, np.int64)
        return Batch(BatchPosition(0, number), weight, samples, micro_batches, tokens=tokens)

    def _global_weight(self, status: int, weight: float) -> float:
        """Return the sum of batch weights over ranks, and check that all ranks have a batch or none has. Collective.

        It uses the communicator for samples, because it can run concurrently with the collectives of steps.
        """
        local = torch.tensor([status, weight], dtype=torch.float64)
        ranks = [rank.tolist() for rank in all_gather_equal(self.topology.samples, local)]
        statuses = [int(rank_status) for rank_status, _ in ranks]
        if status != _FAILED and statuses != [status] * len(statuses):
            worst = max(statuses)
            problem = (
                "this rank failed to produce a batch" if worst == _FAILED else "this rank has fewer batches than others"
            )
            remedy = "pass the same number of batches on every rank; a batch can be empty"
            remedy = "see the error of that rank" if worst == _FAILED else remedy
            self._shared_error = BatchError(problem, option="rank", value=statuses.index(worst), remedy=remedy)
            raise self._shared_error
        return float(sum(weight for _, weight in ranks))


def _check_context(weight: Callable[[Samples], float] | None, options: PipelineConfig) -> None:
    """Raise a UserError for options that do not support context parallelism."""
    if weight is None:
        raise UserError(
            "context parallelism requires a weight function, because several ranks compute parts of one sample",
            option="weight",
            value=None,
            remedy="pass weight=..., which returns the weight of this rank's part, such as its tokens with a target",
        )
    if options.clustering is not None:
        raise UserError(
            "clustering does not support context parallelism: ranks have different keys of the same samples",
            option="pipeline.clustering",
            value=options.clustering,
            remedy="remove the option",
        )


def _one_per_sample(batch: Samples) -> float:
    return float(count_samples(batch))


def _build_engine(
    tables: Sequence[Table | TableConfig],
    topology: Topology | None,
    device: DeviceChoice,
    replica_sync: ReplicaSyncConfig | None,
) -> EmbeddingEngine:
    configs = parse_tables(tables)
    topology = topology or Topology.from_environment(resolve_device(device))
    return EmbeddingEngine(configs, topology, topology.device, replica_sync)


def _build_dense(
    model: nn.Module, optimizer: OptimizerConfig | torch.optim.Optimizer, engine: EmbeddingEngine
) -> DenseOptimizer:
    """Move the model to the device, and broadcast the weights of the first rank. Collective."""
    model.to(engine.device)
    dense = DenseOptimizer(model, optimizer, engine.topology, engine.device, engine.finite_row_check)
    dense.broadcast_weights()
    return dense


def _build_rates(
    optimizer: OptimizerConfig | torch.optim.Optimizer, table_rate: float | None
) -> Callable[[int], LearningRates]:
    """Return a function from the number of a step to its learning rates."""

    def rates(step: int) -> LearningRates:
        if isinstance(optimizer, OptimizerConfig):
            result = optimizer.rates(step)
        else:
            rate = float(optimizer.param_groups[0]["lr"])
            result = LearningRates(dense=rate, tables=rate)
        return result if table_rate is None else LearningRates(dense=result.dense, tables=table_rate)

    return rates
