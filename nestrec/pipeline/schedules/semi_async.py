"""Semi-asynchronous schedule (TurboGR): row exchanges overlap with other steps. NOT equal to serial (staleness 1).

The embeddings of batch t+1 are read and sent while batch t computes, so rows that both use miss the update of t, and no
other update: the gradients of t-1 are applied before. Dense weights are strictly synchronous.

lane             t-1                        t            t+1                t+4            t+5
data loader                                                                                collate samples
transfer                                                                    plan t+4       load t+5
communication    gradients                  all-reduce   vectors            key exchange
lookup           fetch again, update,                    read rows
                 write back
compute                                     F1 F2 ... update dense

Six batches are in flight. After a fence, no row is stale: the next batch reads rows with all updates, so a run that is
resumed there is identical to an uninterrupted one. A stop between fences keeps the rows that were read and saves them.
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
from nestrec.pipeline.window_cost_model import independent_ms
from nestrec.trace import Tracer

_KEYS_AHEAD = 4
_MAX_STALENESS = 1
"""Maximum number of updates that a row misses."""


@dataclass(frozen=True, slots=True)
class _DeferredUpdate:
    """A batch whose gradients are not sent yet."""

    batch: FetchedBatch[ExchangeWindow]
    rates: LearningRates


@dataclass(frozen=True, slots=True)
class _SentBatch:
    """A batch whose rows are read, and whose embedding exchanges are submitted."""

    batch: FetchedBatch[ExchangeWindow]
    vectors: list[Future[None]]
    """Embedding exchange of each micro-batch."""


class SemiAsyncSchedule(PipelinedSchedule):
    """Schedule that hides lookup and exchanges, at the cost of rows that are one step stale."""

    def __init__(
        self, engine: EmbeddingEngine, compute: ModelCompute, dense: DenseSide, tracer: Tracer, options: PipelineConfig
    ) -> None:
        super().__init__(engine, compute, dense, tracer, options)
        self._keys = KeyPrefetcher(self._runner, _KEYS_AHEAD)
        self._deferred: _DeferredUpdate | None = None
        self._following: _SentBatch | None = None

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        runner = self._runner
        with runner.step(step):
            keys = self._keys.get_or_start(step.number, step.batch)
            read, self._following = self._following, None
            if read is None or read.batch.keys is not keys:
                read = self._read(keys)
            self._send_deferred()
            self._keys.look_ahead(step, feed)
            following = self._keys.get(step.number + 1)
            if following is not None and not step.must_read_updated_rows:
                self._following = self._read(following)
            loss = runner.zero()
            for i, received in enumerate(read.vectors):
                received.result()
                loss = loss + runner.compute(read.batch, i)
            sums = runner.reduce_dense(step, loss)
            self._keys.pop(step.number)
            self._deferred = _DeferredUpdate(read.batch, step.rates)
            if step.is_fence:
                self._send_deferred()
            return runner.apply_dense(step, sums)

    def _read(self, keys: RoutedBatch) -> _SentBatch:
        """Submit the read of a batch's rows as they are in the store now, and their embedding exchanges."""
        before = [self._keys.get(keys.number - 1), None if self._deferred is None else self._deferred.batch.keys]
        earlier = [batch for batch in before if batch is not None]
        batch = self._runner.prefetch_stale(keys, earlier, max_staleness=_MAX_STALENESS)
        return _SentBatch(batch, [self._runner.exchange_vectors_early(batch, i) for i in range(keys.num_micro_batches)])

    def _send_deferred(self) -> None:
        """Submit the gradient exchanges of the previous batch and the update of its rows."""
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            return
        for i in range(deferred.batch.num_micro_batches):
            sent = self._runner.exchange_gradients(deferred.batch, i)
        self._runner.update_in_store(deferred.batch, deferred.rates, sent)


SEMI_ASYNC = ScheduleSpec(
    name="semi_async", build=SemiAsyncSchedule, is_exact=False, splits=False, window_ms=independent_ms
)
