"""Stale: rows are read ahead and used as they were then. NOT equal to serial: the baseline that shows what that costs.

The vectors of batch t miss the updates of the last `stale_steps` batches. Gradients are not lost: they are applied to
the rows as the store holds them when the update is made, in order of batch.

lane             batch t                                    batches after it
communication    E1 G1 E2 G2 ... dense sums                 key exchange
lookup           fetch again, update, write back            read rows of t + stale_steps
compute          F1 F2 ... update dense
"""

from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.feed import Feed
from nestrec.pipeline.machine import InFlight
from nestrec.pipeline.options import PipelineConfig
from nestrec.pipeline.pipelined import Pipelined
from nestrec.pipeline.stages import Compute, Dense, Step, Totals
from nestrec.pipeline.windows import in_turn
from nestrec.trace import Tracer


class Stale(Pipelined):
    """Lookup hidden by using old rows."""

    def __init__(
        self, engine: EmbeddingEngine, compute: Compute, dense: Dense, tracer: Tracer, options: PipelineConfig
    ) -> None:
        super().__init__(engine, compute, dense, tracer, options)
        self._ahead = options.stale_steps
        self._flying: dict[int, InFlight] = {}

    def advance(self, step: Step, feed: Feed) -> Totals:
        machine = self._machine
        with machine.step(step):
            now = self._flying.pop(step.number, None)
            if now is None or now.batch is not step.batch:
                now = machine.begin(step.number, step.batch)
                machine.read_ahead(now)
            loss, last_gradients = in_turn(machine, now, step.rates, lambda: self._look_ahead(step, feed))
            sums = machine.reduce_dense(step, loss)
            machine.update_in_store(now, step.rates, last_gradients)
            return machine.apply_dense(step, sums)

    def _look_ahead(self, step: Step, feed: Feed) -> None:
        """Read rows of the batches that follow, before this one's update is in the store."""
        for ahead in range(1, self._ahead + 1):
            batch, number = feed.peek(ahead), step.number + ahead
            flying = self._flying.get(number)
            if batch is not None and (flying is None or flying.batch is not batch):
                self._flying[number] = self._machine.begin(number, batch)
                self._machine.read_ahead(self._flying[number])
