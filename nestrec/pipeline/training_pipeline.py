"""`nestrec.TrainingPipeline`: a model of the user's own on sharded tables, under any schedule, on any number of ranks.

    tables = [nestrec.Table("items", rows=1_000_000, dim=64), nestrec.Table("users", rows=None, dim=64)]
    pipeline = nestrec.TrainingPipeline(model, tables, schedule="nested", micro_batches=4)
    for loss in pipeline.run(batches):
        ...

The parts that do the work are those of a `PipelineCore`, which the trainer, the rehearsal of a plan and the benchmarks
build directly. This module checks arguments, cuts batches of plain mappings and runs the loop over them.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from nestrec.base.cuda import DeviceChoice, chosen_device
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
    check_cut,
    check_fence,
    check_micro_batches,
    check_model,
    check_optimizer,
    check_parts,
    check_weight,
    checked_rate,
    configs_of,
)
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer, OptimizerConfig
from nestrec.pipeline.exchange_window import Coupling, LossCompute, Precision, on_device
from nestrec.pipeline.pipeline_core import PipelineCore
from nestrec.pipeline.schedule_spec import PipelineConfig, ScheduleSpec
from nestrec.pipeline.schedule_types import LearningRates, LookaheadIterator, TrainingStep
from nestrec.pipeline.script_batches import (
    ModuleLoss,
    Samples,
    announced,
    check_features,
    cut,
    fields_of,
    micro_batch_of,
    num_samples_of,
    whole_keys,
)
from nestrec.trace import Tracer

T = TypeVar("T")
_NO_MORE: Any = object()
_GIVEN, _ENDED, _FAILED = range(3)
"""What a rank says of its next batch."""


class TrainingPipeline:
    """Trains a model and its tables, batch after batch."""

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
        """Collective: every rank builds the same one. The weights of the first rank's model are taken by all.

        model: called as `model(vectors, batch)`, it returns the sum of the losses of the samples and their weight.
            `vectors` holds for each feature (*shape of its keys, dim), a `Jagged` where its keys are one; `batch` the
            fields of the batch, on the device. It sees one micro-batch at a time, and never one without samples.
        tables: the sharded tables; a field of a batch that is named as a feature of one holds keys of it.
        dense_optimizer: of the model's own weights: AdamW with these options, or one of torch's over them.
        schedule: by name, or with its options. All that are exact give the same bits as `serial`.
        micro_batches: parts of a rank's batch, computed one after the other before the one update. More than 32 are
            refused where the first batch has fewer samples.
        pooled: features of which the model wants one vector a sample, (samples, dim) in the place of a `Jagged`: the
            sum over its keys, or what is named for it, such as {"tags": "mean", "clicks": "weighted"}; weights lie
            in the field `clicks/weight`, in the shape of the keys. On a CPU the looked-up rows are never in memory.
        weight: weight of a batch or of some of its samples, which must be known before anything is computed: the loss
            of a step is the sum of the losses over all ranks divided by the sum of the weights. By default the number
            of samples. What the model returns must agree with it.
        table_learning_rate: of the tables; none takes that of the dense optimiser.
        couples_samples: `batch` where the loss of a sample depends on all others of a rank's batch, which is then not
            cut.
        device: auto takes a GPU where there is one. topology: the ranks, where they were not started by torchrun.
        context: the ring over which the model's ranks exchange keys and values, where several hold parts of the same
            samples (`ranks.context`). Ranks of a context group are given the same samples in the same order, each its
            part of their tokens, and `weight` is what a rank computes of them.

        spec: a schedule that stands in no seam, in the place of the named one; `schedule` still gives its options.
        """
        check_choices(device=device, precision=precision, couples_samples=couples_samples)
        check_micro_batches(micro_batches)
        check_model(model)
        check_optimizer(dense_optimizer, model)
        check_weight(weight)
        table_learning_rate = checked_rate(table_learning_rate)
        check_parts(
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
        self._weight = weight or _one_a_sample
        self.engine = _build_engine(tables, topology, device, replica_sync)
        self._features = {f: table.name for table in self.engine.tables.values() for f in table.feature_names}
        if dense_optimizer is None:
            dense_optimizer = OptimizerConfig(table_learning_rate=table_learning_rate)
        self.dense = _build_dense(model, dense_optimizer, self.engine)
        self._rates = _rates_of(dense_optimizer, table_learning_rate)
        self._loss = ModuleLoss(model, self._features, self._weight, pooled)
        compute = LossCompute(self._loss, self.engine.device, precision, couples_samples, reads_stored_rows=True)
        self._core = PipelineCore.build(
            compute, self.engine, self.dense, self.options, tracer=tracer, spec=spec, context=context
        )
        self.topology = self._core.topology
        self.tracer = self._core.tracer
        self.schedule = self._core.schedule
        self.number = 0
        """Steps made."""
        self._is_whole = True
        self._ended: str | None = None
        """Why it trains no more."""
        self._told: BaseException | None = None
        """An error in a batch, of which every rank knows at the same place."""

    def run(self, batches: Iterable[Samples], *, fence_every: int | None = None) -> Iterator[torch.Tensor]:
        """Train on all batches, looking ahead as far as the schedule does; the loss of each step, still on the device.

        Every rank gives equally many batches, empty ones where it has no samples. The tables are whole after the last
        batch, and after every `fence_every`-th: between those, later batches may be in flight. So the loop may not be
        left early: shorten the batches instead (`itertools.islice`).
        """
        self.check_whole()
        check_fence(fence_every)
        check_batches(batches)
        feed = LookaheadIterator(self._prepared(iter(batches)))
        while (batch := self._begun(lambda: next(feed, None))) is not None:
            is_last = self._begun(lambda: feed.peek(1)) is None
            is_fence = is_last or (fence_every is not None and (self.number + 1) % fence_every == 0)
            yield self._advance(batch, feed, is_fence=is_fence)

    def step(self, batch: Samples) -> torch.Tensor:
        """Train on one batch, to the end; its loss, still on the device.

        Nothing is known of the batches after it, so none of their work is hidden behind it: `run` does that.
        """
        (loss,) = self.run([batch])
        return loss

    def lookup(self, keys: FeatureKeys) -> dict[str, torch.Tensor]:
        """Feature to (*shape of its keys, dim) float32 vectors, as they are now, on the device; changes nothing.

        keys: of any of the features, as tensors or arrays of whole numbers. Collective: every rank asks, for nothing
        where it wants nothing. A key that has no row yet gives the vector with which its row would begin.
        """
        self.check_whole()
        for name in keys:
            if name not in self._features:
                remedy = did_you_mean(str(name), self._features)
                raise UserError("is no feature of a table", option="keys", value=name, remedy=remedy)
        checked = {name: whole_keys(name, values) for name, values in keys.items()}
        found = self._core.lookup(checked)
        return {name: found[name] for name in keys}

    def inputs(self, batch: Samples) -> tuple[dict[str, torch.Tensor | Jagged], dict[str, Any]]:
        """What the model would be called with for a batch, uncut, with rows as they are now: to measure between steps.

            with torch.no_grad():
                loss_sum, weight = model(*pipeline.inputs(batch))

        (vectors, batch) as the model knows them, on the device; features that the batch does not hold are left out. No
        row is made, counted or evicted. Collective: every rank asks, with an empty batch where it has no samples.
        """
        self.check_whole()
        fields = fields_of(batch, self._features)
        whole = micro_batch_of(fields, self._features, np.arange(num_samples_of(fields)))
        return self._loss.inputs(on_device(whole, self.engine.device), self._core.lookup(whole.keys))

    def digest(self) -> str:
        """The same text for the same tables and dense weights, to the bit, whatever the ranks. Collective."""
        self.check_whole()
        return self._core.digest()

    def issue(self, collective: Callable[[], T]) -> T:
        """Run a collective of the caller's in the order of the schedule's own, and wait for it."""
        return self._core.issue(collective)

    def close(self) -> None:
        """End the threads, and give back the memory and files of the tables."""
        self._ended = self._ended or "it was closed"
        self._core.close()

    def abandon(self, error: BaseException) -> None:
        """Training has failed: end the threads without finishing what was begun."""
        self._ended = self._ended or f"a step failed ({type(error).__name__}: {error})"
        # Where all ranks stop at the same place, what they have begun is finished, and none waits in vain for another.
        self.schedule.abandon(BatchError(str(error)) if error is self._told else error)

    def _advance(self, batch: Batch, feed: LookaheadIterator, *, is_fence: bool) -> torch.Tensor:
        self.number += 1
        self._is_whole = False
        step = TrainingStep(number=self.number, batch=batch, rates=self._rates(self.number), is_fence=is_fence)
        loss = self._begun(lambda: self.schedule.advance(step, feed).loss)
        self._is_whole = is_fence
        return loss

    def _begun(self, work: Callable[[], T]) -> T:
        """What `work` gives; where it fails while batches are in flight, so has the training."""
        try:
            return work()
        except BaseException as error:
            if not self._is_whole:
                self.abandon(error)
            raise

    def check_whole(self) -> None:
        """A UserError while batches are in flight, and after the pipeline has failed or was closed."""
        if self._ended is not None:
            raise UserError(
                f"trains no more: {self._ended}",
                option="pipeline",
                value=f"after step {self.number}",
                remedy="build a new TrainingPipeline",
            )
        if not self._is_whole:
            raise UserError(
                "batches are still in flight",
                option="pipeline.run",
                value=f"after step {self.number}",
                remedy="let the loop over run() end before anything else; to end sooner, shorten its batches",
            )

    def _prepared(self, batches: Iterator[Samples]) -> Iterator[Batch]:
        """Batches as schedules take them: cut, with the weight of the global batch.

        What is wrong with a batch of one rank is told to all: none waits for a batch that does not come.
        """
        for number in itertools.count():
            try:
                given = next(batches, _NO_MORE)
                part = None if given is _NO_MORE else self._cut(number, given)
            except Exception as error:
                self._told = error
                self._gathered(_FAILED, 0.0)
                raise
            weight = self._gathered(_ENDED, 0.0) if part is None else self._gathered(_GIVEN, part.weight)
            if part is None:
                return
            yield replace(part, weight=weight or 1.0)  # no sample counts: a sum of nothing, over any weight

    def _cut(self, number: int, given: Samples) -> Batch:
        """A batch of this rank, with the weight of its own samples."""
        batch = fields_of(given, self._features)
        num_samples = num_samples_of(batch)
        check_features(batch, self._features)
        weight = announced(self._weight(batch))
        if number == self.number == 0:  # a last one may have few samples
            check_cut(self._micro_batches, num_samples * self.topology.world)
        groups = cut(batch, self._features, self._micro_batches, self.options.clustering)
        micro_batches = tuple(micro_batch_of(batch, self._features, samples) for samples in groups)
        samples = np.arange(num_samples)
        tokens = np.ones(num_samples, np.int64)
        return Batch(BatchPosition(0, number), weight, samples, micro_batches, tokens=tokens)

    def _gathered(self, status: int, weight: float) -> float:
        """Sum over ranks of the weights of a batch, where all have one or none has. Collective.

        Over the communicator of the data: this thread runs beside the one that issues for the steps.
        """
        told = torch.tensor([status, weight], dtype=torch.float64)
        everyone = [rank.tolist() for rank in all_gather_equal(self.topology.samples, told)]
        statuses = [int(said) for said, _ in everyone]
        if status != _FAILED and statuses != [status] * len(statuses):
            worst = max(statuses)
            problem = "could not give its batch" if worst == _FAILED else "has fewer batches than others"
            remedy = "give every rank equally many, empty ones where it has no samples"
            remedy = "see the error of that rank" if worst == _FAILED else remedy
            self._told = BatchError(problem, option="rank", value=statuses.index(worst), remedy=remedy)
            raise self._told
        return float(sum(weight for _, weight in everyone))


def _check_context(weight: Callable[[Samples], float] | None, options: PipelineConfig) -> None:
    """Of ranks that hold parts of samples."""
    if weight is None:
        raise UserError(
            "several ranks compute a sample, and would each count it",
            option="weight",
            value=None,
            remedy="give TrainingPipeline weight=..., what this rank computes of a batch: its tokens with a target",
        )
    if options.clustering is not None:
        raise UserError(
            "ranks of a context group have other keys of the same samples, and would cut them differently",
            option="pipeline.clustering",
            value=options.clustering,
            remedy="leave it out",
        )


def _one_a_sample(batch: Samples) -> float:
    return float(num_samples_of(batch))


def _build_engine(
    tables: Sequence[Table | TableConfig],
    topology: Topology | None,
    device: DeviceChoice,
    replica_sync: ReplicaSyncConfig | None,
) -> EmbeddingEngine:
    configs = configs_of(tables)
    topology = topology or Topology.from_environment(chosen_device(device))
    return EmbeddingEngine(configs, topology, topology.device, replica_sync)


def _build_dense(
    model: nn.Module, optimizer: OptimizerConfig | torch.optim.Optimizer, engine: EmbeddingEngine
) -> DenseOptimizer:
    """Move the model to the device, and give all ranks the weights of the first one. Collective."""
    model.to(engine.device)
    dense = DenseOptimizer(model, optimizer, engine.topology, engine.device, engine.row_watch)
    dense.share_first()
    return dense


def _rates_of(
    optimizer: OptimizerConfig | torch.optim.Optimizer, table_rate: float | None
) -> Callable[[int], LearningRates]:
    """Return a function from the number of a step to its learning rates."""

    def rates(step: int) -> LearningRates:
        if isinstance(optimizer, OptimizerConfig):
            found = optimizer.rates(step)
        else:
            rate = float(optimizer.param_groups[0]["lr"])
            found = LearningRates(dense=rate, tables=rate)
        return found if table_rate is None else LearningRates(dense=found.dense, tables=table_rate)

    return rates
