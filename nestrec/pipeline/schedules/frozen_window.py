"""Frozen-window schedule: exchanges overlap with the computation of other micro-batches. Bitwise identical to serial.

Parameters are frozen between two updates, so exchanges and computations of different micro-batches are independent.

lane             batch t
transfer         deduplicate, build exchange plan
communication    key exchange; E1 E2 G1 E3 G2 ... dense all-reduce
lookup           fetch                                               write back
compute                          F1 F2 F3 ... update rows, update dense

E, F and G are the embedding exchange, forward/backward and gradient exchange of a micro-batch.
"""

from nestrec.pipeline.schedule_spec import ScheduleSpec
from nestrec.pipeline.schedule_types import LookaheadIterator, StepTotals, TrainingStep
from nestrec.pipeline.schedules.dual_buffer import PipelinedSchedule
from nestrec.pipeline.window_cost_model import overlapped_ms


class FrozenWindowSchedule(PipelinedSchedule):
    """Schedule that hides the exchanges, but not the lookup."""

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        runner = self._runner
        with runner.step(step):
            now = runner.fetch(runner.route(runner.load(step.number, step.batch)))
            loss, last_gradients = runner.run_overlapped(now, lambda: None)
            sums = runner.reduce_dense(step, loss)
            last_gradients.result()
            runner.update_rows(now, step.rates)
            written = runner.write_back(now, None)
            totals = runner.apply_dense(step, sums)
            written.result()
            return totals


FROZEN_WINDOW = ScheduleSpec(
    name="frozen_window", build=FrozenWindowSchedule, is_exact=True, splits=True, window_ms=overlapped_ms
)
