"""Dual-buffer schedule: the lookup of the next batches overlaps with this batch. Bitwise identical to serial.

lane             batch t                                    following batches
transfer                                                    build exchange plan t+2, deduplicate t+3
communication    E1 G1 E2 G2 ... dense all-reduce           key exchange t+2, during the first computation
lookup                                                      write back t-1, fetch t+1, intersect t with t+1
compute          F1 F2 ... update rows, update dense        copy shared rows to buffer t+1

E, F and G are the embedding exchange, forward/backward and gradient exchange of a micro-batch.

`PipelinedSchedule` is the base class of all schedules that run on lanes.
"""

from collections.abc import Callable
from typing import TypeVar

from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.schedule_spec import PipelineConfig, ScheduleSpec
from nestrec.pipeline.schedule_types import DenseSide, LookaheadIterator, ModelCompute, StepTotals, TrainingStep
from nestrec.pipeline.stage_runner import RowPrefetcher, StageRunner
from nestrec.pipeline.window_cost_model import sequential_ms
from nestrec.trace import Tracer

T = TypeVar("T")


class PipelinedSchedule:
    """Base class of schedules that run on lanes: owns a `StageRunner`."""

    runner_type: type[StageRunner] = StageRunner
    """Class that runs the stages."""

    def __init__(
        self, engine: EmbeddingEngine, compute: ModelCompute, dense: DenseSide, tracer: Tracer, options: PipelineConfig
    ) -> None:
        self._runner = self.runner_type(engine, compute, dense, tracer, window_cache=options.window_cache)

    def submit_collective(self, collective: Callable[[], T]) -> T:
        """Run a collective of the caller, ordered with those of the schedule, and wait for it."""
        return self._runner.submit_collective(collective)

    def close(self) -> None:
        """End the threads."""
        self._runner.lanes.close()

    def abort(self, error: BaseException) -> None:
        """End the threads without finishing the batches in flight."""
        self._runner.lanes.abort(error)


class DualBufferSchedule(PipelinedSchedule):
    """Schedule that hides the lookup, but not the exchanges."""

    lookup_type: type[RowPrefetcher] = RowPrefetcher
    """Class that prefetches keys and rows."""

    def __init__(
        self, engine: EmbeddingEngine, compute: ModelCompute, dense: DenseSide, tracer: Tracer, options: PipelineConfig
    ) -> None:
        super().__init__(engine, compute, dense, tracer, options)
        self._lookup = self.lookup_type(self._runner)

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        runner = self._runner
        lookup = self._lookup
        with runner.step(step):
            now = lookup.rows_of(step)
            loss, last_gradients = runner.run_sequential(now, lambda: lookup.look_ahead(now, step, feed))
            sums = runner.reduce_dense(step, loss)
            last_gradients.result()
            runner.update_rows(now, step.rates)
            lookup.copy_shared_rows(now)
            return runner.apply_dense(step, sums)


DUAL_BUFFER = ScheduleSpec(
    name="dual_buffer",
    build=DualBufferSchedule,
    is_exact=True,
    splits=False,
    rows_outlive_step=True,
    window_ms=sequential_ms,
)
