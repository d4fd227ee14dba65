"""Tracer of one rank: records spans and counters, with so little overhead that it is always enabled.

    with tracer.context(lane="exchange", step=7), tracer.span("train.embedding.exchange", kind="communication") as span:
        span.bytes = exchange(...)

A span is an interval of work on a lane. Finished spans are stored in a ring buffer, which drops the oldest ones when it
is full. All methods are thread-safe.

`CollectiveLog` records which collectives a rank has issued, similar to PyTorch's flight recorder, and how long the host
spent in them. `EmbeddingStatistics` counts the rows and bytes that training has moved between ranks and stores;
evaluation is not counted.
"""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from nestrec.base.clock import Clock, RealClock

_LOG_LENGTH = 4096


class CollectiveLog:
    """Log of the most recent collectives of this rank, in order of issue, over all communicators."""

    def __init__(self) -> None:
        self._entries: deque[str] = deque(maxlen=_LOG_LENGTH)
        self._durations_ns: dict[str, deque[int]] = {}
        self.count = 0

    def record(self, communicator: str, operation: str) -> None:
        self._entries.append(f"{communicator}.{operation}")
        self.count += 1

    def entries(self) -> list[str]:
        return list(self._entries)

    def record_duration(self, communicator: str, duration_ns: int) -> None:
        self._durations_ns.setdefault(communicator, deque(maxlen=_LOG_LENGTH)).append(duration_ns)

    def take_durations_ns(self, communicator: str) -> list[int]:
        """Return and clear the host time of each collective of a communicator, in order of issue."""
        durations = self._durations_ns.get(communicator, deque())
        result = []
        while durations:
            result.append(durations.popleft())
        return result


@dataclass(slots=True)
class ExchangeCounters:
    """Counters of one direction of an exchange."""

    rows: int = 0
    """Number of rows or keys, including those that stay on the rank."""
    bytes_sent: int = 0
    """Bytes sent to other ranks."""

    def add(self, rows: int, bytes_sent: int) -> None:
        self.rows += rows
        self.bytes_sent += bytes_sent


@dataclass(slots=True)
class EmbeddingStatistics:
    """Embedding traffic counters of one rank."""

    keys: ExchangeCounters = field(default_factory=ExchangeCounters)
    """Unique keys sent from the requesting ranks to the owners."""
    vectors: ExchangeCounters = field(default_factory=ExchangeCounters)
    """Embeddings sent from the owners to the requesting ranks."""
    vector_bytes: int = 0
    """Bytes of the embeddings that were looked up, including those that stay on the rank."""
    gradients: ExchangeCounters = field(default_factory=ExchangeCounters)
    """Gradients sent to the owners."""
    within_host: ExchangeCounters = field(default_factory=ExchangeCounters)
    """Embeddings and gradients exchanged within a host by the hierarchical all-to-all; the other counters are then for
    traffic between hosts."""
    replicas: ExchangeCounters = field(default_factory=ExchangeCounters)
    """Gradients or rows sent to the other replicas of a shard."""
    rows_fetched: int = 0
    """Unique rows that the owner read from its stores."""
    rows_written: int = 0
    """Rows written back to the stores."""
    window_bytes: int = 0
    """Maximum size of a batch's embeddings and gradients in the window cache, in bytes."""
    rows_read: int = 0
    """Rows read without waiting for preceding updates (semi-asynchronous schedule)."""
    rows_late: int = 0
    """Rows read without waiting although a pending update was about to change them (stale rows)."""
    most_late: int = 0
    """Maximum staleness of a row: number of updates that it had missed."""


Kind = Literal["compute", "lookup", "communication", "wait", "step", "other"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """An interval of work, or of waiting for work, on a lane of a rank. Times are integers, so sums are exact."""

    id: int
    """Id of the span, unique on its rank."""
    name: str
    """Stable dotted name, such as `train.embedding.exchange`."""
    kind: Kind
    """Category of its time. A `step` span covers a complete step on its compute lane; `other` is not counted."""
    lane: str
    """Name of the lane. A lane runs its tasks in order; its spans are nested or sequential."""
    start_ns: int
    """Start time on the rank's clock, in nanoseconds."""
    end_ns: int
    """End time on the rank's clock, in nanoseconds."""
    rank: int = 0
    """Rank on which it ran."""
    step: int | None = None
    """Step of the batch that the work is for; with pipelining not always the step being computed."""
    micro_batch: int | None = None
    """Index of the micro-batch within the batch."""
    bytes: int = 0
    """Number of bytes moved."""
    rows: int = 0
    """Number of table rows moved."""
    awaits: int | None = None
    """Id of the span that a wait waits for; None for other kinds."""
    is_collective: bool = False
    """Whether all ranks take part; time before the last rank enters is straggling."""

    @property
    def start_s(self) -> float:
        return self.start_ns * 1e-9

    @property
    def end_s(self) -> float:
        return self.end_ns * 1e-9

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(slots=True)
class OpenSpan:
    """A running span; `bytes` and `rows` can be set until it ends."""

    tracer: "Tracer"
    id: int
    name: str
    kind: Kind
    lane: str
    step: int | None
    micro_batch: int | None
    bytes: int
    rows: int
    awaits: int | None
    is_collective: bool
    start: Any = 0

    def __enter__(self) -> Self:
        self.start = self.tracer.stamp(self.lane)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.tracer.finish(self, self.tracer.stamp(self.lane))

    def closed(self, start_ns: int, end_ns: int) -> Span:
        """Return the finished span."""
        return Span(
            id=self.id,
            name=self.name,
            kind=self.kind,
            lane=self.lane,
            start_ns=start_ns,
            end_ns=end_ns,
            rank=self.tracer.rank,
            step=self.step,
            micro_batch=self.micro_batch,
            bytes=self.bytes,
            rows=self.rows,
            awaits=self.awaits,
            is_collective=self.is_collective,
        )


class _SpanDefaults(threading.local):
    """Lane, step and micro-batch of a thread's spans unless set explicitly."""

    lane = "main"
    step: int | None = None
    micro_batch: int | None = None


class Tracer:
    """Recorder of spans and counters of one rank. Thread-safe.

    Args:
        rank: Rank that the spans belong to.
        clock: Source of host times.
        capacity: Maximum number of finished spans in the ring buffer.
    """

    def __init__(self, *, rank: int = 0, clock: Clock | None = None, capacity: int = 1 << 17):
        self.rank = rank
        self._clock = clock or RealClock()
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._ids = itertools.count()
        self._defaults = _SpanDefaults()
        self._counters: dict[str, int] = {}
        self._counters_lock = threading.Lock()

    def now_ns(self) -> int:
        return round(self._clock.now_s() * 1e9)

    def stamp(self, lane: str) -> Any:
        """Return the current time of a lane, in the form that `finish` accepts."""
        return self.now_ns()

    def finish(self, span: OpenSpan, end: Any) -> None:
        """Record a span that ends at this time stamp."""
        self.record(span.closed(span.start, end))

    def new_id(self) -> int:
        """Return an id for a span that starts later, so that a wait can refer to it beforehand."""
        return next(self._ids)

    def span(
        self,
        name: str,
        *,
        kind: Kind = "other",
        lane: str | None = None,
        step: int | None = None,
        micro_batch: int | None = None,
        bytes: int = 0,
        rows: int = 0,
        awaits: int | None = None,
        is_collective: bool = False,
        id: int | None = None,
    ) -> OpenSpan:
        """Return a span that measures a `with` block; lane, step and micro-batch default to those of `context`."""
        defaults = self._defaults
        return OpenSpan(
            tracer=self,
            id=next(self._ids) if id is None else id,
            name=name,
            kind=kind,
            lane=defaults.lane if lane is None else lane,
            step=defaults.step if step is None else step,
            micro_batch=defaults.micro_batch if micro_batch is None else micro_batch,
            bytes=bytes,
            rows=rows,
            awaits=awaits,
            is_collective=is_collective,
        )

    def wait(self, awaits: int | None, *, name: str = "wait") -> OpenSpan:
        """Return a span that measures waiting for the end of the span with this id."""
        return self.span(name, kind="wait", awaits=awaits)

    def depends_on(self, awaited: int) -> None:
        """Hook for subclasses: called for every dependency on a span, even if the span had already ended."""

    @contextlib.contextmanager
    def context(
        self, *, lane: str | None = None, step: int | None = None, micro_batch: int | None = None
    ) -> Iterator[None]:
        """Set the default lane, step and micro-batch of the spans that this thread creates inside the block."""
        defaults = self._defaults
        previous = (defaults.lane, defaults.step, defaults.micro_batch)
        defaults.lane = previous[0] if lane is None else lane
        defaults.step = previous[1] if step is None else step
        defaults.micro_batch = previous[2] if micro_batch is None else micro_batch
        try:
            yield
        finally:
            defaults.lane, defaults.step, defaults.micro_batch = previous

    def record(self, span: Span) -> None:
        """Add a span whose times were measured elsewhere, for example by device events."""
        self._spans.append(span)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        with self._counters_lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def counters(self) -> dict[str, int]:
        """Return a copy of all counters."""
        with self._counters_lock:
            return dict(self._counters)

    def spans(self) -> list[Span]:
        """Return the finished spans, oldest first."""
        while True:
            try:
                return list(self._spans)
            except RuntimeError:  # another thread added a span during the copy
                continue

    def take(self) -> list[Span]:
        """Remove and return the finished spans."""
        result = []
        with contextlib.suppress(IndexError):
            while True:
                result.append(self._spans.popleft())
        return result


class NullTracer(Tracer):
    """Tracer that creates spans and ids but records nothing, so that callers need no separate code path."""

    def now_ns(self) -> int:
        return 0

    def record(self, span: Span) -> None:
        pass

    def count(self, name: str, amount: int = 1) -> None:
        pass
