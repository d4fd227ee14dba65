"""Nested schedule (NestPipe): dual buffer across batches, frozen window inside a batch. Bitwise identical to serial.

lane             batch t                                          following batches
transfer                                                          build exchange plan t+2, deduplicate t+3
communication    E1 E2    G1 E3 G2 ... dense all-reduce           key exchange t+2 after E2; E1 of t+1 at the end
lookup                                                            write back t-1, fetch t+1, intersect t with t+1
compute             F1    F2    ... update rows, update dense     copy shared rows to buffer t+1

E, F and G are the embedding exchange, forward/backward and gradient exchange of a micro-batch.
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
class _FirstExchange:
    """The first embedding exchange of a batch, submitted before its step."""

    batch: FetchedBatch[ExchangeWindow]
    vectors: Future[None]


class NestedSchedule(PipelinedSchedule):
    """Schedule that hides the lookup and the exchanges."""

    lookup_type: type[RowPrefetcher] = RowPrefetcher
    """Class that prefetches keys and rows."""

    def __init__(
        self, engine: EmbeddingEngine, compute: ModelCompute, dense: DenseSide, tracer: Tracer, options: PipelineConfig
    ) -> None:
        super().__init__(engine, compute, dense, tracer, options)
        self._lookup = self.lookup_type(self._runner)
        self._first: _FirstExchange | None = None

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        runner = self._runner
        lookup = self._lookup
        with runner.step(step):
            now = lookup.rows_of(step)
            first = self._first.vectors if self._first is not None and self._first.batch is now else None
            loss, last_gradients = runner.run_overlapped(now, lambda: lookup.look_ahead(now, step, feed), first)
            sums = runner.reduce_dense(step, loss)
            last_gradients.result()
            runner.update_rows(now, step.rates)
            following = lookup.copy_shared_rows(now)
            # The rows of the next batch are final here; its first exchange need not wait for the dense update.
            self._first = (
                None if following is None else _FirstExchange(following, runner.exchange_vectors(following, 0))
            )
            return runner.apply_dense(step, sums)


NESTED = ScheduleSpec(
    name="nested", build=NestedSchedule, is_exact=True, splits=True, rows_outlive_step=True, window_ms=overlapped_ms
)
