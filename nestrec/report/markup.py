"""HTML and SVG built from elements: every string is escaped unless it was itself built here."""

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is already markup. Made only by this file and from constants."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]


def element(tag: str, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """`<tag ...>children</tag>`. In attribute names `_` stands for `-`, and a last `_` for nothing."""
    return Markup(f"<{tag}{_attributes(attributes)}>{join(children)}</{tag}>")


def leaf(tag: str, **attributes: str | float | bool | None) -> Markup:
    """An SVG element without children."""
    return Markup(f"<{tag}{_attributes(attributes)}/>")


def join(children: Child) -> Markup:
    """Children one after the other, escaped where they are not markup."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, str):
        return Markup(html.escape(children))
    if isinstance(children, int | float):
        return Markup(number(children))
    return Markup("".join(join(child) for child in children))


def number(value: float) -> str:
    """A coordinate, short: two decimals are finer than a pixel."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _attributes(attributes: dict[str, str | float | bool | None]) -> str:
    parts = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        shown = "" if value is True else value if isinstance(value, str) else number(value)
        parts.append(f' {name.rstrip("_").replace("_", "-")}="{html.escape(shown)}"')
    return "".join(parts)
