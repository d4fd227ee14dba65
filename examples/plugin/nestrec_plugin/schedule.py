"""A schedule: the stages of a step on lanes, each waited for. Equal to serial, and a beginning for one that is not.

lane             batch t
transfer         deduplicate, put together what crosses
communication    key exchange; E1 G1 E2 G2 ... dense sums
lookup           fetch                                               write back
compute                          F1 F2 ... update rows, update dense
"""

from nestrec import ScheduleSpec
from nestrec.pipeline.schedule_types import LookaheadIterator, StepTotals, TrainingStep
from nestrec.pipeline.schedules.dual_buffer import PipelinedSchedule


class Lanes(PipelinedSchedule):
    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        machine = self._machine
        with machine.step(step):
            now = machine.fetch(machine.route(machine.load(step.number, step.batch)))
            loss, last_gradients = machine.in_turn(now, lambda: None)
            sums = machine.reduce_dense(step, loss)
            last_gradients.wait()
            machine.update_rows(now, step.rates)
            written = machine.write_back(now, None)
            totals = machine.apply_dense(step, sums)
            written.wait()
            return totals


LANES = ScheduleSpec(name="lanes", build=Lanes, is_exact=True, splits=False)
