"""Semi-asynchronous (TurboGR): exchanges of rows leave the step; some rows are one step late. NOT equal to serial.

The vectors of batch t+1 are read and sent while batch t computes, so rows in both miss the update of t, and no other:
gradients of t-1 are in the store before that. Dense weights are strictly synchronous.

lane             t-1                        t            t+1                t+4            t+5
the data's own                                                                             samples assembled
transfer                                                                    load t+5, put together what crosses with t+4
communication    gradients                  dense sums   vectors            key exchange
lookup           fetch again, update,                    read rows
                 write back
compute                                     F1 F2 ... update dense

Six batches are in flight. After a fence nothing is late: the next batch reads rows that have seen every update, so a
run that was resumed there is the run that was not interrupted. A stop between fences keeps what was read, and saves it.
"""

from dataclasses import dataclass

from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.exchange_window import ExchangeWindow
from nestrec.pipeline.lanes import Future
from nestrec.pipeline.schedule_spec import PipelineConfig, ScheduleSpec
from nestrec.pipeline.schedule_types import (
    DenseSide,
    FetchedBatch,
    LearningRates,
    LookaheadIterator,
    ModelCompute,
    RoutedBatch,
    StepTotals,
    TrainingStep,
)
from nestrec.pipeline.schedules.dual_buffer import PipelinedSchedule
from nestrec.pipeline.stage_runner import KeyPrefetcher
from nestrec.pipeline.window_cost_model import apart_ms
from nestrec.trace import Tracer

_KEYS_AHEAD = 4
_MOST_LATE = 1
"""Updates that a row may miss."""


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A batch whose gradients have not left yet."""

    batch: FetchedBatch[ExchangeWindow]
    rates: LearningRates


@dataclass(frozen=True, slots=True)
class _SentBatch:
    """A batch whose rows were read, and are on their way to those who use them."""

    batch: FetchedBatch[ExchangeWindow]
    vectors: list[Future[None]]
    """of each micro-batch"""


class SemiAsyncSchedule(PipelinedSchedule):
    """Lookup and exchanges hidden by using some rows one step late."""

    def __init__(
        self, engine: EmbeddingEngine, compute: ModelCompute, dense: DenseSide, tracer: Tracer, options: PipelineConfig
    ) -> None:
        super().__init__(engine, compute, dense, tracer, options)
        self._keys = KeyPrefetcher(self._machine, _KEYS_AHEAD)
        self._deferred: _Deferred | None = None
        self._following: _SentBatch | None = None

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        machine = self._machine
        with machine.step(step):
            keys = self._keys.begun(step.number, step.batch)
            read, self._following = self._following, None
            if read is None or read.batch.keys is not keys:
                read = self._read(keys)
            self._send_deferred()
            self._keys.look_ahead(step, feed)
            following = self._keys.get(step.number + 1)
            if following is not None and not step.reads_end:
                self._following = self._read(following)
            loss = machine.zero()
            for i, coming in enumerate(read.vectors):
                coming.wait()
                loss = loss + machine.compute(read.batch, i)
            sums = machine.reduce_dense(step, loss)
            self._keys.pop(step.number)
            self._deferred = _Deferred(read.batch, step.rates)
            if step.is_fence:
                self._send_deferred()
            return machine.apply_dense(step, sums)

    def _read(self, keys: RoutedBatch) -> _SentBatch:
        """Rows of a batch as the store holds them now, on their way to those who use them."""
        before = [self._keys.get(keys.number - 1), None if self._deferred is None else self._deferred.batch.keys]
        earlier = [batch for batch in before if batch is not None]
        batch = self._machine.read_late(keys, earlier, most_late=_MOST_LATE)
        return _SentBatch(batch, [self._machine.vectors_ahead(batch, i) for i in range(keys.num_micro_batches)])

    def _send_deferred(self) -> None:
        """Gradients of the batch before go, and its rows are updated."""
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            return
        for i in range(deferred.batch.num_micro_batches):
            gone = self._machine.gradients(deferred.batch, i)
        self._machine.update_in_store(deferred.batch, deferred.rates, gone)


SEMI_ASYNC = ScheduleSpec(name="semi_async", build=SemiAsyncSchedule, is_exact=False, splits=False, window_ms=apart_ms)
