"""Nested: dual buffer across batches, frozen window inside a batch (NestPipe). Equal to serial.

lane             batch t                                          batches after it
transfer                                                          put together what crosses with t+2, deduplicate t+3
communication    E1 E2    G1 E3 G2 ... dense sums                 key exchange t+2 behind E2; E1 of t+1 behind all
lookup                                                            write back t-1, fetch t+1, intersect t with t+1
compute             F1    F2    ... update rows, update dense     copy shared rows to buffer t+1
"""

from dataclasses import dataclass

from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.exchange_window import ExchangeWindow
from nestrec.pipeline.lanes import Future
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
from nestrec.pipeline.stage_runner import RowPrefetcher
from nestrec.pipeline.window_cost_model import overlapped_ms
from nestrec.trace import Tracer


@dataclass(frozen=True, slots=True)
class _First:
    """The first exchange of a batch, submitted ahead of its step."""

    batch: FetchedBatch[ExchangeWindow]
    vectors: Future[None]


class NestedSchedule(PipelinedSchedule):
    """Lookup and exchanges hidden."""

    lookup_type: type[RowPrefetcher] = RowPrefetcher
    """who looks ahead"""

    def __init__(
        self, engine: EmbeddingEngine, compute: ModelCompute, dense: DenseSide, tracer: Tracer, options: PipelineConfig
    ) -> None:
        super().__init__(engine, compute, dense, tracer, options)
        self._lookup = self.lookup_type(self._machine)
        self._first: _First | None = None

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        machine = self._machine
        lookup = self._lookup
        with machine.step(step):
            now = lookup.rows_of(step)
            first = self._first.vectors if self._first is not None and self._first.batch is now else None
            loss, last_gradients = machine.overlapped(now, lambda: lookup.look_ahead(now, step, feed), first)
            sums = machine.reduce_dense(step, loss)
            last_gradients.wait()
            machine.update_rows(now, step.rates)
            following = lookup.hand_over(now)
            # Its rows are final, and the dense update need not be over.
            self._first = None if following is None else _First(following, machine.vectors(following, 0))
            return machine.apply_dense(step, sums)


NESTED = ScheduleSpec(
    name="nested", build=NestedSchedule, is_exact=True, splits=True, rows_outlive_step=True, window_ms=overlapped_ms
)
