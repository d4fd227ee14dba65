"""Schedule: the stages of a step run on lanes, one after the other; a start for a schedule that overlaps them.

lane             batch t
transfer         deduplicate keys, build the exchange plan
communication    key exchange; E1 G1 E2 G2 ... dense all-reduce
lookup           read rows                                           write back
compute                          F1 F2 ... update rows, update dense
"""

from nestrec import ScheduleSpec
from nestrec.pipeline.schedule_types import LookaheadIterator, StepTotals, TrainingStep
from nestrec.pipeline.schedules.dual_buffer import PipelinedSchedule


class Lanes(PipelinedSchedule):
    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        machine = self._runner
        with machine.step(step):
            now = machine.fetch(machine.route(machine.load(step.number, step.batch)))
            loss, last_gradients = machine.run_sequential(now, lambda: None)
            sums = machine.reduce_dense(step, loss)
            last_gradients.result()
            machine.update_rows(now, step.rates)
            written = machine.write_back(now, None)
            totals = machine.apply_dense(step, sums)
            written.result()
            return totals


LANES = ScheduleSpec(name="lanes", build=Lanes, is_exact=True, splits=False)
