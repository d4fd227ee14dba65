"""The headline numbers: the model beside its baselines, with intervals."""

import math
from typing import Any

from nestrec.report.evaluations import (
    OF_SLICES,
    Verdict,
    as_interval,
    best_baseline,
    has_baseline,
    mean_of_metric,
    metric_names,
    ratio_to_best,
    slice_rows,
    verdict_on,
)
from nestrec.report.markup import Markup, element
from nestrec.report.run_folder import Record, RunRecords, best_evaluation, headline_evaluation


def results(run: RunRecords) -> Markup | None:
    """Tiles with the headline metric, and the table of all metrics and systems."""
    evaluation = headline_evaluation(run)
    if evaluation is None:
        return element("p", "No evaluation yet.", class_="quiet")
    notes = [element("p", f"Note: {note}", class_="quiet") for note in evaluation.get("notes", ())]
    verdict = verdict_on(evaluation["metrics"], evaluation["headline"])
    loud = element("p", verdict.sentence, class_="problem") if verdict and verdict.outcome != "wins" else None
    parts = [_tiles(run, evaluation, verdict), _table(evaluation), _explanation(evaluation), _slices(evaluation)]
    return element("div", loud, *parts, *notes)


def _slices(evaluation: Record) -> Markup | None:
    """What was measured on parts of the users or events."""
    rows = slice_rows(evaluation)
    if not rows:
        return None
    head = element("thead", element("tr", [element("th", name) for name in rows[0]]))
    body = []
    for row in rows:
        named = [element("th", row["slice"]), element("td", f"{row['members']:,}"), element("td", row["metric"])]
        body.append(element("tr", named, [element("td", _figure(value)) for value in list(row.values())[3:]]))
    table = element("table", head, element("tbody", body), class_="results")
    return element("details", element("summary", OF_SLICES.capitalize()), element("div", table, class_="wide"))


def _tiles(run: RunRecords, evaluation: Record, verdict: Verdict | None) -> Markup:
    headline, metrics = evaluation["headline"], evaluation["metrics"]
    tiles = []
    for system in ("model", *(name for name in metrics if name != "model")):
        if headline in metrics.get(system, {}):
            mean, low, high = as_interval(metrics[system][headline])
            value = element("b", _figure(mean))
            tiles.append(_tile(f"{system}, {headline} ({evaluation['part']})", value, _interval(low, high)))
    if verdict is not None and math.isfinite(verdict.ratio):
        note = {"wins": "", "unclear": ", no clear lead", "loses": ", BEHIND"}[verdict.outcome]
        value = element("b", f"{verdict.ratio:.2f}x")
        tiles.insert(1, _tile(f"model over {verdict.baseline}, its best baseline", value, f"in {headline}{note}"))
    best = best_evaluation(run)
    if best is not None:
        score = mean_of_metric(best["metrics"], "model", best["headline"])
        where = f"epoch {best.get('epoch', '?')}, step {best['step']:,}"
        tiles.append(_tile(f"best {best['headline']} (valid)", element("b", _figure(score)), where))
    return element("div", tiles, class_="tiles")


def _table(evaluation: Record) -> Markup:
    metrics, headline = evaluation["metrics"], evaluation["headline"]
    names = metric_names(metrics, headline)
    with_ratio = has_baseline(metrics, headline)
    heads = ["", *names[:1], *([f"over {best_baseline(metrics, headline)}"] if with_ratio else []), *names[1:]]
    rows = []
    for system, values in metrics.items():
        cells = [_cell(values.get(name)) for name in names]
        ratio = [_ratio_cell(ratio_to_best(metrics, system, headline))] if with_ratio else []
        row = [element("th", system), *cells[:1], *ratio, *cells[1:]]
        rows.append(element("tr", row, class_="model" if system == "model" else None))
    head = element("thead", element("tr", [element("th", name) for name in heads]))
    return element("div", element("table", head, element("tbody", rows), class_="results"), class_="wide")


def _cell(value: Any) -> Markup:
    if value is None:
        return element("td", "-")
    mean, low, high = as_interval(value)
    return element("td", _figure(mean), element("small", _interval(low, high)))


def _ratio_cell(ratio: float) -> Markup:
    return element("td", f"{ratio:.2f}x" if math.isfinite(ratio) else "-")


def _explanation(evaluation: Record) -> Markup:
    place = f"step {evaluation['step']:,}, epoch {evaluation.get('epoch', '?')}"
    return element(
        "p", f"Measured on the {evaluation['part']} part at {place}. Brackets: 95% intervals.", class_="quiet"
    )


def _tile(label: str, value: Markup, note: str) -> Markup:
    return element("div", element("span", label), value, element("small", note), class_="tile")


def _figure(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "-"


def _interval(low: float, high: float) -> str:
    return f"[{low:.4f}, {high:.4f}]" if math.isfinite(low) and math.isfinite(high) else ""
