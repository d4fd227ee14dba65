"""The stages of training, each on its lane. A schedule says when each is submitted, and who waits for it.

stage                 lane             what
1 data prefetch       the data's own   samples assembled and clustered (nestrec.data.batches)
2 transfer            transfer         tensors to the device, keys deduplicated
3 key routing         communication    keys exchanged; what crosses with each micro-batch is put together on `transfer`
4 retrieval           lookup           rows from the store into a buffer; which of them the batch before shares
5 forward, backward   compute          on the caller's thread; vectors, gradients and dense sums on `communication`
  write-back          lookup           rows to the store
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from nestrec.base.errors import BatchError
from nestrec.base.failpoints import is_broken
from nestrec.data.batches import Batch, MicroBatch
from nestrec.embedding import EmbeddingEngine, Routed, WorkingSet
from nestrec.embedding.flight.collisions import Collisions
from nestrec.embedding.flight.overlap import Overlap, copy_shared, num_common_rows, overlap_of
from nestrec.embedding.flight.row_buffers import RowBuffers
from nestrec.embedding.flight.source_keys import SourceKeys
from nestrec.embedding.flight.window import Window
from nestrec.embedding.statistics import Leg
from nestrec.pipeline.checks import check_can_cache, check_can_cut
from nestrec.pipeline.lanes import Label, Lanes, Ticket
from nestrec.pipeline.stages import Compute, Dense, Rates, Step, Totals
from nestrec.pipeline.streams import RunAhead
from nestrec.trace import Kind, OpenSpan, Tracer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A batch after stage 2."""

    parts: tuple[MicroBatch, ...]
    """on the device"""
    source: SourceKeys


@dataclass(frozen=True, slots=True)
class Loading:
    """A batch in stage 2."""

    number: int
    batch: Batch
    loaded: Ticket[Loaded]


@dataclass(slots=True)
class InFlight:
    """A batch on its way through the stages."""

    number: int
    batch: Batch
    loaded: Ticket[Loaded]
    routed: Ticket[Routed]
    rows: Ticket[WorkingSet] | None = None
    """none until stage 4 was submitted"""
    shared: Ticket[Overlap] | None = None
    """rows shared with the batch before, where that was in flight too"""
    window: Window | None = None
    """its exchanges, once the rows are there"""
    first_vectors: Ticket[None] | None = None
    """exchange of its first micro-batch, where it was submitted ahead of its step"""
    collisions: Ticket[Collisions] | None = None
    """rows that it shares with the batch after it, told to all who use them; only looked for by `priority`"""

    @property
    def num_parts(self) -> int:
        return len(self.batch.micro_batches)

    def is_refused(self) -> bool:
        """Whether its keys hold a mistake, which its own step will raise. The same on every rank; waits for stage 3."""
        try:
            self.routed.wait()
        except BatchError:
            return True
        return False


class Machine:
    """Submits stages. `window_cache`: rule 6."""

    def __init__(
        self, engine: EmbeddingEngine, compute: Compute, dense: Dense, tracer: Tracer, *, window_cache: bool
    ) -> None:
        self.engine, self.tracer = engine, tracer
        self.lanes = Lanes(tracer, engine.device)
        self._compute, self._dense, self._window_cache = compute, dense, window_cache
        self._run_ahead = RunAhead(engine.device)
        self._updated_to = 0

    def load(self, number: int, batch: Batch) -> Loading:
        """Stage 2."""
        check_can_cut(self._compute.couples_samples, len(batch.micro_batches))
        if self._window_cache:
            check_can_cache(len(batch.micro_batches))

        def load(span: OpenSpan) -> Loaded:
            parts = tuple(self._compute.transfer(part) for part in batch.micro_batches)
            keys = [part.keys for part in batch.micro_batches]
            return Loaded(parts, self.engine.deduplicate(*keys, window_cache=self._window_cache))

        label = self.label("train.embedding.deduplicate", "lookup", number)
        loading = Loading(number, batch, self.lanes.transfer.submit(load, label))
        self._run_ahead.keep(loading)
        return loading

    def route(self, loading: Loading) -> InFlight:
        """Stage 3."""
        number, loaded = loading.number, loading.loaded
        asked = self.lanes.communication.submit(
            lambda span: self.engine.exchange_keys(loaded.wait().source, step=number),
            self.label("train.embedding.route", "lookup", number, is_collective=True), after=[loaded],
        )  # fmt: skip

        def assemble(span: OpenSpan) -> Routed:
            with counted(span, self.engine.statistics.keys):
                return self.engine.assemble(loaded.wait().source, asked.wait())

        label = self.label("train.embedding.assemble", "lookup", number)
        routed = self.lanes.transfer.submit(assemble, label, after=[asked])
        flying = InFlight(number, loading.batch, loaded, routed)
        self._run_ahead.keep(flying)
        return flying

    def begin(self, number: int, batch: Batch) -> InFlight:
        """Stages 2 and 3."""
        return self.route(self.load(number, batch))

    def fetch(self, flying: InFlight, buffers: RowBuffers | None = None) -> None:
        """Stage 4: rows from the store, created where they are new."""

        def fetch(span: OpenSpan) -> WorkingSet:
            working = self.engine.fetch(flying.routed.wait(), step=flying.number, buffers=buffers)
            return _measured(span, working)

        flying.rows = self.lanes.lookup.submit(
            fetch, self.label("train.embedding.fetch", "lookup", flying.number), after=[flying.routed]
        )

    def read_ahead(self, flying: InFlight) -> None:
        """Stage 4 without a promise: rows as the store holds them now."""
        flying.rows = self.lanes.lookup.submit(
            lambda span: _measured(span, self.engine.read_ahead(flying.routed.wait(), step=flying.number)),
            self.label("train.embedding.fetch", "lookup", flying.number), after=[flying.routed],
        )  # fmt: skip

    def read_late(self, flying: InFlight, before: Sequence[InFlight], *, most_late: int) -> None:
        """`read_ahead`, and how late it is: which rows miss the updates of the batches before, of how many at most."""

        def read(span: OpenSpan) -> WorkingSet:
            missed = [batch for batch in before if batch.number > self._updated_to]
            assert len(missed) <= most_late, f"rows of step {flying.number} miss {len(missed)} updates"
            working = self.engine.read_ahead(flying.routed.wait(), step=flying.number)
            self.engine.statistics.rows_read += sum(len(table.fetched.keys) for table in working.tables.values())
            self.engine.statistics.rows_late += sum(num_common_rows(batch.routed.wait(), working) for batch in missed)
            self.engine.statistics.most_late = max(self.engine.statistics.most_late, len(missed))
            return _measured(span, working)

        label = self.label("train.embedding.fetch", "lookup", flying.number)
        flying.rows = self.lanes.lookup.submit(read, label, after=[flying.routed])

    def find_shared(self, older: InFlight, newer: InFlight) -> None:
        """Stage 4: which rows two batches share."""
        assert older.rows is not None
        assert newer.rows is not None
        rows = older.rows, newer.rows
        newer.shared = self.lanes.lookup.submit(
            lambda span: overlap_of(rows[0].wait(), rows[1].wait()),
            self.label("train.embedding.intersect", "lookup", newer.number), after=rows,
        )  # fmt: skip

    def copy_shared(self, older: InFlight, newer: InFlight) -> Overlap:
        """Stage 4, on the compute lane: rows that the older batch has updated, into the newer one's buffer (rule 1)."""
        assert older.rows is not None
        assert newer.rows is not None
        assert newer.shared is not None
        working, shared = newer.rows.wait(), newer.shared.wait()
        with self.span("train.embedding.copy", "lookup") as span:
            copy_shared(older.rows.wait(), working, shared)
            span.rows = shared.num_rows
        return shared

    def write_back(self, flying: InFlight, shared: Overlap | None) -> Ticket[None]:
        """Rows to the store, except those that the next batch has taken over."""
        assert flying.rows is not None
        rows = flying.rows
        return self.lanes.lookup.submit(
            lambda span: self.engine.write_back(_measured(span, rows.wait()), shared),
            self.label("train.embedding.write_back", "lookup", flying.number), after=[rows],
        )  # fmt: skip

    def open_window(self, flying: InFlight) -> Window:
        """Wait for the rows, and make the exchanges of the batch possible."""
        if flying.window is None:
            assert flying.rows is not None
            self._run_ahead.keep(flying)  # also where it was begun long ago
            flying.window = Window(self.engine, flying.routed.wait(), flying.rows.wait())
        return flying.window

    def vectors(self, flying: InFlight, part: int) -> Ticket[None]:
        """Exchange E of a micro-batch."""
        window, leg = self.open_window(flying), self.engine.statistics.vectors

        def receive(span: OpenSpan) -> None:
            with counted(span, leg):
                window.receive(part)

        label = self.label("train.embedding.vectors", "communication", flying.number, part, is_collective=True)
        return self.lanes.communication.submit(receive, label)

    def vectors_ahead(self, flying: InFlight, part: int) -> Ticket[None]:
        """Exchange E of a micro-batch, as soon as its rows are there."""
        assert flying.rows is not None

        def receive(span: OpenSpan) -> None:
            with counted(span, self.engine.statistics.vectors):
                self.open_window(flying).receive(part)

        label = self.label("train.embedding.vectors", "communication", flying.number, part, is_collective=True)
        return self.lanes.communication.submit(receive, label, after=[flying.rows])

    def compute(self, flying: InFlight, part: int) -> torch.Tensor:
        """Forward and backward of a micro-batch whose vectors have come; its part of the loss."""
        window = self.open_window(flying)
        index = window.routed.parts[part].index
        with self.tracer.context(micro_batch=part), self.span("train.compute", "compute"):
            micro_batch, rows = flying.loaded.wait().parts[part], window.rows(part)
            loss, gradients = self._compute.forward_backward(micro_batch, rows, index, flying.batch.weight)
            window.keep(part, gradients)
        return loss

    def gradients(self, flying: InFlight, part: int, rates: Rates) -> Ticket[None]:
        """Exchange G of a micro-batch; owners add up."""
        window = self.open_window(flying)

        def send(span: OpenSpan) -> None:
            with counted(span, self.engine.statistics.gradients):
                window.send(part)
            if is_broken("pipeline.rule4"):
                self.engine.update_rows(window.working, learning_rate=rates.tables)

        label = self.label("train.embedding.gradients", "communication", flying.number, part, is_collective=True)
        sent = self.lanes.communication.submit(send, label)
        return self._sum_over_holders(window, flying.number, part) if window.routed.parts[part].crossing else sent

    def _sum_over_holders(self, window: Window, number: int, part: int) -> Ticket[None]:
        """Gradients that a micro-batch completes, to and from the other holders of their rows."""

        def exchange(span: OpenSpan) -> None:
            with counted(span, self.engine.statistics.replicas):
                self.engine.sum_over_holders(window.routed, window.working, part)

        label = self.label("train.embedding.replicas", "communication", number, part, is_collective=True)
        return self.lanes.communication.submit(exchange, label)

    def reduce_dense(self, step: Step, loss: torch.Tensor) -> Ticket[torch.Tensor]:
        """Dense gradients, loss and the wish to stop, summed over ranks."""
        return self.lanes.communication.submit(
            lambda span: self._dense.reduce(loss, step.wants_stop),
            self.label("train.dense.reduce", "communication", step.number, is_collective=True),
        )

    def apply_dense(self, step: Step, sums: Ticket[torch.Tensor]) -> Totals:
        """The dense weights' update, on the compute lane."""
        reduced = sums.wait()
        with self.span("train.dense.update", "compute"):
            return self._dense.apply(reduced, step.rates.dense)

    def update_rows(self, flying: InFlight, rates: Rates) -> None:
        """One optimiser step on the rows of the batch, on the compute lane."""
        assert flying.rows is not None
        with self.span("train.embedding.update", "compute"):
            self.engine.update_rows(flying.rows.wait(), learning_rate=rates.tables)
        if flying.routed.wait().averaged:
            self._average(flying.number, flying.rows).wait()

    def _average(self, number: int, rows: Ticket[WorkingSet]) -> Ticket[None]:
        """Copies of updated rows replaced by their mean."""

        def average(span: OpenSpan) -> None:
            with counted(span, self.engine.statistics.replicas):
                self.engine.average_over_holders(rows.wait())

        label = self.label("train.embedding.replicas", "communication", number, is_collective=True)
        return self.lanes.communication.submit(average, label, after=[rows])

    def update_in_store(self, flying: InFlight, rates: Rates, after: Ticket[None]) -> None:
        """For rows that were read ahead: apply their gradients to the rows that the store holds by then."""
        old, routed = self.open_window(flying).working, flying.routed

        def update(span: OpenSpan) -> WorkingSet:
            fresh = self.engine.fetch(routed.wait(), step=flying.number)
            for name, table in fresh.tables.items():
                table.gradient, table.total = old.tables[name].gradient, old.tables[name].total
            self.engine.update_rows(fresh, learning_rate=rates.tables)
            self._updated_to = flying.number
            if not routed.wait().averaged:
                self.engine.write_back(_measured(span, fresh))
            return fresh

        label = self.label("train.embedding.write_back", "lookup", flying.number)
        updated = self.lanes.lookup.submit(update, label, after=[after])
        if routed.wait().averaged:
            averaged = self._average(flying.number, updated)
            write = lambda span: self.engine.write_back(_measured(span, updated.wait()))  # noqa: E731
            self.lanes.lookup.submit(write, label, after=[averaged])

    def issue(self, collective: Callable[[], T]) -> T:
        """A collective of the caller's, in its place among the others."""
        label = Label(name="train.control", kind="other", step=0, is_collective=True)
        return self.lanes.communication.submit(lambda span: collective(), label).wait()

    @contextlib.contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """The span of a step on the compute lane; after a fence, no lane is busy when it ends."""
        with self.tracer.context(lane="compute", step=step.number), self.span("train.step", "step"):
            yield
            if step.is_fence:
                self.lanes.drain()
                self.issue(lambda: self.engine.settle(step.number))
            if step.reads_end:
                self.engine.reads_ahead.forget()
        self._run_ahead.end_step()

    def keep(self, flying: InFlight) -> None:
        """A batch begun long ago is used by this step."""
        self._run_ahead.keep(flying)

    def zero(self) -> torch.Tensor:
        return torch.zeros((), device=self.engine.device)

    def span(self, name: str, kind: Kind) -> OpenSpan:
        """A span of the caller's lane."""
        return self.tracer.span(name, kind=kind)

    def label(
        self, name: str, kind: Kind, number: int, part: int | None = None, *, is_collective: bool = False
    ) -> Label:
        """What a task of a batch is called in the trace."""
        return Label(name=name, kind=kind, step=number, micro_batch=part, is_collective=is_collective)


@contextlib.contextmanager
def counted(span: OpenSpan, leg: Leg) -> Iterator[None]:
    """Rows and bytes that cross inside the block. Only one lane counts on a leg."""
    rows, num_bytes = leg.rows, leg.bytes_sent
    yield
    span.rows, span.bytes = leg.rows - rows, leg.bytes_sent - num_bytes


def _measured(span: OpenSpan, working: WorkingSet) -> WorkingSet:
    tables = working.tables.values()
    span.rows = sum(len(table.fetched.keys) for table in tables)
    span.bytes = sum(len(table.fetched.keys) * table.layout.row_bytes for table in tables)
    return working
