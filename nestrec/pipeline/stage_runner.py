"""Runs the stages of a batch on their lanes, and prefetches keys and rows of the following batches.

`StageRunner` submits the stages of training. A schedule decides when each is submitted, and which futures it waits for:

stage                 lane             work
1 data prefetch       data loader      samples are collated and clustered (nestrec.data.batch_loader)
2 transfer            transfer         tensors are copied to the device, keys are deduplicated
3 key routing         communication    keys are exchanged (all-to-all); exchange plans are built on `transfer`
4 retrieval           lookup           rows are read from the store into a buffer; rows shared with the batch before
5 forward, backward   compute          on the caller's thread; embedding and gradient exchanges and the dense all-reduce
                                       run on `communication`
  write-back          lookup           rows are written to the store

While batch t trains, the following batches run through the earlier stages:

- `KeyPrefetcher` exchanges the keys of t + ahead and loads the batch after that. Loading and key exchange of a batch
  are in different steps: otherwise the exchange would wait for the loading in the communication lane, and the gradients
  of batch t would wait after it.
- `RowPrefetcher` (dual buffer) fetches the rows of t+1, exchanges the keys of t+2 and loads t+3.

    lookup lane      write back t-1 | fetch t+1 | intersect t with t+1
    compute lane     ... batch t ... update t | copy rows of both from buffer t to buffer t+1 | batch t+1 ...

The lookup lane is a FIFO queue: rows of t-1 are in the store before t+1 reads them, and write-backs keep their order.
Rows that were copied to the buffer of t+1 are not written back by t.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch

from nestrec.base.thread_team import FutureLike
from nestrec.data.batch_loader import Batch
from nestrec.embedding import EmbeddingEngine, RoutedKeys, WorkingSet
from nestrec.embedding.routing.batch_overlap import Overlap, copy_shared_rows, num_common_rows, overlap_of
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
    check_can_split,
)
from nestrec.trace import Kind, OpenSpan, Tracer
from nestrec.trace.tracer import ExchangeCounters

T = TypeVar("T")
WindowT = TypeVar("WindowT", bound=ExchangeWindow)


BatchOutcome = tuple[torch.Tensor, Future[None]]
"""Loss of a batch on this rank, and the future of its last gradient exchange."""


class StageRunner:
    """Submits the stages of a step to their lanes.

    Args:
        engine: Embedding tables.
        compute: Forward and backward pass of a micro-batch.
        dense: Optimizer of the dense weights.
        tracer: Tracer of the stages.
        window_cache: Whether a row that several micro-batches use is exchanged once per batch.
    """

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
        """Submit stage 2 of a batch: copy it to the device and deduplicate its keys."""
        check_can_split(self._compute.couples_samples, len(batch.micro_batches))
        if self._window_cache:
            check_can_cache(len(batch.micro_batches))

        def load(span: OpenSpan) -> LoadResult:
            micro_batches = tuple(self._compute.transfer(micro_batch) for micro_batch in batch.micro_batches)
            keys = [micro_batch.keys for micro_batch in batch.micro_batches]
            return LoadResult(micro_batches, self.engine.deduplicate(*keys, window_cache=self._window_cache))

        label = self.label("train.embedding.deduplicate", "lookup", number)
        loading = LoadedBatch(number, batch, self.lanes.transfer.submit(load, label))
        self._run_ahead.keep_alive(loading)
        return loading

    def route(self, loading: LoadedBatch) -> RoutedBatch:
        """Submit stage 3 of a batch: exchange its keys and build its exchange plan."""
        number = loading.number
        loaded = loading.loaded
        received = self.lanes.communication.submit(
            lambda span: self.engine.exchange_keys(loaded.result().source, step=number),
            self.label("train.embedding.exchange_keys", "lookup", number, is_collective=True),
            after=[loaded],
        )

        def build_plan(span: OpenSpan) -> RoutedKeys:
            with count_exchange(span, self.engine.statistics.keys):
                return self.engine.build_exchange_plan(loaded.result().source, received.result())

        label = self.label("train.embedding.arrange", "lookup", number)
        routed = RoutedBatch(
            number, loading.batch, loaded, self.lanes.transfer.submit(build_plan, label, after=[received])
        )
        self._run_ahead.keep_alive(routed)
        return routed

    def fetch(self, keys: RoutedBatch, buffers: RowBuffers | None = None) -> FetchedBatch[ExchangeWindow]:
        """Submit stage 4 of a batch: read its rows from the store, and create rows of new keys."""
        return self.fetch_with_window(ExchangeWindow, keys, buffers)

    def fetch_with_window(
        self, window: type[WindowT], keys: RoutedBatch, buffers: RowBuffers | None = None
    ) -> FetchedBatch[WindowT]:
        """Same as `fetch`, but with another class of exchange window."""
        return self._submit_read(
            window, keys, lambda: self.engine.fetch_rows(keys.routed.result(), step=keys.number, buffers=buffers)
        )

    def prefetch_rows(self, keys: RoutedBatch) -> FetchedBatch[ExchangeWindow]:
        """Submit stage 4 of a batch without waiting for pending updates: reads rows as they are in the store now."""
        return self._submit_read(
            ExchangeWindow, keys, lambda: self.engine.prefetch_rows(keys.routed.result(), step=keys.number)
        )

    def prefetch_stale(
        self, keys: RoutedBatch, before: Sequence[RoutedBatch], *, max_staleness: int
    ) -> FetchedBatch[ExchangeWindow]:
        """Same as `prefetch_rows`, but counts stale rows.

        Args:
            keys: The batch.
            before: Earlier batches, whose updates the rows may miss.
            max_staleness: Maximum number of updates that a row may miss; more are an internal error.
        """

        def read() -> WorkingSet:
            missed = [batch for batch in before if batch.number > self._updated_to]
            assert len(missed) <= max_staleness, f"rows of step {keys.number} miss {len(missed)} updates"
            working = self.engine.prefetch_rows(keys.routed.result(), step=keys.number)
            self.engine.statistics.rows_read += sum(len(table.fetched.keys) for table in working.tables.values())
            self.engine.statistics.rows_late += sum(num_common_rows(batch.routed.result(), working) for batch in missed)
            self.engine.statistics.most_late = max(self.engine.statistics.most_late, len(missed))
            return working

        return self._submit_read(ExchangeWindow, keys, read)

    def _submit_read(
        self, window: type[WindowT], keys: RoutedBatch, read: Callable[[], WorkingSet]
    ) -> FetchedBatch[WindowT]:
        def open_window(batch: FetchedBatch[WindowT]) -> WindowT:
            self._run_ahead.keep_alive(batch)  # again, because the batch may have been started several steps before
            return window(self.engine, keys.routed.result(), batch.rows.result())

        label = self.label("train.embedding.read_rows", "lookup", keys.number)
        rows = self.lanes.lookup.submit(lambda span: _set_span_size(span, read()), label, after=[keys.routed])
        return FetchedBatch(keys, rows, open_window)

    def find_shared(self, older: FetchedBatch[Any], newer: FetchedBatch[WindowT]) -> NextBatch[WindowT]:
        """Submit the search for rows that two batches share (stage 4)."""
        rows = older.rows, newer.rows
        shared = self.lanes.lookup.submit(
            lambda span: overlap_of(rows[0].result(), rows[1].result()),
            self.label("train.embedding.intersect", "lookup", newer.number),
            after=rows,
        )
        return NextBatch(newer, shared)

    def copy_shared(self, older: FetchedBatch[Any], following: NextBatch[Any]) -> Overlap:
        """Copy shared rows, which the older batch has updated, to the buffer of the newer one, on the compute lane."""
        working = following.batch.rows.result()
        shared = following.shared.result()
        with self.span("train.embedding.copy_shared_rows", "lookup") as span:
            span.rows = copy_shared_rows(older.rows.result(), working, shared)
        return shared

    def write_back(self, batch: FetchedBatch[Any], shared: Overlap | None) -> Future[None]:
        """Submit the write-back of a batch's rows to the store, except rows that were copied to the next batch."""
        return self.lanes.lookup.submit(
            lambda span: self.engine.write_back(_set_span_size(span, batch.rows.result()), shared),
            self.label("train.embedding.write_back", "lookup", batch.number),
            after=[batch.rows],
        )

    def exchange_vectors(self, batch: FetchedBatch[ExchangeWindow], micro_batch: int) -> Future[None]:
        """Submit the embedding exchange of a micro-batch (E). The caller's thread waits for the rows."""
        window = batch.window

        def receive(span: OpenSpan) -> None:
            with count_exchange(span, self.engine.statistics.vectors):
                window.receive(micro_batch)

        label = self.label(
            "train.embedding.exchange_vectors", "communication", batch.number, micro_batch, is_collective=True
        )
        return self.lanes.communication.submit(receive, label)

    def exchange_vectors_early(self, batch: FetchedBatch[ExchangeWindow], micro_batch: int) -> Future[None]:
        """Same as `exchange_vectors`, but the lane waits for the rows and not the caller's thread."""

        def receive(span: OpenSpan) -> None:
            with count_exchange(span, self.engine.statistics.vectors):
                batch.window.receive(micro_batch)

        label = self.label(
            "train.embedding.exchange_vectors", "communication", batch.number, micro_batch, is_collective=True
        )
        return self.lanes.communication.submit(receive, label, after=[batch.rows])

    def compute(self, batch: FetchedBatch[ExchangeWindow], micro_batch: int) -> torch.Tensor:
        """Run the forward and backward pass of a micro-batch whose embeddings were received.

        Returns:
            The addend of the micro-batch to the loss.
        """
        window = batch.window
        keys = batch.keys
        index = window.routed.micro_batches[micro_batch].index
        is_last = micro_batch == batch.num_micro_batches - 1
        backward_context = self._overlap_backward(batch.number) if is_last else contextlib.nullcontext()
        with (
            self.tracer.context(micro_batch=micro_batch),
            self.span("train.forward_backward", "compute"),
            backward_context,
        ):
            samples = keys.loaded.result().micro_batches[micro_batch]
            rows = window.vectors(micro_batch)
            loss, gradients = self._compute.forward_backward(samples, rows, index, keys.batch.weight)
            window.store_gradients(micro_batch, gradients)
        return loss

    def _overlap_backward(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Return a context that all-reduces completed dense gradients during the last backward pass of a step.

        Only the caller's thread submits collectives, and it is inside that pass, so their order is well defined.
        """
        label = self.label("train.dense.all_reduce", "communication", number, is_collective=True)

        def submit(collective: Callable[[], None]) -> None:
            self.lanes.communication.submit(lambda span: collective(), label)

        return self._dense.overlap_backward(submit)

    def exchange_gradients(self, batch: FetchedBatch[ExchangeWindow], micro_batch: int) -> Future[None]:
        """Submit the gradient exchange of a micro-batch (G); the owners of the rows sum the gradients."""
        window = batch.window

        def send(span: OpenSpan) -> None:
            with count_exchange(span, self.engine.statistics.gradients):
                window.send(micro_batch)

        label = self.label(
            "train.embedding.exchange_gradients", "communication", batch.number, micro_batch, is_collective=True
        )
        sent = self.lanes.communication.submit(send, label)
        if not window.routed.micro_batches[micro_batch].replica_rows:
            return sent
        return self._sum_over_replicas(window, batch.number, micro_batch)

    def _sum_over_replicas(self, window: ExchangeWindow, number: int, micro_batch: int) -> Future[None]:
        """Submit the all-reduce over row replicas of the gradients that a micro-batch completes."""

        def exchange(span: OpenSpan) -> None:
            with count_exchange(span, self.engine.statistics.replicas):
                self.engine.all_reduce_replica_gradients(window.routed, window.working, micro_batch)

        label = self.label("train.embedding.sync_replicas", "communication", number, micro_batch, is_collective=True)
        return self.lanes.communication.submit(exchange, label)

    def run_sequential(self, now: FetchedBatch[ExchangeWindow], prefetch: Callable[[], None]) -> BatchOutcome:
        """Run the exchanges and the computation of a batch sequentially.

            communication   E1    G1 E2    G2 E3    G3        E: embedding exchange, G: gradient exchange
            compute            F1       F2       F3           F: forward and backward of a micro-batch

        Args:
            now: Batch of this step.
            prefetch: Function that submits stages of the following batches; called after the first E is submitted.
        """
        loss = self.zero()
        for i in range(now.num_micro_batches):
            received = self.exchange_vectors(now, i)
            if i == 0:
                prefetch()
            received.result()
            loss = loss + self.compute(now, i)
            sent = self.exchange_gradients(now, i)
        return loss, sent

    def run_overlapped(
        self, now: FetchedBatch[ExchangeWindow], prefetch: Callable[[], None], first: Future[None] | None = None
    ) -> BatchOutcome:
        """Run the exchanges of a batch overlapped with its computation (frozen window).

        Parameters change only after the window, so an exchange can overlap with any computation. Only the first E and
        the last G are exposed, if the exchanges are shorter than the computations.

            communication   E1 E2 G1 E3 G2    G3
            compute            F1    F2    F3

        Args:
            now: Batch of this step.
            prefetch: Function that submits stages of the following batches.
            first: The first E, if it was submitted before the step.
        """
        loss = self.zero()
        received = [first or self.exchange_vectors(now, 0)]
        received += [self.exchange_vectors(now, 1)] if now.num_micro_batches > 1 else []
        prefetch()
        for i in range(now.num_micro_batches):
            received[i].result()
            loss = loss + self.compute(now, i)
            sent = self.exchange_gradients(now, i)
            if i + 2 < now.num_micro_batches:
                received.append(self.exchange_vectors(now, i + 2))
        return loss, sent

    def reduce_dense(self, step: TrainingStep, loss: torch.Tensor) -> Future[torch.Tensor]:
        """Submit the all-reduce of dense gradients, loss and stop requests."""
        return self.lanes.communication.submit(
            lambda span: self._dense.reduce(loss, step.stop_requested),
            self.label("train.dense.all_reduce", "communication", step.number, is_collective=True),
        )

    def apply_dense(self, step: TrainingStep, sums: Future[torch.Tensor]) -> StepTotals:
        """Update the dense weights, on the compute lane."""
        reduced = sums.result()
        with self.span("train.dense.update", "compute"):
            return self._dense.apply(reduced, step.rates.dense)

    def update_rows(self, batch: FetchedBatch[Any], rates: LearningRates) -> None:
        """Run one optimizer step on the rows of the batch, on the compute lane."""
        with self.span("train.embedding.update", "compute"):
            self.engine.update_rows(batch.rows.result(), learning_rate=rates.tables)
        if batch.keys.routed.result().averaged:
            self._average(batch.number, batch.rows).result()

    def _average(self, number: int, rows: FutureLike[WorkingSet]) -> Future[None]:
        """Submit the averaging of the replicas of updated rows."""

        def average(span: OpenSpan) -> None:
            with count_exchange(span, self.engine.statistics.replicas):
                self.engine.average_replicas(rows.result())

        label = self.label("train.embedding.sync_replicas", "communication", number, is_collective=True)
        return self.lanes.communication.submit(average, label, after=[rows])

    def update_in_store(self, batch: FetchedBatch[Any], rates: LearningRates, after: Future[None]) -> None:
        """Submit the update of prefetched (stale) rows: read the current rows, apply the gradients, write them back.

        Args:
            batch: The batch.
            rates: Learning rates of its step.
            after: Future of the last gradient exchange.
        """
        old = batch.window.working
        routed = batch.keys.routed

        def update(span: OpenSpan) -> WorkingSet | None:
            fresh = self.engine.fetch_rows(routed.result(), step=batch.number)
            self.engine.prefetched_rows.release(batch.number)
            for name, table in fresh.tables.items():
                table.gradient, table.total = old.tables[name].gradient, old.tables[name].total
            self.engine.update_rows(fresh, learning_rate=rates.tables)
            self._updated_to = batch.number
            if routed.result().averaged:
                return fresh
            self.engine.write_back(_set_span_size(span, fresh))
            return None  # a future would keep its result alive for several steps

        label = self.label("train.embedding.write_back", "lookup", batch.number)
        updated = self.lanes.lookup.submit(update, label, after=[after])
        if routed.result().averaged:
            fresh = cast(Future[WorkingSet], updated)
            averaged = self._average(batch.number, fresh)
            write = lambda span: self.engine.write_back(_set_span_size(span, fresh.result()))  # noqa: E731
            self.lanes.lookup.submit(write, label, after=[averaged])

    def submit_collective(self, collective: Callable[[], T]) -> T:
        """Run a collective of the caller on the communication lane, and wait for it."""
        label = Label(name="train.control", kind="other", step=0, is_collective=True)
        return self.lanes.communication.submit(lambda span: collective(), label).result()

    @contextlib.contextmanager
    def step(self, step: TrainingStep) -> Iterator[None]:
        """Return the context of a step, with its trace span; if the step is a fence, all lanes are idle at the end."""
        with self.tracer.context(lane="compute", step=step.number), self.span("train.step", "step"):
            yield
            if step.is_fence:
                self.lanes.drain()
                self.submit_collective(lambda: self.engine.synchronize_replicas(step.number))
            if step.must_read_updated_rows:
                self.engine.prefetched_rows.clear()
        self._run_ahead.end_step()

    def keep_alive(self, batch: FetchedBatch[Any]) -> None:
        """Keep a batch alive for this step, which may have been started several steps before."""
        self._run_ahead.keep_alive(batch)

    def zero(self) -> torch.Tensor:
        return torch.zeros((), device=self.engine.device)

    def span(self, name: str, kind: Kind) -> OpenSpan:
        """Return a trace span on the caller's lane."""
        return self.tracer.span(name, kind=kind)

    def label(
        self, name: str, kind: Kind, number: int, micro_batch: int | None = None, *, is_collective: bool = False
    ) -> Label:
        """Return the trace label of a task of a batch."""
        return Label(name=name, kind=kind, step=number, micro_batch=micro_batch, is_collective=is_collective)


@contextlib.contextmanager
def count_exchange(span: OpenSpan, counters: ExchangeCounters) -> Iterator[None]:
    """Set the rows and bytes of a span to those transferred inside the block; only one lane may use `counters`."""
    rows = counters.rows
    num_bytes = counters.bytes_sent
    yield
    span.rows = counters.rows - rows
    span.bytes = counters.bytes_sent - num_bytes


def _set_span_size(span: OpenSpan, working: WorkingSet) -> WorkingSet:
    tables = working.tables.values()
    span.rows = sum(len(table.fetched.keys) for table in tables)
    span.bytes = sum(table.fetched.rows.nbytes for table in tables)
    return working


_KEYS_AHEAD = 2


class KeyPrefetcher:
    """Prefetches the keys of following batches: submits their stages 2 and 3.

    Args:
        runner: Runner of the stages.
        ahead: Number of batches after the current one whose keys are exchanged.
    """

    def __init__(self, runner: StageRunner, ahead: int) -> None:
        self._runner = runner
        self._ahead = ahead
        self._loading: dict[int, LoadedBatch] = {}
        self._routed: dict[int, RoutedBatch] = {}

    def look_ahead(self, step: TrainingStep, feed: LookaheadIterator) -> None:
        """Submit the stages of following batches that overlap with this step."""
        for ahead in range(1, self._ahead + 1):
            batch = feed.peek(ahead)
            if batch is not None:
                self.get_or_start(step.number + ahead, batch)
        batch = feed.peek(self._ahead + 1)
        number = step.number + self._ahead + 1
        if batch is not None:
            self._loading[number] = self._get_or_load(number, batch)

    def get_or_start(self, number: int, batch: Batch) -> RoutedBatch:
        """Return the batch in flight of this step; start it now if it is missing or a different batch."""
        routed = self._routed.get(number)
        if routed is None or routed.batch is not batch:
            routed = self._routed[number] = self._runner.route(self._get_or_load(number, batch))
            self._loading.pop(number, None)
        return routed

    def get(self, number: int) -> RoutedBatch | None:
        """Return the batch in flight of this step, or None."""
        return self._routed.get(number)

    def pop(self, number: int) -> RoutedBatch:
        """Remove and return the batch of a step."""
        return self._routed.pop(number)

    def _get_or_load(self, number: int, batch: Batch) -> LoadedBatch:
        loading = self._loading.get(number)
        return loading if loading is not None and loading.batch is batch else self._runner.load(number, batch)


class RowPrefetcher:
    """Prefetches the rows of the next batch and the keys of the one after it (dual buffer): stages 2 to 4.

    Args:
        runner: Runner of the stages.
    """

    def __init__(self, runner: StageRunner) -> None:
        self.runner = runner
        self._buffers = RowBuffers(turns=2)
        self._keys = KeyPrefetcher(runner, _KEYS_AHEAD)
        self._following: NextBatch[ExchangeWindow] | None = None

    def rows_of(self, step: TrainingStep) -> FetchedBatch[ExchangeWindow]:
        """Return the batch of this step with its rows: fetched during the step before, or now after a fence."""
        keys = self._keys.get_or_start(step.number, step.batch)
        following, self._following = self._following, None
        fetched = following is not None and following.batch.keys is keys
        now = following.batch if following is not None and fetched else self.runner.fetch(keys, self._buffers)
        _ = now.window  # waits for the rows
        return now

    def look_ahead(self, now: FetchedBatch[ExchangeWindow], step: TrainingStep, feed: LookaheadIterator) -> None:
        """Submit the stages of following batches that overlap with this step."""
        self._keys.look_ahead(step, feed)
        keys = self._keys.get(step.number + 1)
        if keys is not None and not step.is_fence:  # a fetch creates rows, so it must not run before a fence
            self._following = self.runner.find_shared(now, self.runner.fetch(keys, self._buffers))

    def copy_shared_rows(self, now: FetchedBatch[ExchangeWindow]) -> FetchedBatch[ExchangeWindow] | None:
        """After the update, copy shared rows to the next batch and write the others back; return the next batch."""
        self._keys.pop(now.number)
        following = self._following
        if following is None or following.batch.keys.has_batch_error():
            self.runner.write_back(now, None)
            return None
        self.write_back(now, self.runner.copy_shared(now, following))
        return following.batch

    def write_back(self, now: FetchedBatch[ExchangeWindow], shared: Overlap) -> None:
        """Submit the write-back of a batch's rows, except rows that were copied to the next batch (in order)."""
        self.runner.write_back(now, shared)
