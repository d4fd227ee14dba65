"""Records spans and counters of one rank, cheaply enough to be always on.

    with tracer.context(lane="exchange", step=7), tracer.span("train.embedding.exchange", kind="communication") as span:
        span.bytes = exchange(...)

Finished spans go into a ring buffer; the oldest are dropped when it is full. All methods may be called from any thread.

Which collectives a rank has issued, in order, and how long the host spent in them.

What training has moved between ranks and stores so far; evaluation is not counted.

A span: something that ran on a lane from one time to another.
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
    """The last collectives that this rank issued, in order, over all communicators."""

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
        """What the host spent in each collective of a communicator since the last call, in the order of issue."""
        durations = self._durations_ns.get(communicator, deque())
        taken = []
        while durations:
            taken.append(durations.popleft())
        return taken


@dataclass(slots=True)
class ExchangeCounters:
    """One direction of one exchange."""

    rows: int = 0
    """Rows or keys, those that stay on the rank included."""
    bytes_sent: int = 0
    """Bytes that left this rank for another."""

    def add(self, rows: int, bytes_sent: int) -> None:
        self.rows += rows
        self.bytes_sent += bytes_sent


@dataclass(slots=True)
class EmbeddingStatistics:
    """Counters of one rank."""

    keys: ExchangeCounters = field(default_factory=ExchangeCounters)
    """Distinct keys of the sources, on their way to the owners."""
    vectors: ExchangeCounters = field(default_factory=ExchangeCounters)
    """Vectors, on their way from the owners."""
    vector_bytes: int = 0
    """Bytes of the vectors looked up, those that stay on the rank included."""
    gradients: ExchangeCounters = field(default_factory=ExchangeCounters)
    """Gradients, on their way to the owners."""
    within_host: ExchangeCounters = field(default_factory=ExchangeCounters)
    """Where exchanges go by hosts: vectors and gradients inside a host. Keys, vectors and gradients are then those
    between hosts."""
    replicas: ExchangeCounters = field(default_factory=ExchangeCounters)
    """Gradients or rows, on their way to the other holders of a shard."""
    rows_fetched: int = 0
    """Distinct rows that the owner took from its stores."""
    rows_written: int = 0
    """Rows that went back to the stores."""
    window_bytes: int = 0
    """Most bytes that a batch's vectors and gradients took in the window cache."""
    rows_read: int = 0
    """Rows that were read without waiting for the updates before them (semi_async)."""
    rows_late: int = 0
    """Those of them that an awaited update was about to change."""
    most_late: int = 0
    """Most updates that a row has missed."""


Kind = Literal["compute", "lookup", "communication", "wait", "step", "other"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A piece of work, or a wait for one, on a lane of a rank. Times are whole nanoseconds, so sums are exact."""

    id: int
    """Unique on its rank."""
    name: str
    """Stable and dotted, as `train.embedding.exchange`."""
    kind: Kind
    """What its time counts as. A `step` span spans a whole step on its compute lane; `other` does not count."""
    lane: str
    """A lane runs its tasks in order; spans of one lane are nested or follow each other."""
    start_ns: int
    """Time of its start on the rank's clock."""
    end_ns: int
    """Time of its end."""
    rank: int = 0
    """Where it ran."""
    step: int | None = None
    """Batch that it worked for; with pipelining not always the one being computed."""
    micro_batch: int | None = None
    """Part of the batch."""
    bytes: int = 0
    """Bytes moved."""
    rows: int = 0
    """Rows of tables moved."""
    awaits: int | None = None
    """For a wait: the id of the span that it waited for the end of."""
    is_collective: bool = False
    """All ranks take part: the time before the last of them enters is straggling."""

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
    """A span that is running; `bytes` and `rows` may be set until it ends."""

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
        """The finished span."""
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


class _Defaults(threading.local):
    """What spans of a thread belong to when they do not say."""

    lane = "main"
    step: int | None = None
    micro_batch: int | None = None


class Tracer:
    """Spans and counters of one rank."""

    def __init__(self, *, rank: int = 0, clock: Clock | None = None, capacity: int = 1 << 17):
        """`capacity`: number of finished spans to hold."""
        self.rank = rank
        self._clock = clock or RealClock()
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._ids = itertools.count()
        self._defaults = _Defaults()
        self._counters: dict[str, int] = {}
        self._counters_lock = threading.Lock()

    def now_ns(self) -> int:
        return round(self._clock.now_s() * 1e9)

    def stamp(self, lane: str) -> Any:
        """The time as it is for a lane, in whatever form `finish` takes it."""
        return self.now_ns()

    def finish(self, span: OpenSpan, end: Any) -> None:
        """Record a span that ends with this stamp."""
        self.record(span.closed(span.start, end))

    def new_id(self) -> int:
        """An id for a span that will start later, so that a wait can name it before."""
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
        """A span around a `with` block; lane, step and micro-batch come from `context` when not given."""
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
        """A span around waiting for the end of the span with this id."""
        return self.span(name, kind="wait", awaits=awaits)

    def depends_on(self, awaited: int) -> None:
        """Told of every wait for the end of a span, also of those that were over at once. Kept by recorders only."""

    @contextlib.contextmanager
    def context(
        self, *, lane: str | None = None, step: int | None = None, micro_batch: int | None = None
    ) -> Iterator[None]:
        """Spans made by this thread inside the block belong to this lane, step and micro-batch."""
        defaults = self._defaults
        before = (defaults.lane, defaults.step, defaults.micro_batch)
        defaults.lane = before[0] if lane is None else lane
        defaults.step = before[1] if step is None else step
        defaults.micro_batch = before[2] if micro_batch is None else micro_batch
        try:
            yield
        finally:
            defaults.lane, defaults.step, defaults.micro_batch = before

    def record(self, span: Span) -> None:
        """Add a span whose times were measured elsewhere, say by device events."""
        self._spans.append(span)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        with self._counters_lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def counters(self) -> dict[str, int]:
        """A copy of all counters."""
        with self._counters_lock:
            return dict(self._counters)

    def spans(self) -> list[Span]:
        """Finished spans, the oldest first."""
        while True:
            try:
                return list(self._spans)
            except RuntimeError:  # another thread added one meanwhile
                continue

    def take(self) -> list[Span]:
        """Finished spans, removed from the buffer."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._spans.popleft())
        return taken


class NullTracer(Tracer):
    """Hands out spans and ids, so that callers need no second path, and keeps nothing."""

    def now_ns(self) -> int:
        return 0

    def record(self, span: Span) -> None:
        pass

    def count(self, name: str, amount: int = 1) -> None:
        pass
