"""Runs the stages of a batch on their lanes, and prefetches the batches ahead.

Ahead of the step: while batch t trains, the batches after it go through the stages before their own.

Keys ahead of rows: keys of t + ahead are exchanged, and the batch after that is loaded. Each of the stages has a step
of its own. Were a batch loaded and its keys exchanged in one step, the exchange would stand in the communication lane
and wait for the loading, with the gradients of batch t behind it.

Rows ahead (dual buffer): rows of t+1 are fetched, keys of t+2 are exchanged, and t+3 is loaded.

    lookup lane      write back t-1 | fetch t+1 | intersect t with t+1
    compute lane     ... batch t ... update t | copy rows of both from buffer t to buffer t+1 | batch t+1 ...

The lookup lane is the one FIFO of write-back before gather and of ordered write-back: rows of t-1 reach the store
before t+1 reads it, and write-backs keep their order. Rows that t+1 has taken over are not written back by t.

The stages of training, each on its lane. A schedule says when each is submitted, and who waits for it.

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
from typing import Any, TypeVar, cast

import torch

from nestrec.base.thread_team import FutureLike
from nestrec.data.batch_loader import Batch
from nestrec.embedding import EmbeddingEngine, RoutedKeys, WorkingSet
from nestrec.embedding.routing.batch_overlap import Overlap, copy_shared, num_common_rows, overlap_of
from nestrec.embedding.routing.working_set import RowBuffers
from nestrec.pipeline.exchange_window import ExchangeWindow
from nestrec.pipeline.lanes import Future, Label, Lanes, RunAheadLimiter
from nestrec.pipeline.schedule_types import (
    DenseSide,
    FetchedBatch,
    LearningRates,
    LoadedBatch,
    LoadResult,
    LookaheadIterator,
    ModelCompute,
    NextBatch,
    RoutedBatch,
    StepTotals,
    TrainingStep,
    check_can_cache,
    check_can_cut,
)
from nestrec.trace import Kind, OpenSpan, Tracer
from nestrec.trace.tracer import ExchangeCounters

T = TypeVar("T")
WindowT = TypeVar("WindowT", bound=ExchangeWindow)


Ended = tuple[torch.Tensor, Future[None]]
"""Loss, and the last exchange of gradients."""


class StageRunner:
    """Submits stages. `window_cache`: see the rule of that name."""

    def __init__(
        self, engine: EmbeddingEngine, compute: ModelCompute, dense: DenseSide, tracer: Tracer, *, window_cache: bool
    ) -> None:
        self.engine = engine
        self.tracer = tracer
        self._compute = compute
        self._dense = dense
        self._window_cache = window_cache
        self._run_ahead = RunAheadLimiter(engine.device)
        self.lanes = Lanes(tracer, self._run_ahead)
        self._updated_to = 0

    def load(self, number: int, batch: Batch) -> LoadedBatch:
        """Stage 2."""
        check_can_cut(self._compute.couples_samples, len(batch.micro_batches))
        if self._window_cache:
            check_can_cache(len(batch.micro_batches))

        def load(span: OpenSpan) -> LoadResult:
            micro_batches = tuple(self._compute.transfer(micro_batch) for micro_batch in batch.micro_batches)
            keys = [micro_batch.keys for micro_batch in batch.micro_batches]
            return LoadResult(micro_batches, self.engine.deduplicate(*keys, window_cache=self._window_cache))

        label = self.label("train.embedding.deduplicate", "lookup", number)
        loading = LoadedBatch(number, batch, self.lanes.transfer.submit(load, label))
        self._run_ahead.keep(loading)
        return loading

    def route(self, loading: LoadedBatch) -> RoutedBatch:
        """Stage 3."""
        number = loading.number
        loaded = loading.loaded
        asked = self.lanes.communication.submit(
            lambda span: self.engine.exchange_keys(loaded.wait().source, step=number),
            self.label("train.embedding.route", "lookup", number, is_collective=True),
            after=[loaded],
        )

        def arrange(span: OpenSpan) -> RoutedKeys:
            with counted(span, self.engine.statistics.keys):
                return self.engine.arrange(loaded.wait().source, asked.wait())

        label = self.label("train.embedding.arrange", "lookup", number)
        routed = RoutedBatch(number, loading.batch, loaded, self.lanes.transfer.submit(arrange, label, after=[asked]))
        self._run_ahead.keep(routed)
        return routed

    def fetch(self, keys: RoutedBatch, buffers: RowBuffers | None = None) -> FetchedBatch[ExchangeWindow]:
        """Stage 4: rows from the store, created where they are new."""
        return self.fetch_for(ExchangeWindow, keys, buffers)

    def fetch_for(
        self, window: type[WindowT], keys: RoutedBatch, buffers: RowBuffers | None = None
    ) -> FetchedBatch[WindowT]:
        """The same, for a window of another kind."""
        return self._fetched(
            window, keys, lambda: self.engine.fetch(keys.routed.wait(), step=keys.number, buffers=buffers)
        )

    def read_ahead(self, keys: RoutedBatch) -> FetchedBatch[ExchangeWindow]:
        """Stage 4 without a promise: rows as the store holds them now."""
        return self._fetched(ExchangeWindow, keys, lambda: self.engine.read_ahead(keys.routed.wait(), step=keys.number))

    def read_late(
        self, keys: RoutedBatch, before: Sequence[RoutedBatch], *, most_late: int
    ) -> FetchedBatch[ExchangeWindow]:
        """`read_ahead`, and how late it is: which rows miss the updates of the batches before, of how many at most."""

        def read() -> WorkingSet:
            missed = [batch for batch in before if batch.number > self._updated_to]
            assert len(missed) <= most_late, f"rows of step {keys.number} miss {len(missed)} updates"
            working = self.engine.read_ahead(keys.routed.wait(), step=keys.number)
            self.engine.statistics.rows_read += sum(len(table.fetched.keys) for table in working.tables.values())
            self.engine.statistics.rows_late += sum(num_common_rows(batch.routed.wait(), working) for batch in missed)
            self.engine.statistics.most_late = max(self.engine.statistics.most_late, len(missed))
            return working

        return self._fetched(ExchangeWindow, keys, read)

    def _fetched(
        self, window: type[WindowT], keys: RoutedBatch, read: Callable[[], WorkingSet]
    ) -> FetchedBatch[WindowT]:
        def open_window(batch: FetchedBatch[WindowT]) -> WindowT:
            self._run_ahead.keep(batch)  # also where it was begun long ago
            return window(self.engine, keys.routed.wait(), batch.rows.wait())

        label = self.label("train.embedding.fetch", "lookup", keys.number)
        rows = self.lanes.lookup.submit(lambda span: _measured(span, read()), label, after=[keys.routed])
        return FetchedBatch(keys, rows, open_window)

    def find_shared(self, older: FetchedBatch[Any], newer: FetchedBatch[WindowT]) -> NextBatch[WindowT]:
        """Stage 4: which rows two batches share."""
        rows = older.rows, newer.rows
        shared = self.lanes.lookup.submit(
            lambda span: overlap_of(rows[0].wait(), rows[1].wait()),
            self.label("train.embedding.intersect", "lookup", newer.number),
            after=rows,
        )
        return NextBatch(newer, shared)

    def copy_shared(self, older: FetchedBatch[Any], following: NextBatch[Any]) -> Overlap:
        """Stage 4, on the compute lane: rows that the older batch has updated, to the newer (shared-row copy)."""
        working = following.batch.rows.wait()
        shared = following.shared.wait()
        with self.span("train.embedding.copy", "lookup") as span:
            span.rows = copy_shared(older.rows.wait(), working, shared)
        return shared

    def write_back(self, batch: FetchedBatch[Any], shared: Overlap | None) -> Future[None]:
        """Rows to the store, except those that the next batch has taken over."""
        return self.lanes.lookup.submit(
            lambda span: self.engine.write_back(_measured(span, batch.rows.wait()), shared),
            self.label("train.embedding.write_back", "lookup", batch.number),
            after=[batch.rows],
        )

    def vectors(self, batch: FetchedBatch[ExchangeWindow], micro_batch: int) -> Future[None]:
        """Exchange E of a micro-batch; whoever asks waits for the rows."""
        window = batch.window

        def receive(span: OpenSpan) -> None:
            with counted(span, self.engine.statistics.vectors):
                window.receive(micro_batch)

        label = self.label("train.embedding.vectors", "communication", batch.number, micro_batch, is_collective=True)
        return self.lanes.communication.submit(receive, label)

    def vectors_ahead(self, batch: FetchedBatch[ExchangeWindow], micro_batch: int) -> Future[None]:
        """Exchange E of a micro-batch, as soon as its rows are there."""

        def receive(span: OpenSpan) -> None:
            with counted(span, self.engine.statistics.vectors):
                batch.window.receive(micro_batch)

        label = self.label("train.embedding.vectors", "communication", batch.number, micro_batch, is_collective=True)
        return self.lanes.communication.submit(receive, label, after=[batch.rows])

    def compute(self, batch: FetchedBatch[ExchangeWindow], micro_batch: int) -> torch.Tensor:
        """Forward and backward of a micro-batch whose vectors have come; its share of the loss."""
        window = batch.window
        keys = batch.keys
        index = window.routed.micro_batches[micro_batch].index
        is_last = micro_batch == batch.num_micro_batches - 1
        early_sums = self._early_sums(batch.number) if is_last else contextlib.nullcontext()
        with self.tracer.context(micro_batch=micro_batch), self.span("train.compute", "compute"), early_sums:
            samples = keys.loaded.wait().micro_batches[micro_batch]
            rows = window.vectors(micro_batch)
            loss, gradients = self._compute.forward_backward(samples, rows, index, keys.batch.weight)
            window.keep(micro_batch, gradients)
        return loss

    def _early_sums(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Dense gradients that the last backward pass has completed, summed over ranks beside the rest of it.

        Nobody else submits meanwhile: the caller's thread, which does, is inside that pass.
        """
        label = self.label("train.dense.reduce", "communication", number, is_collective=True)

        def submit(collective: Callable[[], None]) -> None:
            self.lanes.communication.submit(lambda span: collective(), label)

        return self._dense.early_sums(submit)

    def gradients(self, batch: FetchedBatch[ExchangeWindow], micro_batch: int) -> Future[None]:
        """Exchange G of a micro-batch; owners add up."""
        window = batch.window

        def send(span: OpenSpan) -> None:
            with counted(span, self.engine.statistics.gradients):
                window.send(micro_batch)

        label = self.label("train.embedding.gradients", "communication", batch.number, micro_batch, is_collective=True)
        sent = self.lanes.communication.submit(send, label)
        if not window.routed.micro_batches[micro_batch].crossing:
            return sent
        return self._sum_over_holders(window, batch.number, micro_batch)

    def _sum_over_holders(self, window: ExchangeWindow, number: int, micro_batch: int) -> Future[None]:
        """Gradients that a micro-batch completes, to and from the other holders of their rows."""

        def exchange(span: OpenSpan) -> None:
            with counted(span, self.engine.statistics.replicas):
                self.engine.sum_over_holders(window.routed, window.working, micro_batch)

        label = self.label("train.embedding.replicas", "communication", number, micro_batch, is_collective=True)
        return self.lanes.communication.submit(exchange, label)

    def in_turn(self, now: FetchedBatch[ExchangeWindow], meanwhile: Callable[[], None]) -> Ended:
        """The exchanges and the computation of a batch, one after the other:

            communication   E1    G1 E2    G2 E3    G3        E: vectors of a micro-batch, G: its gradients
            compute            F1       F2       F3           F: its forward and backward

        `meanwhile` is called once what the first computation needs is submitted.
        """
        loss = self.zero()
        for i in range(now.num_micro_batches):
            coming = self.vectors(now, i)
            if i == 0:
                meanwhile()
            coming.wait()
            loss = loss + self.compute(now, i)
            going = self.gradients(now, i)
        return loss, going

    def overlapped(
        self, now: FetchedBatch[ExchangeWindow], meanwhile: Callable[[], None], first: Future[None] | None = None
    ) -> Ended:
        """The same inside the frozen window: parameters change only after it, so an exchange may run beside any
        computation, and only the first E and the last G are waited for where both kinds fit beside one.

            communication   E1 E2 G1 E3 G2    G3
            compute            F1    F2    F3

        first: the first E, where it was submitted ahead of the step.
        """
        loss = self.zero()
        coming = [first or self.vectors(now, 0)]
        coming += [self.vectors(now, 1)] if now.num_micro_batches > 1 else []
        meanwhile()
        for i in range(now.num_micro_batches):
            coming[i].wait()
            loss = loss + self.compute(now, i)
            going = self.gradients(now, i)
            if i + 2 < now.num_micro_batches:
                coming.append(self.vectors(now, i + 2))
        return loss, going

    def reduce_dense(self, step: TrainingStep, loss: torch.Tensor) -> Future[torch.Tensor]:
        """Dense gradients, loss and the wish to stop, summed over ranks."""
        return self.lanes.communication.submit(
            lambda span: self._dense.reduce(loss, step.wants_stop),
            self.label("train.dense.reduce", "communication", step.number, is_collective=True),
        )

    def apply_dense(self, step: TrainingStep, sums: Future[torch.Tensor]) -> StepTotals:
        """The dense weights' update, on the compute lane."""
        reduced = sums.wait()
        with self.span("train.dense.update", "compute"):
            return self._dense.apply(reduced, step.rates.dense)

    def update_rows(self, batch: FetchedBatch[Any], rates: LearningRates) -> None:
        """One optimiser step on the rows of the batch, on the compute lane."""
        with self.span("train.embedding.update", "compute"):
            self.engine.update_rows(batch.rows.wait(), learning_rate=rates.tables)
        if batch.keys.routed.wait().averaged:
            self._average(batch.number, batch.rows).wait()

    def _average(self, number: int, rows: FutureLike[WorkingSet]) -> Future[None]:
        """Copies of updated rows replaced by their mean."""

        def average(span: OpenSpan) -> None:
            with counted(span, self.engine.statistics.replicas):
                self.engine.average_over_holders(rows.wait())

        label = self.label("train.embedding.replicas", "communication", number, is_collective=True)
        return self.lanes.communication.submit(average, label, after=[rows])

    def update_in_store(self, batch: FetchedBatch[Any], rates: LearningRates, after: Future[None]) -> None:
        """For rows that were read ahead: apply their gradients to the rows that the store holds by then."""
        old = batch.window.working
        routed = batch.keys.routed

        def update(span: OpenSpan) -> WorkingSet | None:
            fresh = self.engine.fetch(routed.wait(), step=batch.number)
            self.engine.reads_ahead.ended(batch.number)
            for name, table in fresh.tables.items():
                table.gradient, table.total = old.tables[name].gradient, old.tables[name].total
            self.engine.update_rows(fresh, learning_rate=rates.tables)
            self._updated_to = batch.number
            if routed.wait().averaged:
                return fresh
            self.engine.write_back(_measured(span, fresh))
            return None  # a ticket keeps what it returns for several steps

        label = self.label("train.embedding.write_back", "lookup", batch.number)
        updated = self.lanes.lookup.submit(update, label, after=[after])
        if routed.wait().averaged:
            fresh = cast(Future[WorkingSet], updated)
            averaged = self._average(batch.number, fresh)
            write = lambda span: self.engine.write_back(_measured(span, fresh.wait()))  # noqa: E731
            self.lanes.lookup.submit(write, label, after=[averaged])

    def issue(self, collective: Callable[[], T]) -> T:
        """A collective of the caller's, in its place among the others."""
        label = Label(name="train.control", kind="other", step=0, is_collective=True)
        return self.lanes.communication.submit(lambda span: collective(), label).wait()

    @contextlib.contextmanager
    def step(self, step: TrainingStep) -> Iterator[None]:
        """The span of a step on the compute lane; after a fence, no lane is busy when it ends."""
        with self.tracer.context(lane="compute", step=step.number), self.span("train.step", "step"):
            yield
            if step.is_fence:
                self.lanes.drain()
                self.issue(lambda: self.engine.settle(step.number))
            if step.reads_end:
                self.engine.reads_ahead.forget()
        self._run_ahead.end_step()

    def keep(self, batch: FetchedBatch[Any]) -> None:
        """A batch begun long ago is used by this step."""
        self._run_ahead.keep(batch)

    def zero(self) -> torch.Tensor:
        return torch.zeros((), device=self.engine.device)

    def span(self, name: str, kind: Kind) -> OpenSpan:
        """A span of the caller's lane."""
        return self.tracer.span(name, kind=kind)

    def label(
        self, name: str, kind: Kind, number: int, micro_batch: int | None = None, *, is_collective: bool = False
    ) -> Label:
        """What a task of a batch is called in the trace."""
        return Label(name=name, kind=kind, step=number, micro_batch=micro_batch, is_collective=is_collective)


@contextlib.contextmanager
def counted(span: OpenSpan, leg: ExchangeCounters) -> Iterator[None]:
    """Rows and bytes that cross inside the block. Only one lane counts on a leg."""
    rows = leg.rows
    num_bytes = leg.bytes_sent
    yield
    span.rows = leg.rows - rows
    span.bytes = leg.bytes_sent - num_bytes


def _measured(span: OpenSpan, working: WorkingSet) -> WorkingSet:
    tables = working.tables.values()
    span.rows = sum(len(table.fetched.keys) for table in tables)
    span.bytes = sum(table.fetched.rows.nbytes for table in tables)
    return working


_KEYS_AHEAD = 2


class KeyPrefetcher:
    """Stages 2 and 3 of the batches that follow."""

    def __init__(self, machine: StageRunner, ahead: int) -> None:
        self._machine = machine
        self._ahead = ahead
        self._loading: dict[int, LoadedBatch] = {}
        self._routed: dict[int, RoutedBatch] = {}

    def look_ahead(self, step: TrainingStep, feed: LookaheadIterator) -> None:
        """Submit what may run beside this step."""
        for ahead in range(1, self._ahead + 1):
            batch = feed.peek(ahead)
            if batch is not None:
                self.begun(step.number + ahead, batch)
        batch = feed.peek(self._ahead + 1)
        number = step.number + self._ahead + 1
        if batch is not None:
            self._loading[number] = self._loaded(number, batch)

    def begun(self, number: int, batch: Batch) -> RoutedBatch:
        """The batch in flight under this number; begun now where it is another batch, or none."""
        routed = self._routed.get(number)
        if routed is None or routed.batch is not batch:
            routed = self._routed[number] = self._machine.route(self._loaded(number, batch))
            self._loading.pop(number, None)
        return routed

    def get(self, number: int) -> RoutedBatch | None:
        """The batch in flight under this number, if any."""
        return self._routed.get(number)

    def pop(self, number: int) -> RoutedBatch:
        """A batch that leaves."""
        return self._routed.pop(number)

    def _loaded(self, number: int, batch: Batch) -> LoadedBatch:
        loading = self._loading.get(number)
        return loading if loading is not None and loading.batch is batch else self._machine.load(number, batch)


class RowPrefetcher:
    """Stages 2 to 4 of the batches that follow."""

    def __init__(self, machine: StageRunner) -> None:
        self.machine = machine
        self._buffers = RowBuffers(turns=2)
        self._keys = KeyPrefetcher(machine, _KEYS_AHEAD)
        self._following: NextBatch[ExchangeWindow] | None = None

    def rows_of(self, step: TrainingStep) -> FetchedBatch[ExchangeWindow]:
        """The batch of this step with its rows: fetched during the step before, or now after a fence."""
        keys = self._keys.begun(step.number, step.batch)
        following, self._following = self._following, None
        fetched = following is not None and following.batch.keys is keys
        now = following.batch if following is not None and fetched else self.machine.fetch(keys, self._buffers)
        _ = now.window  # the rows are waited for here
        return now

    def look_ahead(self, now: FetchedBatch[ExchangeWindow], step: TrainingStep, feed: LookaheadIterator) -> None:
        """Submit what may run beside this step."""
        self._keys.look_ahead(step, feed)
        keys = self._keys.get(step.number + 1)
        if keys is not None and not step.is_fence:  # a fetch creates rows, so none may pass a fence
            self._following = self.machine.find_shared(now, self.machine.fetch(keys, self._buffers))

    def hand_over(self, now: FetchedBatch[ExchangeWindow]) -> FetchedBatch[ExchangeWindow] | None:
        """After the update: give the next batch the rows it shares, and write the others back. The next batch."""
        self._keys.pop(now.number)
        following = self._following
        if following is None or following.batch.keys.is_refused():
            self.machine.write_back(now, None)
            return None
        self.write_back(now, self.machine.copy_shared(now, following))
        return following.batch

    def write_back(self, now: FetchedBatch[ExchangeWindow], shared: Overlap) -> None:
        """Rows of a batch to the store, but for those that the next one has taken over (ordered write-back)."""
        self.machine.write_back(now, shared)
