"""Stale schedule: rows are prefetched and not refreshed. NOT equal to serial: a baseline for the cost of staleness.

The embeddings of batch t miss the updates of the last `stale_steps` batches. Gradients are not lost: they are applied
to the rows that the store has at the time of the update, in the order of batches.

lane             batch t                                    following batches
communication    E1 G1 E2 G2 ... dense all-reduce           key exchange t + stale_steps + 1
lookup           fetch again, update, write back            read rows of t + stale_steps
compute          F1 F2 ... update dense
"""

from nestrec.data.batch_loader import Batch
from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.exchange_window import ExchangeWindow
from nestrec.pipeline.schedule_spec import PipelineConfig, ScheduleSpec
from nestrec.pipeline.schedule_types import (
    DenseSide,
    FetchedBatch,
    LookaheadIterator,
    ModelCompute,
    StepTotals,
    TrainingStep,
)
from nestrec.pipeline.schedules.dual_buffer import PipelinedSchedule
from nestrec.pipeline.stage_runner import KeyPrefetcher
from nestrec.pipeline.window_cost_model import sequential_ms
from nestrec.trace import Tracer


class StaleSchedule(PipelinedSchedule):
    """Schedule that hides the lookup by using stale rows."""

    def __init__(
        self, engine: EmbeddingEngine, compute: ModelCompute, dense: DenseSide, tracer: Tracer, options: PipelineConfig
    ) -> None:
        super().__init__(engine, compute, dense, tracer, options)
        self._ahead = options.stale_steps
        self._keys = KeyPrefetcher(self._runner, self._ahead + 1)
        self._read: dict[int, FetchedBatch[ExchangeWindow]] = {}

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        runner = self._runner
        with runner.step(step):
            now = self._rows_of(step.number, step.batch)
            loss, last_gradients = runner.run_sequential(now, lambda: self._look_ahead(step, feed))
            sums = runner.reduce_dense(step, loss)
            runner.update_in_store(now, step.rates, last_gradients)
            self._keys.pop(step.number)
            del self._read[step.number]
            if step.must_read_updated_rows:  # a run that is resumed here reads all rows again, so this run must, too
                self._read.clear()
            return runner.apply_dense(step, sums)

    def _look_ahead(self, step: TrainingStep, feed: LookaheadIterator) -> None:
        """Submit reads of the following batches' rows, before the update of this batch is in the store."""
        self._keys.look_ahead(step, feed)
        for ahead in range(1, self._ahead + 1):
            batch = feed.peek(ahead)
            if batch is not None:
                self._rows_of(step.number + ahead, batch)

    def _rows_of(self, number: int, batch: Batch) -> FetchedBatch[ExchangeWindow]:
        """Return the batch with its rows; submit the read unless an earlier step has done so."""
        keys = self._keys.get_or_start(number, batch)
        read = self._read.get(number)
        if read is None or read.keys is not keys:
            read = self._read[number] = self._runner.prefetch_rows(keys)
        return read


STALE = ScheduleSpec(
    name="stale", build=StaleSchedule, is_exact=False, splits=False, options=("stale_steps",), window_ms=sequential_ms
)
