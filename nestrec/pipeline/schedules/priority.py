"""Priority schedule (FreeScale): rows that consecutive batches share are exchanged first. Bitwise identical to serial.

lane             batch t-1                      batch t                              following batches
communication    gradients of exclusive rows    gradients of shared rows, dense      keys t+2, collisions of t with t+1;
                                                all-reduce                           exclusive vectors t+1; after the
                                                                                     update, shared vectors t+1
lookup           update exclusive rows,                                              fetch t+1, intersect t with t+1
                 write back
compute                                         F1 F2 ... update shared rows,        copy shared rows to buffer t+1
                                                update dense

A row of t is shared if t+1 uses it, too: the step waits for its gradient. All other gradients are deferred to the next
step. A row of t+1 is exclusive if t does not use it. Because t-1 may have used it, it is read after the deferred
gradients of t-1 are applied in the store; the lookup lane is a FIFO queue, which keeps this order. Nothing is deferred
before a fence, and before replicas of rows are averaged.
"""

from dataclasses import dataclass

from nestrec.embedding import EmbeddingEngine
from nestrec.embedding.routing.batch_overlap import Overlap
from nestrec.embedding.routing.working_set import RowBuffers
from nestrec.pipeline.collision_stages import AdjacentBatches, CollisionStages
from nestrec.pipeline.exchange_window import SplitExchangeWindow
from nestrec.pipeline.lanes import Future
from nestrec.pipeline.schedule_spec import PipelineConfig, ScheduleSpec
from nestrec.pipeline.schedule_types import (
    DenseSide,
    FetchedBatch,
    LearningRates,
    LookaheadIterator,
    ModelCompute,
    StepTotals,
    TrainingStep,
)
from nestrec.pipeline.schedules.dual_buffer import PipelinedSchedule
from nestrec.pipeline.stage_runner import KeyPrefetcher
from nestrec.pipeline.window_cost_model import vectors_first_ms
from nestrec.trace import Tracer

_KEYS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class _DeferredUpdate:
    """Update of the exclusive rows of the older of two adjacent batches, deferred to the next step."""

    pair: AdjacentBatches
    rates: LearningRates
    shared: Overlap


@dataclass(frozen=True, slots=True)
class _StartedBatch:
    """A batch whose embedding exchanges are submitted."""

    batch: FetchedBatch[SplitExchangeWindow]
    vectors: list[Future[None]]
    """Embedding exchange of each micro-batch."""


class PrioritySchedule(PipelinedSchedule):
    """Schedule that hides the lookup, and the exchanges of rows that the next batch does not use."""

    def __init__(
        self, engine: EmbeddingEngine, compute: ModelCompute, dense: DenseSide, tracer: Tracer, options: PipelineConfig
    ) -> None:
        super().__init__(engine, compute, dense, tracer, options)
        self._stages = CollisionStages(self._runner)
        self._keys = KeyPrefetcher(self._runner, _KEYS_AHEAD)
        self._buffers = RowBuffers(turns=2)
        self._deferred: _DeferredUpdate | None = None
        self._started: _StartedBatch | None = None

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        runner = self._runner
        with runner.step(step):
            started = self._get_or_start(step)
            now = started.batch
            pair = self.start_next_batch(started.batch, step, feed)
            deferred = None
            loss = runner.zero()
            for i, received in enumerate(started.vectors):
                received.result()
                loss = loss + runner.compute(now, i)
                if i == 0:  # wait for the keys of the next batch only now, after the first computation
                    pair = None if pair is None or pair.newer.keys.has_batch_error() else pair
                    deferred = None if now.keys.routed.result().averaged else pair
                sent = (
                    runner.exchange_gradients(now, i)
                    if deferred is None
                    else self._stages.exchange_gradients(deferred, i, "shared")
                )
            sums = runner.reduce_dense(step, loss)
            sent.result()
            if deferred is None:
                runner.update_rows(now, step.rates)
            else:
                self._stages.update_shared(deferred, step.rates)
            self._finish_step(now, pair, step, defers=deferred is not None)
            return runner.apply_dense(step, sums)

    def start_next_batch(
        self, now: FetchedBatch[SplitExchangeWindow], step: TrainingStep, feed: LookaheadIterator
    ) -> AdjacentBatches | None:
        """Submit the stages that overlap with this step.

        Returns:
            This batch and the next one; None if the rows of the next batch are not being read.
        """
        self._finish_deferred()
        return self._read_ahead(now, step, feed)

    def _get_or_start(self, step: TrainingStep) -> _StartedBatch:
        """Return the batch of this step; submit its embedding exchanges unless an earlier step has submitted them."""
        keys = self._keys.get_or_start(step.number, step.batch)
        started, self._started = self._started, None
        if started is None or started.batch.keys is not keys:
            batch = self._runner.fetch_with_window(SplitExchangeWindow, keys, self._buffers)
            started = _StartedBatch(
                batch, [self._runner.exchange_vectors(batch, i) for i in range(batch.num_micro_batches)]
            )
        self._runner.keep_alive(started.batch)
        return started

    def _finish_deferred(self) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._stages.finish(deferred.pair, deferred.rates, deferred.shared)

    def _read_ahead(
        self, now: FetchedBatch[SplitExchangeWindow], step: TrainingStep, feed: LookaheadIterator
    ) -> AdjacentBatches | None:
        """Submit the fetch of the next batch's rows and the embedding exchanges of its exclusive rows."""
        self._keys.look_ahead(step, feed)
        keys = self._keys.get(step.number + 1)
        if keys is None or step.is_fence:  # a fetch creates rows, so it must not run before a fence
            return None
        following = self._runner.find_shared(
            now, self._runner.fetch_with_window(SplitExchangeWindow, keys, self._buffers)
        )
        pair = self._stages.find(now, following)
        for i in range(keys.num_micro_batches):
            self._stages.exchange_vectors(pair, i, "exclusive")
        return pair

    def _finish_step(
        self, now: FetchedBatch[SplitExchangeWindow], pair: AdjacentBatches | None, step: TrainingStep, *, defers: bool
    ) -> None:
        """After the update, copy shared rows to the next batch and submit their embedding exchanges."""
        self._keys.pop(step.number)
        if pair is None:
            self._runner.write_back(now, None)
            return
        shared = self._runner.copy_shared(now, pair.following)
        newer = pair.newer
        if defers:
            self._deferred = _DeferredUpdate(pair, step.rates, shared)
        else:
            self._runner.write_back(now, shared)
        vectors = [self._stages.exchange_vectors(pair, i, "shared") for i in range(newer.num_micro_batches)]
        self._started = _StartedBatch(newer, vectors)


PRIORITY = ScheduleSpec(
    name="priority",
    build=PrioritySchedule,
    is_exact=True,
    splits=False,
    rows_outlive_step=True,
    window_ms=vectors_first_ms,
)
