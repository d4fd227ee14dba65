"""HTML report of a run: one self-contained file with everything that the run has recorded so far.

Each section is a function of the run's records that returns markup, or None if there is nothing to show.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from nestrec.base.files import write_atomic
from nestrec.report.data_sections import configuration, dataset, events, model, versions
from nestrec.report.markup import STYLE, Markup, element
from nestrec.report.result_sections import results, training, windows
from nestrec.report.run_records import RunRecords, load_run
from nestrec.report.speed_sections import balance, speed, timeline

__all__ = [
    "balance",
    "configuration",
    "dataset",
    "events",
    "model",
    "results",
    "speed",
    "timeline",
    "training",
    "versions",
    "windows",
]


REPORT_FILE = "report.html"

_SECTIONS: dict[str, Callable[[RunRecords], Markup | None]] = {
    "Results": results,
    "Training": training,
    "Windows": windows,
    "Speed": speed,
    "Balance": balance,
    "Timeline": timeline,
    "Model": model,
    "Data": dataset,
    "Events": events,
    "Versions": versions,
    "Configuration": configuration,
}


def write_report(run: Path, more: Mapping[str, Markup | None] | None = None) -> Path:
    """Write RUN/report.html atomically and return its path.

    Args:
        run: Run folder.
        more: Additional sections for the end of the page, by title.
    """
    page = render(load_run(run), more)
    path = run / REPORT_FILE
    write_atomic(path, page, durable=False)
    return path


def render(run: RunRecords, more: Mapping[str, Markup | None] | None = None) -> str:
    """Return the HTML of the page; see `write_report`."""
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", f"{run.name} · nestrec"),
        element("style", Markup(STYLE)),
    )
    body = [_section(title, build, run) for title, build in _SECTIONS.items()]
    body += [element("section", element("h2", title), content) for title, content in (more or {}).items()]
    page = element("html", head, element("body", element("main", _header(run), body)), lang="en")
    return f"<!doctype html>\n{page}\n"


def _header(run: RunRecords) -> Markup:
    versions = run.versions
    last = run.steps[-1] if run.steps else None
    facts = [
        f"recipe {run.recipe}" if run.recipe else None,
        run.card.get("name"),
        f"step {last['step']:,}, epoch {last.get('epoch', '?')}" if last else "not started",
        versions.get("device"),
        f"started {versions['started']}" if "started" in versions else None,
        f"nestrec {versions['nestrec']}" if "nestrec" in versions else None,
    ]
    line = element("p", " · ".join(str(fact) for fact in facts if fact))
    problems = element("p", "; ".join(run.problems), class_="problem") if run.problems else None
    return element("header", element("h1", run.name), line, problems)


def _section(title: str, build: Callable[[RunRecords], Markup | None], run: RunRecords) -> Markup | None:
    try:
        content = build(run)
    except Exception as error:  # a corrupt file of the run must not affect the other sections
        content = element(
            "p", f"This section cannot be shown, because its file is corrupt: {error!r}", class_="problem"
        )
    return element("section", element("h2", title), content) if content is not None else None
