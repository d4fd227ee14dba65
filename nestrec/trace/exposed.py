"""Time breakdown of a training step: step = compute + exposed lookup + exposed communication + idle.

A step is a `step` span. The activity of its lane determines how each moment is counted:

    work on the lane itself       the kind of the work
    a wait                        the kind of the work on the awaited chain at that time: the awaited span, or what its
                                  lane did before it could start, recursively if that was itself a wait
    a collective, before the
    last rank has entered it      idle (straggling)
    nothing                       idle

Times are integer nanoseconds, so the parts add up to the step exactly. Nothing is estimated.
"""

import bisect
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from nestrec.trace.tracer import Kind, Span

_COUNTED = ("compute", "lookup", "communication", "wait")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """Time breakdown of a step on one rank, in nanoseconds."""

    compute_ns: int = 0
    """Time in which the compute lane computed."""
    exposed_lookup_ns: int = 0
    """Time in which the compute lane waited for an embedding lookup."""
    exposed_communication_ns: int = 0
    """Time in which the compute lane waited for communication."""
    idle_ns: int = 0
    """Remaining time: stragglers, latencies, and no work."""

    @property
    def step_ns(self) -> int:
        """Total time of the step."""
        return self.compute_ns + self.exposed_lookup_ns + self.exposed_communication_ns + self.idle_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class RawParts:
    """Work time of a step in nanoseconds, hidden or exposed, without straggling."""

    compute_ns: int = 0
    lookup_ns: int = 0
    communication_ns: int = 0


class _ChargedTime:
    """Nanoseconds attributed to kinds and names of spans."""

    def __init__(self) -> None:
        self._ns: dict[tuple[Kind, str], int] = defaultdict(int)

    def add(self, span: Span, duration_ns: int) -> None:
        self._ns[span.kind, span.name] += duration_ns

    def by_name(self, kind: Kind) -> dict[str, int]:
        return {name: ns for (of_kind, name), ns in self._ns.items() if of_kind == kind}

    def __getitem__(self, kind: Kind) -> int:
        return sum(self.by_name(kind).values())


@dataclass(frozen=True, slots=True)
class _Segment:
    """A time segment of a lane, and the innermost span that ran during it."""

    start_ns: int
    end_ns: int
    span: Span


class Timeline:
    """Index over the spans of one or several ranks. Straggling is only visible with the spans of all ranks."""

    def __init__(self, spans: Iterable[Span]):
        self._span_of: dict[tuple[int, int], Span] = {}
        self._steps: dict[tuple[int, int], Span] = {}
        by_lane: dict[tuple[int, str], list[Span]] = defaultdict(list)
        for span in spans:
            self._span_of[span.rank, span.id] = span
            if span.kind == "step" and span.step is not None:
                self._steps[span.rank, span.step] = span
            elif span.kind in _COUNTED:
                by_lane[span.rank, span.lane].append(span)
        self._segments = {lane: _innermost(spans_of_lane) for lane, spans_of_lane in by_lane.items()}
        self._starts = {lane: [segment.start_ns for segment in segments] for lane, segments in self._segments.items()}
        self._work_of: dict[tuple[int, int | None], list[_Segment]] = defaultdict(list)
        for segment in itertools.chain(*self._segments.values()):
            if segment.span.kind != "wait":
                self._work_of[segment.span.rank, segment.span.step].append(segment)
        self._last_entry_ns = _last_entry_times(self._span_of.values())

    def steps(self, rank: int = 0) -> list[int]:
        """Return the steps of a rank that have a `step` span, in order."""
        return sorted(step for of_rank, step in self._steps if of_rank == rank)

    def parts(self, step: int, rank: int = 0) -> StepParts:
        """Return the time breakdown of a step on a rank."""
        step_span = self._steps[rank, step]
        charged_time = self._charge_step(step, rank)
        return StepParts(
            compute_ns=charged_time["compute"],
            exposed_lookup_ns=charged_time["lookup"],
            exposed_communication_ns=charged_time["communication"],
            idle_ns=step_span.duration_ns
            - charged_time["compute"]
            - charged_time["lookup"]
            - charged_time["communication"],
        )

    def exposed(self, step: int, kind: Kind, rank: int = 0) -> dict[str, int]:
        """Return the nanoseconds of a step that count as a kind on a rank, by name of the responsible span."""
        return self._charge_step(step, rank).by_name(kind)

    def raw(self, step: int, rank: int = 0) -> RawParts:
        """Return the work time that a step used on all lanes of a rank, whenever it ran."""
        charged = _ChargedTime()
        for segment in self._work_of.get((rank, step), []):
            self._charge_work(segment.span, segment.start_ns, segment.end_ns, charged)
        return RawParts(
            compute_ns=charged["compute"], lookup_ns=charged["lookup"], communication_ns=charged["communication"]
        )

    def _charge_step(self, step: int, rank: int) -> _ChargedTime:
        step_span = self._steps[rank, step]
        charged = _ChargedTime()
        self._charge_lane((rank, step_span.lane), step_span.start_ns, step_span.end_ns, charged, frozenset())
        return charged

    def _charge_lane(
        self, lane: tuple[int, str], start_ns: int, end_ns: int, charged: _ChargedTime, waits: frozenset[int]
    ) -> None:
        """Attribute the activity of a lane from `start_ns` to `end_ns`; `waits` are the waits that led here."""
        segments = self._segments.get(lane, [])
        first = max(0, bisect.bisect_right(self._starts.get(lane, []), start_ns) - 1)
        for index in range(first, len(segments)):
            segment = segments[index]
            if segment.start_ns >= end_ns:
                break
            start = max(start_ns, segment.start_ns)
            end = min(end_ns, segment.end_ns)
            if start >= end:
                continue
            if segment.span.kind == "wait":
                self._charge_wait(segment.span, start, end, charged, waits)
            else:
                self._charge_work(segment.span, start, end, charged)

    def _charge_wait(
        self, wait: Span, start_ns: int, end_ns: int, charged: _ChargedTime, waits: frozenset[int]
    ) -> None:
        awaited = self._span_of.get((wait.rank, -1 if wait.awaits is None else wait.awaits))
        if awaited is None or wait.id in waits:  # an unknown span, or a cycle of waits: count it as idle
            return
        # After the end of the awaited span the wait is latency, which is idle.
        self._charge_lane((wait.rank, awaited.lane), start_ns, min(end_ns, awaited.end_ns), charged, waits | {wait.id})

    def _charge_work(self, span: Span, start_ns: int, end_ns: int, charged: _ChargedTime) -> None:
        if span.is_collective:
            start_ns = max(start_ns, self._last_entry_ns[span.rank, span.id])
        charged.add(span, max(0, end_ns - start_ns))


def _innermost(spans: list[Span]) -> list[_Segment]:
    """Split the time of a lane into segments, each with the running span that started last."""
    spans = sorted(spans, key=lambda span: span.start_ns)
    times = sorted({time for span in spans for time in (span.start_ns, span.end_ns)})
    segments: list[_Segment] = []
    running: list[tuple[int, int, Span]] = []
    upcoming = 0
    for start, end in itertools.pairwise(times):
        while upcoming < len(spans) and spans[upcoming].start_ns <= start:
            span = spans[upcoming]
            heapq.heappush(running, (-span.start_ns, -span.id, span))
            upcoming += 1
        while running and running[0][2].end_ns <= start:
            heapq.heappop(running)
        if running:
            segments.append(_Segment(start, end, running[0][2]))
    return segments


def _last_entry_times(spans: Iterable[Span]) -> dict[tuple[int, int], int]:
    """Return when the last rank entered each collective, by (rank, id) of its spans.

    Ranks issue collectives in the same order, so the k-th with a given name, step and micro-batch is the same one on
    all ranks.
    """
    spans_of_collective: dict[tuple[object, ...], list[Span]] = defaultdict(list)
    number: dict[tuple[object, ...], int] = defaultdict(int)
    for span in sorted((span for span in spans if span.is_collective), key=lambda span: (span.start_ns, span.id)):
        key = (span.name, span.step, span.micro_batch)
        spans_of_collective[*key, number[span.rank, *key]].append(span)
        number[span.rank, *key] += 1
    return {
        (span.rank, span.id): max(peer.start_ns for peer in peers)
        for peers in spans_of_collective.values()
        for span in peers
    }
