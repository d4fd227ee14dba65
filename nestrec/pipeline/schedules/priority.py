"""Priority: rows that consecutive batches share go first, the others when there is time (FreeScale). Equal to serial.

lane             batch t-1                      batch t                              batches after it
communication    gradients of exclusive rows    gradients of shared rows, dense      keys t+2, collisions of t with t+1;
                                                sums                                 exclusive vectors t+1; after the
                                                                                     update, shared vectors t+1
lookup           update exclusive rows,                                              fetch t+1, intersect t with t+1
                 write back
compute                                         F1 F2 ... update shared rows,        copy shared rows to buffer t+1
                                                update dense

Shared with t+1 is a row of t whose gradient is awaited; all other gradients are deferred to the next step. Exclusive is
a row of t+1 that t does not use: it may have been used by t-1, so it is read after the deferred gradients of t-1 are in
the store. The one FIFO of the lookup lane keeps that order. Before a fence, and before copies of rows are averaged,
nothing is deferred.
"""

from dataclasses import dataclass

from nestrec.base.failpoints import is_broken
from nestrec.embedding import EmbeddingEngine
from nestrec.embedding.flight.overlap import Overlap
from nestrec.embedding.flight.row_buffers import RowBuffers
from nestrec.pipeline.collision_stages import CollisionStages
from nestrec.pipeline.feed import Feed
from nestrec.pipeline.keys_ahead import KeysAhead
from nestrec.pipeline.lanes import Ticket
from nestrec.pipeline.lookup_ahead import keep_rows
from nestrec.pipeline.machine import InFlight
from nestrec.pipeline.options import PipelineConfig
from nestrec.pipeline.schedule_spec import ScheduleSpec
from nestrec.pipeline.schedules.pipelined import Pipelined
from nestrec.pipeline.stages import Compute, Dense, Rates, Step, Totals
from nestrec.trace import Tracer

_KEYS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A batch whose exclusive rows are not updated yet."""

    batch: InFlight
    rates: Rates
    shared: Overlap


class Priority(Pipelined):
    """Lookup hidden, and the exchanges of all rows that the next batch does not use."""

    def __init__(
        self, engine: EmbeddingEngine, compute: Compute, dense: Dense, tracer: Tracer, options: PipelineConfig
    ) -> None:
        super().__init__(engine, compute, dense, tracer, options)
        self._stages = CollisionStages(self._machine)
        self._keys, self._buffers = KeysAhead(self._machine, _KEYS_AHEAD), RowBuffers(turns=2)
        self._deferred: _Deferred | None = None
        self._coming: dict[int, list[Ticket[None]]] = {}

    def advance(self, step: Step, feed: Feed) -> Totals:
        machine = self._machine
        with machine.step(step):
            now, coming = self._begin(step)
            following = self._beside(now, step, feed)
            defers, loss = False, machine.zero()
            for i in range(now.num_parts):
                coming[i].wait()
                loss = loss + machine.compute(now, i)
                if i == 0:  # the keys of the next batch had until here to arrive
                    following = None if following is None or following.is_refused() else following
                    defers = following is not None and not now.routed.wait().averaged
                going = self._stages.gradients(now, i, "shared") if defers else machine.gradients(now, i, step.rates)
            sums = machine.reduce_dense(step, loss)
            going.wait()
            if defers:
                self._stages.update_shared(now, step.rates)
            else:
                machine.update_rows(now, step.rates)
            self._hand_over(now, following, step, defers=defers)
            return machine.apply_dense(step, sums)

    def _begin(self, step: Step) -> tuple[InFlight, list[Ticket[None]]]:
        """The batch of this step and the exchanges of its vectors, all of them now where none was begun before."""
        now = self._keys.begun(step.number, step.batch)
        coming = self._coming.pop(step.number, None)
        if coming is None or now.rows is None:
            self._machine.fetch(now, self._buffers)
            self._stages.window(now)
            coming = [self._machine.vectors(now, i) for i in range(now.num_parts)]
        self._machine.keep(now)
        return now, coming

    def _beside(self, now: InFlight, step: Step, feed: Feed) -> InFlight | None:
        """Submit what may run beside this step; the next batch, where its rows are being read."""
        if is_broken("pipeline.deferred") and self._deferred is not None:
            keep_rows(self._deferred.batch)
            following = self._read_ahead(now, step, feed)
            self._finish_deferred()
            return following
        self._finish_deferred()
        return self._read_ahead(now, step, feed)

    def _finish_deferred(self) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._stages.finish(deferred.batch, deferred.rates, deferred.shared)

    def _read_ahead(self, now: InFlight, step: Step, feed: Feed) -> InFlight | None:
        """Rows of the next batch from the store, and the exclusive ones to those who use them."""
        self._keys.look_ahead(step, feed)
        following = self._keys.get(step.number + 1)
        if following is None or step.is_fence:  # a fetch creates rows, so none may pass a fence
            return None
        self._machine.fetch(following, self._buffers)
        self._machine.find_shared(now, following)
        found = self._stages.find(now, following)
        for i in range(following.num_parts):
            self._stages.vectors(following, i, "exclusive", found)
        return following

    def _hand_over(self, now: InFlight, following: InFlight | None, step: Step, *, defers: bool) -> None:
        """After the update: shared rows to the next batch, and on their way to those who use them."""
        self._keys.pop(step.number)
        if following is None:
            self._machine.write_back(now, None)
            return
        shared, found = self._machine.copy_shared(now, following), now.collisions
        assert found is not None
        if defers:
            self._deferred = _Deferred(now, step.rates, shared)
        else:
            self._machine.write_back(now, shared)
        self._coming[following.number] = [
            self._stages.vectors(following, i, "shared", found) for i in range(following.num_parts)
        ]


PRIORITY = ScheduleSpec(name="priority", build=Priority, is_exact=True, splits=False, rows_outlive_step=True)
