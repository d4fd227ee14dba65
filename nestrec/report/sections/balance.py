"""How evenly the work of each step was spread over the ranks."""

import math
from collections.abc import Sequence

from nestrec.report.charts import Line, line_chart
from nestrec.report.curves import smoothed, thinned
from nestrec.report.formats import as_number, compact
from nestrec.report.markup import Markup, element
from nestrec.report.run_folder import Record, RunRecords
from nestrec.report.sections.speed import mean_of

_SHARES = {
    "imbalance": "waiting at collectives",
    "straggler": "idle by computing times",
    "predicted_imbalance": "predicted by the cost model",
}
_WORDS = (
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
    return element("p", f"Means: {', '.join(shown)}. Curves are smoothed. {_WORDS}", class_="quiet")
