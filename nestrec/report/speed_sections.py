"""Sections of the run page about throughput, step time, load balance between ranks, and timelines of the trace.

A timeline shows the exposed (not overlapped) time on average, and each lane around a step of median duration.
"""

import math
from collections.abc import Mapping, Sequence

from nestrec.report.charts import Axis, Line, assign_colors, downsample, line_chart, smooth, stacked_bar, swatch
from nestrec.report.formatting import as_number, compact, significant
from nestrec.report.markup import COLOR_BY_KIND, Markup, element
from nestrec.report.run_records import Record, RunRecords
from nestrec.trace import Span, Timeline

_CURVES = {
    "samples_per_s": "Samples per second",
    "tokens_per_s": "Tokens per second",
    "memory_mib": "Memory, MiB",
    "step_ms": "Step time, ms",
    "learning_rate": "Learning rate",
}


def speed(run: RunRecords) -> Markup | None:
    """Return the section with charts of throughput and memory, and the breakdown of the step time."""
    if not run.steps:
        return None
    charts = [_chart(name, title, run.steps) for name, title in _CURVES.items()]
    return element("div", _breakdown(run.steps), _data_loading(run.steps), element("div", charts, class_="charts"))


def _data_loading(steps: Sequence[Record]) -> Markup | None:
    """Compare the throughput of the data loader with the throughput of steps that never wait for data."""
    warm = [record for record in steps[1:] or steps if "readable_per_s" in record]
    loadable_per_s, trained_per_s, step_ms = (
        mean_of([as_number(r.get(name)) for r in warm]) for name in ("readable_per_s", "samples_per_s", "step_ms")
    )
    if not (math.isfinite(loadable_per_s) and trained_per_s > 0):
        return None
    wait_ms = min(mean_parts(warm).get("data.wait", 0.0), 0.99 * step_ms)
    needed_per_s = trained_per_s * step_ms / (step_ms - wait_ms)
    rates = f"{significant(loadable_per_s, 3)} samples per second loaded, {significant(needed_per_s, 3)} needed"
    if loadable_per_s >= needed_per_s:
        return element("p", f"The data loader is fast enough: {rates}.", class_="quiet")
    remedy = "use more threads (--batch.num_workers) or cores"
    return element("p", f"The data loader is too slow by {1 - loadable_per_s / needed_per_s:.0%}: {rates}; {remedy}.")


def _chart(name: str, title: str, steps: Sequence[Record]) -> Markup | None:
    values = [as_number(record.get(name)) for record in steps]
    if not any(math.isfinite(value) for value in values):
        return None
    x, y = downsample([as_number(record["step"]) for record in steps], values, max_points=200)
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
        note += f". Parts overlap: their sum is {significant(total, 3)} ms in a step of {significant(step_ms, 3)} ms"
    elif step_ms > total * 1.001:
        parts["other"] = step_ms - total
    bar = stacked_bar(parts, "ms", assign_colors(parts, COLOR_BY_KIND))
    title = element("h3", "Breakdown of the step time")
    return element("div", title, bar, element("p", f"{note}.", class_="quiet"), class_="card")


def mean_parts(steps: Sequence[Record]) -> dict[str, float]:
    """Return the mean milliseconds of each part of a step; a part that is missing in a record counts as 0."""
    names = dict.fromkeys(name for record in steps for name in record.get("parts", {}))
    means = {name: mean_of([as_number(record.get("parts", {}).get(name, 0)) for record in steps]) for name in names}
    return {name: value for name, value in means.items() if value >= 0}


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


_SHARES = {
    "imbalance": "waiting at collectives",
    "straggler": "idle by compute times",
    "predicted_imbalance": "predicted by the cost model",
}
_BALANCE_LEGEND = (
    "Waiting at collectives: the mean fraction of a step that a rank waits in a collective until the last rank enters "
    "it. Idle by compute times: the fraction that it would wait if ranks synchronized only at the end of a step, "
    "computed from the compute time of each rank. Predicted: the same by the cost model of sample balancing."
)
_COUNTS = {"max_token_gap": "Largest token gap between ranks", "moved_bytes": "Bytes of samples moved between ranks"}


def balance(run: RunRecords) -> Markup | None:
    """Return the section about the load balance; None if the run has a single rank."""
    curves = {name: _per_step(run.steps, name) for name in (*_SHARES, *_COUNTS)}
    if not any(steps for steps, _ in curves.values()):
        return None
    fractions = [
        _line(label, *curves[name], color=i) for i, (name, label) in enumerate(_SHARES.items()) if curves[name][0]
    ]
    charts = [line_chart("Waiting for other ranks, fraction of a step", fractions, x_label="step", from_zero=True)]
    for color, (name, title) in enumerate(_COUNTS.items(), start=3):
        steps, values = curves[name]
        if any(value > 0 for value in values):
            charts.append(line_chart(title, [_line(title, steps, values, color)], x_label="step", from_zero=True))
    return element("div", element("div", charts, class_="charts"), _note(curves))


def _per_step(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    """Return the steps and values of a balance metric; each record has the steps since the previous record."""
    steps: list[float] = []
    values: list[float] = []
    for record in records:
        balance_record = record.get("balance", {})
        pairs = zip(balance_record.get("steps", []), balance_record.get(name, []), strict=False)
        for step, value in ((as_number(step), as_number(value)) for step, value in pairs):
            if math.isfinite(step):
                steps.append(step)
                values.append(value)
    return steps, values


def _line(label: str, steps: Sequence[float], values: Sequence[float], color: int) -> Line:
    x, y = downsample(steps, smooth(values, half_life=5), max_points=200)
    return Line(label, x, y, color=color)


def _note(curves: dict[str, tuple[list[float], list[float]]]) -> Markup:
    means = {name: mean_of(values) for name, (_, values) in curves.items()}
    shown = [f"{label} {means[name]:.1%}" for name, label in _SHARES.items() if math.isfinite(means[name])]
    shown += [f"token gap {compact(means['max_token_gap'])}"] if math.isfinite(means["max_token_gap"]) else []
    shown += [f"moved {compact(means['moved_bytes'])} bytes per step"] if means["moved_bytes"] > 0 else []
    return element("p", f"Means: {', '.join(shown)}. Curves are smoothed. {_BALANCE_LEGEND}", class_="quiet")


_COLOR = COLOR_BY_KIND
_PART_COLOR = {
    "compute": _COLOR["compute"],
    "exposed communication": _COLOR["communication"],
    "exposed lookup": _COLOR["lookup"],
    "idle": _COLOR["wait"],
}
_TIMELINE_LEGEND = (
    "Exposed: time of lookup or communication that the compute lane waits for; time that overlaps with compute is not "
    "included. Idle: waiting for the slowest rank to enter a collective, and time in which no lane of the rank works. "
    "Wait (in the lanes): a lane waits for another lane."
)
_WIDTH, _MAX_SPANS, _MAX_LANES = 1000, 1500, 24


def timeline(run: RunRecords) -> Markup | None:
    """Return the section with the timeline of the run's trace; None if the trace has no complete step."""
    return render_timeline(run.spans)


def render_timeline(spans: Sequence[Span], shown_ns: int | None = None) -> Markup | None:
    """Render a timeline of spans; None if they contain no complete step.

    Ranks without step spans contribute to the breakdown but are not shown.

    Args:
        spans: Spans of a trace.
        shown_ns: Length of the shown time in nanoseconds, so that several timelines have the same scale; two steps by
            default.
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
    title = f"Rank {rank}: step time {significant(sum(means.values()), 3)} ms"
    note = f"Mean of {len(parts):,} traced steps."
    return element(
        "div",
        element("h3", title),
        stacked_bar(means, "ms", _PART_COLOR),
        element("p", note, class_="quiet"),
        class_="card",
    )


def typical_steps_ns(spans: Sequence[Span]) -> int:
    """Return the duration of the two steps that `_lanes` shows, in nanoseconds."""
    start_ns, end_ns, _ = _typical_steps(spans)
    return end_ns - start_ns


def _lanes(spans: Sequence[Span], shown_ns: int | None = None) -> Markup:
    """Draw the lanes of all ranks during two typical steps, or during `shown_ns` from the first of them."""
    start_ns, end_ns, first = _typical_steps(spans)
    end_ns = end_ns if shown_ns is None else start_ns + shown_ns
    shown = [span for span in spans if span.kind != "step" and span.end_ns > start_ns and span.start_ns < end_ns]
    lanes = sorted({(span.rank, span.lane) for span in shown})
    x_axis = Axis(start_ns, end_ns, 0, _WIDTH)
    rows = [_lane(lane, [s for s in shown if (s.rank, s.lane) == lane], x_axis) for lane in lanes[:_MAX_LANES]]
    legend = [element("span", swatch(color), kind) for kind, color in _COLOR.items()]
    title = f"Lanes from step {first}: {significant((end_ns - start_ns) * 1e-6, 3)} ms"
    left_out = f", {len(lanes) - len(rows)} more lanes not shown" if len(lanes) > len(rows) else ""
    return element(
        "figure", element("figcaption", title + left_out), rows, element("p", legend, class_="legend"), class_="lanes"
    )


def _typical_steps(spans: Sequence[Span]) -> tuple[int, int, int]:
    """Return (start, end, number) of a step of median duration; the end is that of the following step."""
    lowest = min(span.rank for span in spans if span.kind == "step")
    steps = sorted((s for s in spans if s.kind == "step" and s.rank == lowest), key=lambda s: s.start_ns)
    median = sorted(steps, key=lambda s: s.duration_ns)[len(steps) // 2]
    following = [s for s in steps if s.start_ns >= median.end_ns][:1] or [median]
    return median.start_ns, following[0].end_ns, -1 if median.step is None else median.step


def _lane(lane: tuple[int, str], spans: Sequence[Span], x_axis: Axis) -> Markup:
    bars = []
    for span in sorted(spans, key=lambda span: span.start_ns)[:_MAX_SPANS]:
        start, end = x_axis.position(max(span.start_ns, x_axis.low)), x_axis.position(min(span.end_ns, x_axis.high))
        hint = element("title", f"{span.name}: {significant(span.duration_ns * 1e-6, 3)} ms, step {span.step}")
        color = _COLOR.get(span.kind, _COLOR["other"])
        bars.append(element("rect", hint, class_=f"f{color}", x=start, y=0, width=max(end - start, 0.4), height=10))
    drawing = element("svg", bars, viewBox=f"0 0 {_WIDTH} 10", preserveAspectRatio="none", role="img")
    return element("div", element("span", f"rank {lane[0]} · {lane[1]}"), drawing)


def two_schedules(spans_of: Mapping[str, Sequence[Span]], verdict: str) -> Markup:
    """Render the timelines of several schedules on the same batches, at the same scale.

    Args:
        spans_of: Spans of each schedule, by its name.
        verdict: Sentence about the comparison of their results.
    """
    shown_ns = max(typical_steps_ns(spans) for spans in spans_of.values())
    parts: list[Markup | None] = [element("p", verdict)]
    for name, spans in spans_of.items():
        parts += [element("h3", name), render_timeline(spans, shown_ns)]
    return element("div", parts)
