"""Semi-asynchronous (TurboGR): exchanges of rows leave the step; some rows are one step late. NOT equal to serial.

The vectors of batch t+1 are read and sent while batch t computes, so rows in both miss the update of t, and no other:
gradients of t-1 are in the store before that. Dense weights are strictly synchronous.

lane             t-1                        t            t+1                t+4            t+5
the data's own                                                                             samples assembled
transfer                                                                    load t+5, put together what crosses with t+4
communication    gradients                  dense sums   vectors            key exchange
lookup           fetch again, update,                    read rows
                 write back
compute                                     F1 F2 ... update dense

Six batches are in flight. After a fence nothing is late: the next batch reads rows that have seen every update, so a
run that was resumed there is the run that was not interrupted. A stop between fences keeps what was read, and saves it.
"""

from dataclasses import dataclass

from nestrec.base.failpoints import is_broken
from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.feed import Feed
from nestrec.pipeline.keys_ahead import KeysAhead
from nestrec.pipeline.lanes import Ticket
from nestrec.pipeline.machine import InFlight
from nestrec.pipeline.options import PipelineConfig
from nestrec.pipeline.schedule_spec import ScheduleSpec
from nestrec.pipeline.schedules.pipelined import Pipelined
from nestrec.pipeline.stages import Compute, Dense, Rates, Step, Totals
from nestrec.trace import Tracer

_KEYS_AHEAD = 4
_MOST_LATE = 1
"""Updates that a row may miss."""


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A batch whose gradients have not left yet."""

    batch: InFlight
    rates: Rates


class SemiAsync(Pipelined):
    """Lookup and exchanges hidden by using some rows one step late."""

    def __init__(
        self, engine: EmbeddingEngine, compute: Compute, dense: Dense, tracer: Tracer, options: PipelineConfig
    ) -> None:
        super().__init__(engine, compute, dense, tracer, options)
        self._keys = KeysAhead(self._machine, _KEYS_AHEAD)
        self._deferred: _Deferred | None = None
        self._coming: dict[int, list[Ticket[None]]] = {}

    def advance(self, step: Step, feed: Feed) -> Totals:
        machine = self._machine
        with machine.step(step):
            now = self._keys.begun(step.number, step.batch)
            coming = self._coming.pop(step.number, None) or self._read(now)
            self._send_deferred()
            self._keys.look_ahead(step, feed)
            following = self._keys.get(step.number + 1)
            if following is not None and not step.reads_end:
                self._coming[following.number] = self._read(following)
            loss = machine.zero()
            for i in range(now.num_parts):
                coming[i].wait()
                loss = loss + machine.compute(now, i)
            sums = machine.reduce_dense(step, loss)
            self._deferred = _Deferred(self._keys.pop(step.number), step.rates)
            if step.is_fence:
                self._send_deferred()
            return machine.apply_dense(step, sums)

    def _read(self, flying: InFlight) -> list[Ticket[None]]:
        """Rows of a batch as the store holds them now, on their way to those who use them."""
        before = [self._keys.get(flying.number - 1), None if self._deferred is None else self._deferred.batch]
        self._machine.read_late(flying, [batch for batch in before if batch is not None], most_late=_MOST_LATE)
        return [self._machine.vectors_ahead(flying, i) for i in range(flying.num_parts)]

    def _send_deferred(self) -> None:
        """Gradients of the batch before go, and its rows are updated."""
        if self._deferred is None or is_broken("pipeline.most_late"):
            return
        batch, rates = self._deferred.batch, self._deferred.rates
        self._deferred = None
        for i in range(batch.num_parts):
            gone = self._machine.gradients(batch, i, rates)
        self._machine.update_in_store(batch, rates, gone)


SEMI_ASYNC = ScheduleSpec(name="semi_async", build=SemiAsync, is_exact=False, splits=False)
