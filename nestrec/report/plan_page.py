"""HTML page of a plan, in one file: the best plans, scaling curves of each schedule, and the timeline of one rank."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nestrec.base.files import write_atomic
from nestrec.pipeline import SCHEDULES
from nestrec.pipeline.schedule_spec import ScheduleName
from nestrec.planning.plan import Plan, plan_rows, rejected_rows
from nestrec.planning.predictor import Prediction, Predictor
from nestrec.planning.shortage_advice import WORLDS, Curve, scaling_curves
from nestrec.report.charts import Line, line_chart
from nestrec.report.formatting import significant
from nestrec.report.markup import GRAY, STYLE, Markup, element
from nestrec.report.speed_sections import render_timeline

_MAX_PLANS = 5
_COLUMNS = ("schedule", "micro_batches", "replicas", "store", "policy", "window_cache", "step_ms", "mfu", "compute_ms",
            "exposed_lookup_ms", "exposed_comm_ms", "idle_ms", "bound_by", "untested")  # fmt: skip


def write_plan_page(path: Path, plan: Plan, *, worlds: Sequence[int] = WORLDS, notes: Sequence[str] = ()) -> Path:
    """Write the page atomically.

    Args:
        path: File to write.
        plan: Result of `make_plan`.
        worlds: Numbers of ranks of the scaling curves.
        notes: Sentences for the header, such as the options that were fixed.
    """
    page = render_plan(plan, worlds=worlds, notes=notes)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page, durable=False)
    return path


def render_plan(plan: Plan, *, worlds: Sequence[int] = WORLDS, notes: Sequence[str] = ()) -> str:
    """Return the HTML of the page; see `write_plan_page` for the arguments."""
    title = f"{plan.workload.name} on {plan.cluster.name}"
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", f"{title} · nestrec plan"),
        element("style", Markup(STYLE)),
    )
    facts = f"{plan.cluster.world} ranks, {plan.workload.batch_samples} samples per step. Simulated, not measured."
    header = element("header", element("h1", title), [element("p", line) for line in (facts, *notes)])
    sections = [_section(title, content) for title, content in plan_sections(plan, worlds=worlds).items()]
    body = element("body", element("main", header, sections))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def plan_sections(plan: Plan, *, worlds: Sequence[int] = WORLDS) -> dict[str, Markup | None]:
    """Return the sections of the page by title: the best plans, scaling curves, and the timeline of one rank."""
    sections: dict[str, Markup | None] = {"Plans": _plans(plan)}
    if plan.best is not None:
        sections["Scaling"] = _scaling(plan, plan.best, worlds)
        sections["Timeline of one rank"] = _timeline(plan, plan.best)
    return sections


def _section(title: str, content: Markup | None) -> Markup:
    return element("section", element("h2", title), content)


def _plans(plan: Plan) -> Markup:
    if plan.best is None:
        return element(
            "div", [element("p", f"Does not fit: {shortage}", class_="problem") for shortage in plan.shortages]
        )
    return element(
        "div",
        _table(_COLUMNS, plan_rows(plan, limit=_MAX_PLANS)),
        element("h3", "Rejected candidates"),
        _table(("plan", "step_ms", "why"), rejected_rows(plan, limit=20)),
    )


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Markup:
    heads = element("tr", [element("th", name.replace("_", " ")) for name in columns])
    lines = [element("tr", [_cell(row[name]) for name in columns]) for row in rows]
    return element("div", element("table", heads, lines, class_="results plans"), class_="wide")


def _cell(value: Any) -> Markup:
    return element("td", _format(value), class_="word" if isinstance(value, str) else None)


def _format(value: Any) -> str:
    return significant(value, 4) if isinstance(value, float) else str(value)


def _scaling(plan: Plan, best: Prediction, worlds: Sequence[int]) -> Markup:
    names: list[ScheduleName] = list(SCHEDULES)
    curves = scaling_curves(plan.workload, plan.cluster, best.candidate, names, worlds)
    times = _lines(curves, lambda c: [s * 1e3 for s in c.step_s])
    efficiencies = _lines(curves, lambda c: [100 * e for e in c.efficiency])
    steps = line_chart("Step, ms", times, x_label="ranks", from_zero=True, is_log_x=True)
    efficiency = line_chart("Efficiency, %", efficiencies, x_label="ranks", from_zero=True, is_log_x=True)
    note = "The batch size per rank is constant (weak scaling). Each point simulates the schedule on all ranks."
    return element("div", element("div", [steps, efficiency], class_="charts"), element("p", note, class_="quiet"))


def _lines(curves: Sequence[Curve], values: Any) -> list[Line]:
    return [Line(curve.schedule, curve.worlds, values(curve), color=i % GRAY) for i, curve in enumerate(curves)]


def _timeline(plan: Plan, best: Prediction) -> Markup | None:
    replay = Predictor(plan.workload, plan.cluster).replay(best.candidate)
    return render_timeline(replay.spans(replay.slowest()))
