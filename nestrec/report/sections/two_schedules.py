"""Several schedules on the same batches, their timelines above each other at one scale."""

from collections.abc import Mapping, Sequence

from nestrec.report.markup import Markup, element
from nestrec.report.sections.timeline import timeline_of, usual_steps_ns
from nestrec.trace import Span


def two_schedules(spans_of: Mapping[str, Sequence[Span]], verdict: str) -> Markup:
    """spans_of: the traced steps of each schedule by its name. verdict: what comparing their results gave."""
    shown_ns = max(usual_steps_ns(spans) for spans in spans_of.values())
    parts: list[Markup | None] = [element("p", verdict)]
    for name, spans in spans_of.items():
        parts += [element("h3", name), timeline_of(spans, shown_ns)]
    return element("div", parts)
