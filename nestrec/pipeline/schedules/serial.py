"""Serial schedule: the reference implementation of a training step, without overlap.

Every stage waits for the one before it. The other schedules run the same stages, rearranged in time.

stage        what happens
route        keys are deduplicated and sent to their owners (all-to-all)
fetch        owners gather rows and optimizer state into the working set
for each micro-batch in order:
  vectors    owners send embeddings to the ranks that requested them (all-to-all)
  compute    forward and backward
  gradients  gradients are sent back to the owners, which sum them (all-to-all)
dense        dense gradients are all-reduced; dense weights are updated
update       owners run the row optimizer once on the working set
write back   rows and optimizer state are written to the store
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from nestrec.data.batch_loader import MicroBatch
from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.exchange_window import ExchangeWindow
from nestrec.pipeline.schedule_spec import PipelineConfig, ScheduleSpec
from nestrec.pipeline.schedule_types import (
    DenseSide,
    LookaheadIterator,
    ModelCompute,
    StepTotals,
    TrainingStep,
    check_can_cache,
    check_can_split,
)
from nestrec.pipeline.window_cost_model import sequential_ms
from nestrec.trace import Kind, OpenSpan, Tracer

T = TypeVar("T")


class SerialSchedule:
    """Schedule that runs one stage at a time, without overlap."""

    def __init__(
        self, engine: EmbeddingEngine, compute: ModelCompute, dense: DenseSide, tracer: Tracer, options: PipelineConfig
    ) -> None:
        self._engine = engine
        self._compute = compute
        self._dense = dense
        self._tracer = tracer
        self._window_cache = options.window_cache

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        """Train on one batch; returns the loss of the global batch, not yet read from the device."""
        engine = self._engine
        micro_batches = step.batch.micro_batches
        check_can_split(self._compute.couples_samples, len(micro_batches))
        if self._window_cache:
            check_can_cache(len(micro_batches))
        with self._tracer.context(lane="compute", step=step.number), self._span("train.step", "step"):
            with self._span("train.embedding.exchange_keys", "lookup", is_collective=True):
                keys = [micro_batch.keys for micro_batch in micro_batches]
                routed = engine.route(*keys, step=step.number, window_cache=self._window_cache)
            with self._span("train.embedding.read_rows", "lookup"):
                working = engine.fetch_rows(routed, step=step.number)
            window = ExchangeWindow(engine, routed, working)
            loss = torch.zeros((), device=engine.device)
            for i, micro_batch in enumerate(micro_batches):
                with self._tracer.context(micro_batch=i):
                    loss = loss + self._micro_batch(micro_batch, i, window, step.batch.weight)
            with self._span("train.dense.all_reduce", "communication", is_collective=True):
                sums = self._dense.reduce(loss, step.stop_requested)
            with self._span("train.dense.update", "compute"):
                totals = self._dense.apply(sums, step.rates.dense)
            with self._span("train.embedding.update", "compute"):
                engine.update_rows(working, learning_rate=step.rates.tables)
            if routed.averaged:
                with self._span("train.embedding.sync_replicas", "communication", is_collective=True):
                    engine.average_replicas(working)
            with self._span("train.embedding.write_back", "lookup"):
                engine.write_back(working)
            if step.is_fence:
                engine.synchronize_replicas(step.number)
        return totals

    def submit_collective(self, collective: Callable[[], T]) -> T:
        return collective()

    def close(self) -> None:
        """Do nothing: this schedule does not have threads."""

    def abort(self, error: BaseException) -> None:
        """Do nothing: no batch is in flight."""

    def _micro_batch(self, micro_batch: MicroBatch, i: int, window: ExchangeWindow, weight: float) -> torch.Tensor:
        with self._span("train.embedding.exchange_vectors", "communication", is_collective=True):
            window.receive(i)
        with self._span("train.forward_backward", "compute"):
            on_device = self._compute.transfer(micro_batch)
            rows = window.vectors(i)
            loss, gradients = self._compute.forward_backward(
                on_device, rows, window.routed.micro_batches[i].index, weight
            )
            window.store_gradients(i, gradients)
        with self._span("train.embedding.exchange_gradients", "communication", is_collective=True):
            window.send(i)
        if window.routed.micro_batches[i].replica_rows:
            with self._span("train.embedding.sync_replicas", "communication", is_collective=True):
                self._engine.all_reduce_replica_gradients(window.routed, window.working, i)
        return loss

    def _span(self, name: str, kind: Kind, is_collective: bool = False) -> OpenSpan:
        return self._tracer.span(name, kind=kind, is_collective=is_collective)


SERIAL = ScheduleSpec(name="serial", build=SerialSchedule, is_exact=True, splits=False, window_ms=sequential_ms)
