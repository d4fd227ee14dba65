"""Stale: rows are read ahead and used as they were then. NOT equal to serial: the baseline that shows what that costs.

The vectors of batch t miss the updates of the last `stale_steps` batches. Gradients are not lost: they are applied to
the rows as the store holds them when the update is made, in order of batch.

lane             batch t                                    batches after it
communication    E1 G1 E2 G2 ... dense sums                 key exchange t + stale_steps + 1
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
from nestrec.pipeline.window_cost_model import in_turn_ms
from nestrec.trace import Tracer


class StaleSchedule(PipelinedSchedule):
    """Lookup hidden by using old rows."""

    def __init__(
        self, engine: EmbeddingEngine, compute: ModelCompute, dense: DenseSide, tracer: Tracer, options: PipelineConfig
    ) -> None:
        super().__init__(engine, compute, dense, tracer, options)
        self._ahead = options.stale_steps
        self._keys = KeyPrefetcher(self._machine, self._ahead + 1)
        self._read: dict[int, FetchedBatch[ExchangeWindow]] = {}

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        machine = self._machine
        with machine.step(step):
            now = self._rows_of(step.number, step.batch)
            loss, last_gradients = machine.in_turn(now, lambda: self._look_ahead(step, feed))
            sums = machine.reduce_dense(step, loss)
            machine.update_in_store(now, step.rates, last_gradients)
            self._keys.pop(step.number)
            del self._read[step.number]
            if step.reads_end:  # a run that is resumed here reads all rows anew, and so does one that goes on
                self._read.clear()
            return machine.apply_dense(step, sums)

    def _look_ahead(self, step: TrainingStep, feed: LookaheadIterator) -> None:
        """Read rows of the batches that follow, before this one's update is in the store."""
        self._keys.look_ahead(step, feed)
        for ahead in range(1, self._ahead + 1):
            batch = feed.peek(ahead)
            if batch is not None:
                self._rows_of(step.number + ahead, batch)

    def _rows_of(self, number: int, batch: Batch) -> FetchedBatch[ExchangeWindow]:
        """The batch with its rows, read now unless they were before."""
        keys = self._keys.begun(number, batch)
        read = self._read.get(number)
        if read is None or read.keys is not keys:
            read = self._read[number] = self._machine.read_ahead(keys)
        return read


STALE = ScheduleSpec(
    name="stale", build=StaleSchedule, is_exact=False, splits=False, options=("stale_steps",), window_ms=in_turn_ms
)
