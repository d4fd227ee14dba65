from hypothesis import given, settings
from hypothesis import strategies as st

from nestrec.trace import Span, StepParts, Timeline

COUNTED = ("compute", "lookup", "communication", "wait")
TICKS = 24


def make_span(span_id, kind, lane, start, end, **more):  # type: ignore[no-untyped-def]
    return Span(id=span_id, name=more.pop("name", kind), kind=kind, lane=lane, start_ns=start, end_ns=end, **more)


def step_span(start: int, end: int, rank: int = 0) -> Span:
    return make_span(1000, "step", "compute", start, end, step=0, rank=rank)


def parts(*spans: Span, rank: int = 0) -> tuple[int, int, int, int]:
    exposed = Timeline(spans).parts(0, rank)
    return exposed.compute_ns, exposed.exposed_lookup_ns, exposed.exposed_communication_ns, exposed.idle_ns


def test_exposed_time_of_compute_lane_and_idle_gaps() -> None:
    spans = [
        make_span(1, "compute", "compute", 0, 40),
        make_span(2, "lookup", "compute", 40, 60),
        make_span(3, "communication", "compute", 70, 100),
    ]
    assert parts(step_span(0, 100), *spans) == (40, 20, 30, 10)


def test_exposed_time_of_overlapped_work_is_zero() -> None:
    assert parts(
        step_span(0, 100), make_span(1, "compute", "compute", 0, 100), make_span(2, "lookup", "store", 0, 90)
    ) == (
        100,
        0,
        0,
        0,
    )


def test_exposed_time_of_a_wait_follows_the_awaited_chain() -> None:
    """The awaited exchange is queued after another one, which itself waits for a lookup; latency is idle."""
    spans = [
        make_span(1, "compute", "compute", 0, 10),
        make_span(2, "wait", "compute", 10, 100, awaits=5),
        make_span(3, "wait", "exchange", 5, 30, awaits=4),
        make_span(4, "lookup", "store", 5, 28),
        make_span(6, "communication", "exchange", 30, 50),
        make_span(5, "communication", "exchange", 50, 95),
    ]
    # 10..28 is lookup, 28..30 latency of the inner wait, 30..95 communication, 95..100 latency.
    assert parts(step_span(0, 100), *spans) == (10, 18, 65, 7)


def test_exposed_time_is_listed_by_name_of_the_running_span() -> None:
    spans = [
        make_span(1, "wait", "compute", 0, 100, awaits=3),
        make_span(2, "communication", "exchange", 0, 30, name="first"),
        make_span(3, "communication", "exchange", 30, 90, name="second"),
        make_span(4, "lookup", "exchange", 90, 100, name="third"),
    ]
    timeline = Timeline([step_span(0, 100), *spans])
    assert timeline.exposed(0, "communication") == {"first": 30, "second": 60}
    assert timeline.exposed(0, "lookup") == {}


def test_exposed_time_before_last_rank_joins_collective_is_idle() -> None:
    spans = []
    for rank, entered in enumerate((10, 60)):
        spans += [
            step_span(0, 100, rank),
            make_span(1, "compute", "compute", 0, entered, rank=rank),
            make_span(2, "communication", "compute", entered, 100, rank=rank, step=0, is_collective=True),
        ]
    assert parts(*spans, rank=0) == (10, 0, 40, 50)
    assert parts(*spans, rank=1) == (60, 0, 40, 0)
    assert Timeline(spans).raw(0, rank=0).communication_ns == 40


def test_raw_time_belongs_to_the_step_of_the_work() -> None:
    spans = [
        step_span(50, 100),
        make_span(1, "lookup", "store", 0, 30, step=0),
        make_span(2, "lookup", "store", 50, 80, step=1),
    ]
    assert Timeline(spans).raw(0).lookup_ns == 30


def test_exposed_time_of_unknown_or_cyclic_waits_is_idle() -> None:
    assert parts(step_span(0, 10), make_span(1, "wait", "compute", 0, 10, awaits=77)) == (0, 0, 0, 10)
    circle = [make_span(1, "wait", "compute", 0, 10, awaits=2), make_span(2, "wait", "other", 0, 10, awaits=1)]
    assert parts(step_span(0, 10), *circle) == (0, 0, 0, 10)


def kind_at(spans: list[Span], rank: int, lane: str, tick: int, waits: tuple[int, ...] = ()) -> str:
    """Reference implementation: returns the kind that the time of a lane counts as at one tick."""
    running = [
        s for s in spans if (s.rank, s.lane) == (rank, lane) and s.kind in COUNTED and s.start_ns <= tick < s.end_ns
    ]
    if not running:
        return "idle"
    inner = max(running, key=lambda s: (s.start_ns, s.id))
    if inner.kind != "wait":
        peers = [s.start_ns for s in spans if s.is_collective and s.name == inner.name]
        return "idle" if inner.is_collective and tick < max(peers) else inner.kind
    awaited = [s for s in spans if s.rank == rank and s.id == inner.awaits]
    if not awaited or inner.id in waits or tick >= awaited[0].end_ns:
        return "idle"
    return kind_at(spans, rank, awaited[0].lane, tick, (*waits, inner.id))


@st.composite
def random_span(draw: st.DrawFn, rank: int, span_id: int) -> Span:
    start = draw(st.integers(0, TICKS))
    kind = draw(st.sampled_from([*COUNTED, "other"]))
    is_collective = kind == "communication" and draw(st.booleans())
    return make_span(
        span_id,
        kind,
        draw(st.sampled_from(["compute", "store", "exchange"])),
        start,
        draw(st.integers(start, TICKS)),
        rank=rank,
        awaits=draw(st.integers(0, 9)) if kind == "wait" else None,
        is_collective=is_collective,
        # Each rank has one collective per name, so that the reference implementation can match them by name.
        name=f"exchange-{span_id}" if is_collective else kind,
    )


@st.composite
def random_spans(draw: st.DrawFn) -> list[Span]:
    spans = []
    for rank in (0, 1):
        start = draw(st.integers(0, TICKS))
        spans.append(step_span(start, draw(st.integers(start, TICKS)), rank))
        spans += [draw(random_span(rank, span_id)) for span_id in range(draw(st.integers(0, 9)))]
    return spans


@settings(max_examples=400, deadline=None)
@given(random_spans())
def test_exposed_parts_equal_reference_and_sum_to_the_step(spans: list[Span]) -> None:
    timeline = Timeline(spans)
    for rank in (0, 1):
        step = next(s for s in spans if s.kind == "step" and s.rank == rank)
        computed = timeline.parts(0, rank)
        assert computed.step_ns == step.duration_ns
        ticks = [kind_at(spans, rank, "compute", tick) for tick in range(step.start_ns, step.end_ns)]
        assert computed == StepParts(
            compute_ns=ticks.count("compute"),
            exposed_lookup_ns=ticks.count("lookup"),
            exposed_communication_ns=ticks.count("communication"),
            idle_ns=ticks.count("idle"),
        )


def test_timeline_lists_steps_in_order() -> None:
    spans = [make_span(index, "step", "compute", 0, 1, step=step) for index, step in enumerate((4, 2, 3))]
    assert Timeline(spans).steps() == [2, 3, 4]
