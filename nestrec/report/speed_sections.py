"""Sections of the run page about speed, balance and timelines.

How evenly the work of each step was spread over the ranks.

Throughput over the run and where the time of a step went.

The trace: exposed time on average, and what each lane did around a usual step.

Several schedules on the same batches, their timelines above each other at one scale.
"""

import math
from collections.abc import Mapping, Sequence

from nestrec.report.charts import Axis, Line, colours_of, line_chart, smoothed, stacked_bar, swatch, thinned
from nestrec.report.formatting import as_number, compact, significant
from nestrec.report.markup import COLOUR_OF_KIND, Markup, element
from nestrec.report.run_records import Record, RunRecords
from nestrec.trace import Span, Timeline

_CURVES = {
    "samples_per_s": "Samples a second",
    "tokens_per_s": "Tokens a second",
    "memory_mib": "Memory, MiB",
    "step_ms": "Time of a step, ms",
    "learning_rate": "Learning rate",
}


def speed(run: RunRecords) -> Markup | None:
    """Charts of throughput and memory, and the breakdown of a step."""
    if not run.steps:
        return None
    charts = [_chart(name, title, run.steps) for name, title in _CURVES.items()]
    return element("div", _breakdown(run.steps), _reading(run.steps), element("div", charts, class_="charts"))


def _reading(steps: Sequence[Record]) -> Markup | None:
    """Whether batches are made as fast as steps would take them, did they never wait for data."""
    warm = [record for record in steps[1:] or steps if "readable_per_s" in record]
    could, took, step_ms = (
        mean_of([as_number(r.get(name)) for r in warm]) for name in ("readable_per_s", "samples_per_s", "step_ms")
    )
    if not (math.isfinite(could) and took > 0):
        return None
    wait_ms = min(mean_parts(warm).get("data.wait", 0.0), 0.99 * step_ms)
    wanted = took * step_ms / (step_ms - wait_ms)
    said = f"its threads can make {significant(could, 3)} samples a second, steps would take {significant(wanted, 3)}"
    if could >= wanted:
        return element("p", f"Reading keeps up: {said}.", class_="quiet")
    remedy = "give it more threads (--batch.workers) or cores"
    return element("p", f"Reading is short by {1 - could / wanted:.0%}: {said}; {remedy}.")


def _chart(name: str, title: str, steps: Sequence[Record]) -> Markup | None:
    values = [as_number(record.get(name)) for record in steps]
    if not any(math.isfinite(value) for value in values):
        return None
    x, y = thinned([as_number(record["step"]) for record in steps], values, most=200)
    return line_chart(title, [Line(title, x, y)], x_label="step", from_zero=True)


def _breakdown(steps: Sequence[Record]) -> Markup | None:
    warm = steps[1:] if len(steps) > 1 else steps
    parts = mean_parts(warm)
    if sum(parts.values()) <= 0:
        return None
    step_ms = mean_of([as_number(record.get("step_ms")) for record in warm])
    total = sum(parts.values())
    note = f"Mean of {len(warm):,} records" + (", the first left out as warm-up" if len(steps) > 1 else "")
    if total > step_ms * 1.01:
        note += f". Parts overlap: together {significant(total, 3)} ms in a step of {significant(step_ms, 3)} ms"
    elif step_ms > total * 1.001:
        parts["other"] = step_ms - total
    bar = stacked_bar(parts, "ms", colours_of(parts, COLOUR_OF_KIND))
    title = element("h3", "Where a step's time goes")
    return element("div", title, bar, element("p", f"{note}.", class_="quiet"), class_="card")


def mean_parts(steps: Sequence[Record]) -> dict[str, float]:
    """Mean milliseconds of each part; a part that a record lacks took none of that step."""
    names = dict.fromkeys(name for record in steps for name in record.get("parts", {}))
    means = {name: mean_of([as_number(record.get("parts", {}).get(name, 0)) for record in steps]) for name in names}
    return {name: value for name, value in means.items() if value >= 0}


def mean_of(values: Sequence[float]) -> float:
    """Of the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


_SHARES = {
    "imbalance": "waiting at collectives",
    "straggler": "idle by computing times",
    "predicted_imbalance": "predicted by the cost model",
}
_BALANCE_LEGEND = (
    "Waiting at collectives: the share of a step that a rank, on average, spends in an exchange before the last rank "
    "enters it. Idle by computing times: the share that it would wait if ranks met only at the end of a step, from how "
    "long each computed. Predicted: the same by the costs that samples were dealt by."
)
_COUNTS = {"max_token_gap": "Largest token gap between ranks", "moved_bytes": "Bytes of samples moved between ranks"}


def balance(run: RunRecords) -> Markup | None:
    """Shown where several ranks trained."""
    curves = {name: _per_step(run.steps, name) for name in (*_SHARES, *_COUNTS)}
    if not any(steps for steps, _ in curves.values()):
        return None
    shares = [
        _line(label, *curves[name], colour=i) for i, (name, label) in enumerate(_SHARES.items()) if curves[name][0]
    ]
    charts = [line_chart("Waiting for other ranks, share of a step", shares, x_label="step", from_zero=True)]
    for colour, (name, title) in enumerate(_COUNTS.items(), start=3):
        steps, values = curves[name]
        if any(value > 0 for value in values):
            charts.append(line_chart(title, [_line(title, steps, values, colour)], x_label="step", from_zero=True))
    return element("div", element("div", charts, class_="charts"), _note(curves))


def _per_step(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a figure; each report holds those of the steps since the one before."""
    steps: list[float] = []
    values: list[float] = []
    for record in records:
        found = record.get("balance", {})
        pairs = zip(found.get("steps", []), found.get(name, []), strict=False)
        for step, value in ((as_number(step), as_number(value)) for step, value in pairs):
            if math.isfinite(step):
                steps.append(step)
                values.append(value)
    return steps, values


def _line(label: str, steps: Sequence[float], values: Sequence[float], colour: int) -> Line:
    x, y = thinned(steps, smoothed(values, half_life=5), most=200)
    return Line(label, x, y, colour=colour)


def _note(curves: dict[str, tuple[list[float], list[float]]]) -> Markup:
    means = {name: mean_of(values) for name, (_, values) in curves.items()}
    shown = [f"{label} {means[name]:.1%}" for name, label in _SHARES.items() if math.isfinite(means[name])]
    shown += [f"token gap {compact(means['max_token_gap'])}"] if math.isfinite(means["max_token_gap"]) else []
    shown += [f"moved {compact(means['moved_bytes'])} bytes a step"] if means["moved_bytes"] > 0 else []
    return element("p", f"Means: {', '.join(shown)}. Curves are smoothed. {_BALANCE_LEGEND}", class_="quiet")


_COLOUR = COLOUR_OF_KIND
_PART_COLOUR = {
    "compute": _COLOUR["compute"],
    "exposed communication": _COLOUR["communication"],
    "exposed lookup": _COLOUR["lookup"],
    "idle": _COLOUR["wait"],
}
_TIMELINE_LEGEND = (
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
    cards = [_rank_breakdown(times, rank, steps[rank]) for rank in ranks if steps[rank]]
    return element(
        "div",
        element("div", cards, class_="charts"),
        _lanes([span for span in spans if span.rank in ranks], shown_ns),
        element("p", _TIMELINE_LEGEND, class_="quiet"),
    )


def _rank_breakdown(times: Timeline, rank: int, steps: Sequence[int]) -> Markup:
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


def two_schedules(spans_of: Mapping[str, Sequence[Span]], verdict: str) -> Markup:
    """spans_of: the traced steps of each schedule by its name. verdict: what comparing their results gave."""
    shown_ns = max(usual_steps_ns(spans) for spans in spans_of.values())
    parts: list[Markup | None] = [element("p", verdict)]
    for name, spans in spans_of.items():
        parts += [element("h3", name), timeline_of(spans, shown_ns)]
    return element("div", parts)
