"""Priority: rows that consecutive batches share go first, the others when there is time (FreeScale). Equal to serial.

lane             batch t-1                      batch t                              batches after it
communication    gradients of exclusive rows    gradients of shared rows, dense      keys t+2, collisions of t with t+1;
                                                sums                                 exclusive vectors t+1; after the
                                                                                     update, shared vectors t+1
lookup           update exclusive rows,                                              fetch t+1, intersect t with t+1
                 write back
compute                                         F1 F2 ... update shared rows,        copy shared rows to buffer t+1
                                                update dense

Shared with t+1 is a row of t whose gradient is awaited; all other gradients are deferred to the next step. Exclusive is
a row of t+1 that t does not use: it may have been used by t-1, so it is read after the deferred gradients of t-1 are in
the store. The one FIFO of the lookup lane keeps that order. Before a fence, and before copies of rows are averaged,
nothing is deferred.
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
class _Deferred:
    """Neighbours of which the older one's exclusive rows are not updated yet."""

    pair: AdjacentBatches
    rates: LearningRates
    shared: Overlap


@dataclass(frozen=True, slots=True)
class _StartedBatch:
    """A batch with the exchanges of its vectors."""

    batch: FetchedBatch[SplitExchangeWindow]
    vectors: list[Future[None]]
    """of each micro-batch"""


class PrioritySchedule(PipelinedSchedule):
    """Lookup hidden, and the exchanges of all rows that the next batch does not use."""

    def __init__(
        self, engine: EmbeddingEngine, compute: ModelCompute, dense: DenseSide, tracer: Tracer, options: PipelineConfig
    ) -> None:
        super().__init__(engine, compute, dense, tracer, options)
        self._stages = CollisionStages(self._machine)
        self._keys = KeyPrefetcher(self._machine, _KEYS_AHEAD)
        self._buffers = RowBuffers(turns=2)
        self._deferred: _Deferred | None = None
        self._begun: _StartedBatch | None = None

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        machine = self._machine
        with machine.step(step):
            begun = self._begin(step)
            now = begun.batch
            pair = self.look_beside(begun.batch, step, feed)
            deferred = None
            loss = machine.zero()
            for i, coming in enumerate(begun.vectors):
                coming.wait()
                loss = loss + machine.compute(now, i)
                if i == 0:  # the keys of the next batch had until here to arrive
                    pair = None if pair is None or pair.newer.keys.is_refused() else pair
                    deferred = None if now.keys.routed.wait().averaged else pair
                going = machine.gradients(now, i) if deferred is None else self._stages.gradients(deferred, i, "shared")
            sums = machine.reduce_dense(step, loss)
            going.wait()
            if deferred is None:
                machine.update_rows(now, step.rates)
            else:
                self._stages.update_shared(deferred, step.rates)
            self._hand_over(now, pair, step, defers=deferred is not None)
            return machine.apply_dense(step, sums)

    def look_beside(
        self, now: FetchedBatch[SplitExchangeWindow], step: TrainingStep, feed: LookaheadIterator
    ) -> AdjacentBatches | None:
        """Submit what may run beside this step; this batch and the next, where the rows of that are being read."""
        self._finish_deferred()
        return self._read_ahead(now, step, feed)

    def _begin(self, step: TrainingStep) -> _StartedBatch:
        """The batch of this step and the exchanges of its vectors, all of them now where none was begun before."""
        keys = self._keys.begun(step.number, step.batch)
        begun, self._begun = self._begun, None
        if begun is None or begun.batch.keys is not keys:
            batch = self._machine.fetch_for(SplitExchangeWindow, keys, self._buffers)
            begun = _StartedBatch(batch, [self._machine.vectors(batch, i) for i in range(batch.num_micro_batches)])
        self._machine.keep(begun.batch)
        return begun

    def _finish_deferred(self) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._stages.finish(deferred.pair, deferred.rates, deferred.shared)

    def _read_ahead(
        self, now: FetchedBatch[SplitExchangeWindow], step: TrainingStep, feed: LookaheadIterator
    ) -> AdjacentBatches | None:
        """Rows of the next batch from the store, and the exclusive ones to those who use them."""
        self._keys.look_ahead(step, feed)
        keys = self._keys.get(step.number + 1)
        if keys is None or step.is_fence:  # a fetch creates rows, so none may pass a fence
            return None
        following = self._machine.find_shared(now, self._machine.fetch_for(SplitExchangeWindow, keys, self._buffers))
        pair = self._stages.find(now, following)
        for i in range(keys.num_micro_batches):
            self._stages.vectors(pair, i, "exclusive")
        return pair

    def _hand_over(
        self, now: FetchedBatch[SplitExchangeWindow], pair: AdjacentBatches | None, step: TrainingStep, *, defers: bool
    ) -> None:
        """After the update: shared rows to the next batch, and on their way to those who use them."""
        self._keys.pop(step.number)
        if pair is None:
            self._machine.write_back(now, None)
            return
        shared = self._machine.copy_shared(now, pair.following)
        newer = pair.newer
        if defers:
            self._deferred = _Deferred(pair, step.rates, shared)
        else:
            self._machine.write_back(now, shared)
        vectors = [self._stages.vectors(pair, i, "shared") for i in range(newer.num_micro_batches)]
        self._begun = _StartedBatch(newer, vectors)


PRIORITY = ScheduleSpec(
    name="priority",
    build=PrioritySchedule,
    is_exact=True,
    splits=False,
    rows_outlive_step=True,
    window_ms=vectors_first_ms,
)
