"""The trace: exposed time on average, and what each lane did around a usual step."""

from collections.abc import Sequence

from nestrec.report.axes import Axis
from nestrec.report.charts import stacked_bar, swatch
from nestrec.report.formats import significant
from nestrec.report.markup import Markup, element
from nestrec.report.run_folder import RunRecords
from nestrec.report.style import COLOUR_OF_KIND
from nestrec.trace import Span, Timeline

_COLOUR = COLOUR_OF_KIND
_PART_COLOUR = {
    "compute": _COLOUR["compute"],
    "exposed communication": _COLOUR["communication"],
    "exposed lookup": _COLOUR["lookup"],
    "idle": _COLOUR["wait"],
}
_WORDS = (
    "Exposed: the part of lookup or communication that the compute lane waits for; what runs beside compute costs "
    "nothing and is not in it. Idle: waiting for the slowest rank to enter an exchange, and time in which no lane of "
    "the rank works. Wait (in the lanes): a lane that stands still until another is done."
)
_WIDTH, _MOST_SPANS, _MOST_LANES = 1000, 1500, 24


def timeline(run: RunRecords) -> Markup | None:
    """Shown where the run left spans with whole steps in them."""
    return timeline_of(run.spans)


def timeline_of(spans: Sequence[Span], shown_ns: int | None = None) -> Markup | None:
    """The same for spans from anywhere; ranks without steps are used and not shown.

    shown_ns: how much time the lanes show, so that several timelines can stand above each other at one scale.
    """
    times = Timeline(spans)
    ranks = sorted({span.rank for span in spans if span.kind == "step"})
    steps = {rank: times.steps(rank) for rank in ranks}
    if not any(steps.values()):
        return None
    cards = [_breakdown(times, rank, steps[rank]) for rank in ranks if steps[rank]]
    return element(
        "div",
        element("div", cards, class_="charts"),
        _lanes([span for span in spans if span.rank in ranks], shown_ns),
        element("p", _WORDS, class_="quiet"),
    )


def _breakdown(times: Timeline, rank: int, steps: Sequence[int]) -> Markup:
    parts = [times.parts(step, rank) for step in steps]
    ms = 1e-6 / len(parts)
    means = {
        "compute": sum(part.compute_ns for part in parts) * ms,
        "exposed communication": sum(part.exposed_communication_ns for part in parts) * ms,
        "exposed lookup": sum(part.exposed_lookup_ns for part in parts) * ms,
        "idle": sum(part.idle_ns for part in parts) * ms,
    }
    title = f"Rank {rank}: a step of {significant(sum(means.values()), 3)} ms"
    note = f"Mean of {len(parts):,} traced steps."
    return element(
        "div",
        element("h3", title),
        stacked_bar(means, "ms", _PART_COLOUR),
        element("p", note, class_="quiet"),
        class_="card",
    )


def usual_steps_ns(spans: Sequence[Span]) -> int:
    """How long the two steps last that `_lanes` shows."""
    start_ns, end_ns, _ = _usual_steps(spans)
    return end_ns - start_ns


def _lanes(spans: Sequence[Span], shown_ns: int | None = None) -> Markup:
    """Two usual steps, or `shown_ns` from the first of them, all lanes of all ranks under one another."""
    start_ns, end_ns, first = _usual_steps(spans)
    end_ns = end_ns if shown_ns is None else start_ns + shown_ns
    shown = [span for span in spans if span.kind != "step" and span.end_ns > start_ns and span.start_ns < end_ns]
    lanes = sorted({(span.rank, span.lane) for span in shown})
    x_axis = Axis(start_ns, end_ns, 0, _WIDTH)
    rows = [_lane(lane, [s for s in shown if (s.rank, s.lane) == lane], x_axis) for lane in lanes[:_MOST_LANES]]
    legend = [element("span", swatch(colour), kind) for kind, colour in _COLOUR.items()]
    title = f"Lanes from step {first}: {significant((end_ns - start_ns) * 1e-6, 3)} ms"
    left_out = f", {len(lanes) - len(rows)} more lanes not shown" if len(lanes) > len(rows) else ""
    return element(
        "figure", element("figcaption", title + left_out), rows, element("p", legend, class_="legend"), class_="lanes"
    )


def _usual_steps(spans: Sequence[Span]) -> tuple[int, int, int]:
    """(start, end, step) from a step of median length to the end of the one after it."""
    lowest = min(span.rank for span in spans if span.kind == "step")
    steps = sorted((s for s in spans if s.kind == "step" and s.rank == lowest), key=lambda s: s.start_ns)
    usual = sorted(steps, key=lambda s: s.duration_ns)[len(steps) // 2]
    following = [s for s in steps if s.start_ns >= usual.end_ns][:1] or [usual]
    return usual.start_ns, following[0].end_ns, -1 if usual.step is None else usual.step


def _lane(lane: tuple[int, str], spans: Sequence[Span], x_axis: Axis) -> Markup:
    bars = []
    for span in sorted(spans, key=lambda span: span.start_ns)[:_MOST_SPANS]:
        start, end = x_axis.place(max(span.start_ns, x_axis.low)), x_axis.place(min(span.end_ns, x_axis.high))
        hint = element("title", f"{span.name}: {significant(span.duration_ns * 1e-6, 3)} ms, step {span.step}")
        colour = _COLOUR.get(span.kind, _COLOUR["other"])
        bars.append(element("rect", hint, class_=f"f{colour}", x=start, y=0, width=max(end - start, 0.4), height=10))
    drawing = element("svg", bars, viewBox=f"0 0 {_WIDTH} 10", preserveAspectRatio="none", role="img")
    return element("div", element("span", f"rank {lane[0]} · {lane[1]}"), drawing)
