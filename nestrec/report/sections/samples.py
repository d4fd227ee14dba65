"""A few users of the test: what they had, what the model recommends, and what came next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nestrec.report.markup import Markup, element


@dataclass(frozen=True, slots=True)
class Sample:
    """One user, by source ids."""

    user: str
    history: Sequence[str]
    """the last items before the test, oldest first"""
    recommended: Sequence[str]
    """best first"""
    target: str
    """the item that came next"""


def samples(found: Sequence[Sample], titles: Mapping[str, str]) -> Markup | None:
    """titles: of the items that have one; ids stand for the others."""
    if not found:
        return None
    rows = [_row(sample, titles) for sample in found]
    head = element("tr", [element("th", name) for name in ("user", "had", "is recommended", "then took")])
    table = element("table", element("thead", head), element("tbody", rows), class_="results words")
    note = "Users of the test part; what came next is marked where it was recommended."
    return element("div", element("div", table, class_="wide"), element("p", note, class_="quiet"))


def _row(sample: Sample, titles: Mapping[str, str]) -> Markup:
    def shown(item: str) -> Markup:
        text = titles.get(item) or item
        return element("b", f"{text} ✓") if item == sample.target else element("span", text)

    recommended = element("ol", [element("li", shown(item)) for item in sample.recommended])
    history = element("ul", [element("li", titles.get(item) or item) for item in sample.history])
    target = titles.get(sample.target) or sample.target
    return element(
        "tr", element("th", sample.user), element("td", history), element("td", recommended), element("td", target)
    )
