"""Dual buffer: the lookup of the next batches runs beside this one. Equal to serial.

lane             batch t                                    batches after it
transfer                                                    put together what crosses with t+2, deduplicate t+3
communication    E1 G1 E2 G2 ... dense sums                 key exchange t+2, beside the first computation
lookup                                                      write back t-1, fetch t+1, intersect t with t+1
compute          F1 F2 ... update rows, update dense        copy shared rows to buffer t+1

What the schedules that run on lanes have in common.
"""

from collections.abc import Callable
from typing import TypeVar

from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.schedule_spec import PipelineConfig, ScheduleSpec
from nestrec.pipeline.schedule_types import DenseSide, LookaheadIterator, ModelCompute, StepTotals, TrainingStep
from nestrec.pipeline.stage_runner import RowPrefetcher, StageRunner
from nestrec.pipeline.window_cost_model import in_turn_ms
from nestrec.trace import Tracer

T = TypeVar("T")


class PipelinedSchedule:
    """A machine, and the end of it."""

    machine_type: type[StageRunner] = StageRunner
    """whose stages it arranges"""

    def __init__(
        self, engine: EmbeddingEngine, compute: ModelCompute, dense: DenseSide, tracer: Tracer, options: PipelineConfig
    ) -> None:
        self._machine = self.machine_type(engine, compute, dense, tracer, window_cache=options.window_cache)

    def issue(self, collective: Callable[[], T]) -> T:
        """Run a collective of the caller's in its place in the order of collectives, and wait for it."""
        return self._machine.issue(collective)

    def close(self) -> None:
        """End the threads."""
        self._machine.lanes.close()

    def abandon(self, error: BaseException) -> None:
        """End the threads without finishing what was begun."""
        self._machine.lanes.abandon(error)


class DualBufferSchedule(PipelinedSchedule):
    """Lookup hidden, exchanges not."""

    lookup_type: type[RowPrefetcher] = RowPrefetcher
    """who looks ahead"""

    def __init__(
        self, engine: EmbeddingEngine, compute: ModelCompute, dense: DenseSide, tracer: Tracer, options: PipelineConfig
    ) -> None:
        super().__init__(engine, compute, dense, tracer, options)
        self._lookup = self.lookup_type(self._machine)

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        machine = self._machine
        lookup = self._lookup
        with machine.step(step):
            now = lookup.rows_of(step)
            loss, last_gradients = machine.in_turn(now, lambda: lookup.look_ahead(now, step, feed))
            sums = machine.reduce_dense(step, loss)
            last_gradients.wait()
            machine.update_rows(now, step.rates)
            lookup.hand_over(now)
            return machine.apply_dense(step, sums)


DUAL_BUFFER = ScheduleSpec(
    name="dual_buffer",
    build=DualBufferSchedule,
    is_exact=True,
    splits=False,
    rows_outlive_step=True,
    window_ms=in_turn_ms,
)
