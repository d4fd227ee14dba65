"""The definition of a step: every stage waits for the one before it. Other schedules are this one rearranged in time.

stage        what happens
route        keys deduplicated, sent to their owners
fetch        owners gather rows and optimiser state into the working set
for each micro-batch in order:
  vectors    owners send rows to those who asked
  compute    forward and backward
  gradients  gradients go back to the owners, who sum them
dense        dense gradients are summed over ranks; dense weights are updated
update       owners run the row optimiser once on the working set
write back   rows and state return to the store
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
    check_can_cut,
)
from nestrec.pipeline.window_cost_model import in_turn_ms
from nestrec.trace import Kind, OpenSpan, Tracer

T = TypeVar("T")


class SerialSchedule:
    """One step at a time, nothing overlapped."""

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
        check_can_cut(self._compute.couples_samples, len(micro_batches))
        if self._window_cache:
            check_can_cache(len(micro_batches))
        with self._tracer.context(lane="compute", step=step.number), self._span("train.step", "step"):
            with self._span("train.embedding.route", "lookup", is_collective=True):
                keys = [micro_batch.keys for micro_batch in micro_batches]
                routed = engine.route(*keys, step=step.number, window_cache=self._window_cache)
            with self._span("train.embedding.fetch", "lookup"):
                working = engine.fetch(routed, step=step.number)
            window = ExchangeWindow(engine, routed, working)
            loss = torch.zeros((), device=engine.device)
            for i, micro_batch in enumerate(micro_batches):
                with self._tracer.context(micro_batch=i):
                    loss = loss + self._micro_batch(micro_batch, i, window, step.batch.weight)
            with self._span("train.dense.reduce", "communication", is_collective=True):
                sums = self._dense.reduce(loss, step.wants_stop)
            with self._span("train.dense.update", "compute"):
                totals = self._dense.apply(sums, step.rates.dense)
            with self._span("train.embedding.update", "compute"):
                engine.update_rows(working, learning_rate=step.rates.tables)
            if routed.averaged:
                with self._span("train.embedding.replicas", "communication", is_collective=True):
                    engine.average_over_holders(working)
            with self._span("train.embedding.write_back", "lookup"):
                engine.write_back(working)
            if step.is_fence:
                engine.settle(step.number)
        return totals

    def issue(self, collective: Callable[[], T]) -> T:
        return collective()

    def close(self) -> None:
        """Nothing runs between steps."""

    def abandon(self, error: BaseException) -> None:
        """Nothing was begun."""

    def _micro_batch(self, micro_batch: MicroBatch, i: int, window: ExchangeWindow, weight: float) -> torch.Tensor:
        with self._span("train.embedding.vectors", "communication", is_collective=True):
            window.receive(i)
        with self._span("train.compute", "compute"):
            on_device = self._compute.transfer(micro_batch)
            rows = window.vectors(i)
            loss, gradients = self._compute.forward_backward(
                on_device, rows, window.routed.micro_batches[i].index, weight
            )
            window.keep(i, gradients)
        with self._span("train.embedding.gradients", "communication", is_collective=True):
            window.send(i)
        if window.routed.micro_batches[i].crossing:
            with self._span("train.embedding.replicas", "communication", is_collective=True):
                self._engine.sum_over_holders(window.routed, window.working, i)
        return loss

    def _span(self, name: str, kind: Kind, is_collective: bool = False) -> OpenSpan:
        return self._tracer.span(name, kind=kind, is_collective=is_collective)


SERIAL = ScheduleSpec(name="serial", build=SerialSchedule, is_exact=True, splits=False, window_ms=in_turn_ms)
