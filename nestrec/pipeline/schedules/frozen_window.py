"""Frozen window: the exchanges of a micro-batch run beside the computation of others. Equal to serial.

lane             batch t
transfer         deduplicate, put together what crosses
communication    key exchange; E1 E2 G1 E3 G2 ... dense sums
lookup           fetch                                               write back
compute                          F1 F2 F3 ... update rows, update dense
"""

from nestrec.pipeline.schedule_spec import ScheduleSpec
from nestrec.pipeline.schedule_types import LookaheadIterator, StepTotals, TrainingStep
from nestrec.pipeline.schedules.dual_buffer import PipelinedSchedule
from nestrec.pipeline.window_cost_model import overlapped_ms


class FrozenWindowSchedule(PipelinedSchedule):
    """Exchanges hidden, lookup not."""

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        machine = self._machine
        with machine.step(step):
            now = machine.fetch(machine.route(machine.load(step.number, step.batch)))
            loss, last_gradients = machine.overlapped(now, lambda: None)
            sums = machine.reduce_dense(step, loss)
            last_gradients.wait()
            machine.update_rows(now, step.rates)
            written = machine.write_back(now, None)
            totals = machine.apply_dense(step, sums)
            written.wait()
            return totals


FROZEN_WINDOW = ScheduleSpec(
    name="frozen_window", build=FrozenWindowSchedule, is_exact=True, splits=True, window_ms=overlapped_ms
)
