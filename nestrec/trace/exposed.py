"""Where the time of a step went: step = compute + exposed lookup + exposed communication + idle.

The step is a `step` span; what its lane did at each moment of it decides what the moment counts as:

    work on the lane itself       its kind
    a wait                        the kind of what then ran on the awaited chain: the awaited span, or what its lane did
                                  before it could start, and so on where that was itself a wait
    a collective, before the
    last rank has entered it      idle (straggling)
    nothing                       idle

Times are whole nanoseconds, so the parts add up to the step exactly. Nothing is estimated.
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
    """The parts of a step on one rank, in nanoseconds."""

    compute_ns: int = 0
    """Time in which the compute lane computed."""
    exposed_lookup_ns: int = 0
    """Time in which it waited for a lookup."""
    exposed_communication_ns: int = 0
    """Time in which it waited for communication."""
    idle_ns: int = 0
    """The rest: straggling of other ranks, latencies, nothing to do."""

    @property
    def step_ns(self) -> int:
        """The whole step."""
        return self.compute_ns + self.exposed_lookup_ns + self.exposed_communication_ns + self.idle_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class RawParts:
    """What the work of a step took, hidden or not, in nanoseconds; straggling left out."""

    compute_ns: int = 0
    lookup_ns: int = 0
    communication_ns: int = 0


class _Charged:
    """Nanoseconds that were charged, by kind and by name."""

    def __init__(self) -> None:
        self._ns: dict[tuple[Kind, str], int] = defaultdict(int)

    def add(self, span: Span, duration_ns: int) -> None:
        self._ns[span.kind, span.name] += duration_ns

    def by_name(self, kind: Kind) -> dict[str, int]:
        return {name: ns for (of_kind, name), ns in self._ns.items() if of_kind == kind}

    def __getitem__(self, kind: Kind) -> int:
        return sum(self.by_name(kind).values())


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of a lane's time and the innermost span that ran in it."""

    start_ns: int
    end_ns: int
    span: Span


class Timeline:
    """Spans of one or several ranks, indexed. Straggling is seen only where the spans of all ranks are given."""

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
        self._pieces = {lane: _innermost(spans_of_lane) for lane, spans_of_lane in by_lane.items()}
        self._starts = {lane: [piece.start_ns for piece in pieces] for lane, pieces in self._pieces.items()}
        self._work_of: dict[tuple[int, int | None], list[_Piece]] = defaultdict(list)
        for piece in itertools.chain(*self._pieces.values()):
            if piece.span.kind != "wait":
                self._work_of[piece.span.rank, piece.span.step].append(piece)
        self._all_entered_ns = _all_entered(self._span_of.values())

    def steps(self, rank: int = 0) -> list[int]:
        """Steps of a rank that have a `step` span, in order."""
        return sorted(step for of_rank, step in self._steps if of_rank == rank)

    def parts(self, step: int, rank: int = 0) -> StepParts:
        """Where the time of a step went on a rank."""
        whole = self._steps[rank, step]
        charged = self._charged(step, rank)
        return StepParts(
            compute_ns=charged["compute"],
            exposed_lookup_ns=charged["lookup"],
            exposed_communication_ns=charged["communication"],
            idle_ns=whole.duration_ns - charged["compute"] - charged["lookup"] - charged["communication"],
        )

    def exposed(self, step: int, kind: Kind, rank: int = 0) -> dict[str, int]:
        """Nanoseconds of a step on a rank that count as a kind, by the name of the span that they are charged to."""
        return self._charged(step, rank).by_name(kind)

    def raw(self, step: int, rank: int = 0) -> RawParts:
        """What the spans that worked for a step took on all lanes of a rank, whenever they ran."""
        charged = _Charged()
        for piece in self._work_of.get((rank, step), []):
            self._charge_work(piece.span, piece.start_ns, piece.end_ns, charged)
        return RawParts(
            compute_ns=charged["compute"], lookup_ns=charged["lookup"], communication_ns=charged["communication"]
        )

    def _charged(self, step: int, rank: int) -> _Charged:
        whole = self._steps[rank, step]
        charged = _Charged()
        self._charge_lane((rank, whole.lane), whole.start_ns, whole.end_ns, charged, frozenset())
        return charged

    def _charge_lane(
        self, lane: tuple[int, str], start_ns: int, end_ns: int, charged: _Charged, waits: frozenset[int]
    ) -> None:
        """Charge what a lane did from `start_ns` to `end_ns`; `waits` are the waits that led here."""
        pieces = self._pieces.get(lane, [])
        first = max(0, bisect.bisect_right(self._starts.get(lane, []), start_ns) - 1)
        for index in range(first, len(pieces)):
            piece = pieces[index]
            if piece.start_ns >= end_ns:
                break
            start = max(start_ns, piece.start_ns)
            end = min(end_ns, piece.end_ns)
            if start >= end:
                continue
            if piece.span.kind == "wait":
                self._charge_wait(piece.span, start, end, charged, waits)
            else:
                self._charge_work(piece.span, start, end, charged)

    def _charge_wait(self, wait: Span, start_ns: int, end_ns: int, charged: _Charged, waits: frozenset[int]) -> None:
        awaited = self._span_of.get((wait.rank, -1 if wait.awaits is None else wait.awaits))
        if awaited is None or wait.id in waits:  # an unknown span, or waits in a circle: nobody to charge
            return
        # After the end of the awaited span the wait is latency, which is idle.
        self._charge_lane((wait.rank, awaited.lane), start_ns, min(end_ns, awaited.end_ns), charged, waits | {wait.id})

    def _charge_work(self, span: Span, start_ns: int, end_ns: int, charged: _Charged) -> None:
        if span.is_collective:
            start_ns = max(start_ns, self._all_entered_ns[span.rank, span.id])
        charged.add(span, max(0, end_ns - start_ns))


def _innermost(spans: list[Span]) -> list[_Piece]:
    """The time of a lane cut into stretches, each with the span that started last among those that were running."""
    spans = sorted(spans, key=lambda span: span.start_ns)
    times = sorted({time for span in spans for time in (span.start_ns, span.end_ns)})
    pieces: list[_Piece] = []
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
            pieces.append(_Piece(start, end, running[0][2]))
    return pieces


def _all_entered(spans: Iterable[Span]) -> dict[tuple[int, int], int]:
    """When the last rank entered each collective, by (rank, id) of its spans.

    Ranks issue collectives in the same order, so the k-th of a name, step and micro-batch is the same one on all ranks.
    """
    together: dict[tuple[object, ...], list[Span]] = defaultdict(list)
    number: dict[tuple[object, ...], int] = defaultdict(int)
    for span in sorted((span for span in spans if span.is_collective), key=lambda span: (span.start_ns, span.id)):
        place = (span.name, span.step, span.micro_batch)
        together[*place, number[span.rank, *place]].append(span)
        number[span.rank, *place] += 1
    return {(span.rank, span.id): max(peer.start_ns for peer in peers) for peers in together.values() for span in peers}
