"""HTML and SVG elements with automatic escaping, and the style sheet of the report pages (light and dark mode)."""

import html
from collections.abc import Iterable


class Markup(str):
    """Escaped HTML or SVG. Created only by this module and from constants."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]


def element(tag: str, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """Return `<tag ...>children</tag>`; in attribute names `_` becomes `-`, and a trailing `_` is removed."""
    return Markup(f"<{tag}{_attributes(attributes)}>{join(children)}</{tag}>")


def leaf(tag: str, **attributes: str | float | bool | None) -> Markup:
    """Return an SVG element without children."""
    return Markup(f"<{tag}{_attributes(attributes)}/>")


def join(children: Child) -> Markup:
    """Concatenate children, and escape those that are not markup."""
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
    """Format a coordinate with two decimals, which is finer than a pixel."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _attributes(attributes: dict[str, str | float | bool | None]) -> str:
    parts = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        if value is True:
            shown = ""
        else:
            shown = value if isinstance(value, str) else number(value)
        parts.append(f' {name.rstrip("_").replace("_", "-")}="{html.escape(shown)}"')
    return "".join(parts)


GRAY = 15
"""Color of everything that is not a separate part or system; the colors before it are easy to distinguish."""
COLOR_BY_KIND = {"compute": 0, "communication": 1, "lookup": 2, "other": 5, "wait": GRAY}
"""Colors of the kinds of work of a lane, in all timelines; other parts of a step have other colors."""
_LIGHT = ("#2766b0", "#d2691e", "#2f8f57", "#a4478c", "#b8960c", "#2b8fa3", "#bf3f3f", "#5b4db8", "#7a9a1e", "#d6568a",
          "#7b5a45", "#12355b", "#e0a458", "#0f6b5c", "#9b2226", "#8b909a")  # fmt: skip
_DARK = ("#6ea8f0", "#f0975a", "#62c68b", "#d987c4", "#cdb658", "#63c3d6", "#ee7f7f", "#9d92f0", "#b4d05a", "#f294b8",
         "#c09c84", "#a9c7ea", "#f7d9a8", "#8fd6c6", "#e39a9c", "#7d838f")  # fmt: skip
_LIGHT_GROUND = "--page:#f6f7f9;--card:#fff;--ink:#1d2129;--soft:#5b6472;--rule:#dde1e7;--grid:#e8ebf0;"
_DARK_GROUND = "--page:#14161a;--card:#1d2026;--ink:#e6e9ee;--soft:#9aa3b2;--rule:#343a44;--grid:#2a2f38;"

_RULES = """
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 1120px; margin: 0 auto; padding: 20px 16px 60px }
h1 { font-size: 1.55rem; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 34px 0 10px }
h3 { font-size: .95rem; margin: 0 0 8px }
.quiet, header p { color: var(--soft); margin: 6px 0 0; font-size: .88rem; overflow-wrap: anywhere }
header .problem, .problem { background: var(--card); border-left: 4px solid var(--c6); padding: 8px 12px;
  margin: 12px 0 0 }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 170px), 1fr)); gap: 10px }
.tile, figure, .card, .tables > div { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 12px 14px; margin: 0; min-width: 0 }
.tile:first-child { border-color: var(--c0) }
.tile > * { display: block; overflow-wrap: anywhere }
.tile span, .tile small { color: var(--soft); font-size: .82rem }
.tile b { font-size: 1.5rem; font-weight: 650; font-variant-numeric: tabular-nums }
.charts, .tables { display: grid; gap: 12px; margin-top: 12px }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)) }
.tables { grid-template-columns: repeat(auto-fit, minmax(min(100%, 260px), 1fr)); align-items: start }
.lanes { margin-top: 12px }
.lanes div span { font-size: .82rem; color: var(--soft); display: block; margin-top: 4px }
.lanes svg { height: 18px; background: var(--grid) }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: 4px }
svg { width: 100%; height: auto; display: block }
svg text { fill: var(--soft); font-size: 12px; font-family: inherit }
.grid { stroke: var(--grid) }
.axis { stroke: var(--rule) }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round }
.faint { stroke-width: 1; opacity: .5 }
.dashed { stroke-width: 1.6; stroke-dasharray: 5 4 }
.band { opacity: .16 }
.hint { opacity: 0 }
.hint:hover { opacity: 1 }
.legend { margin: 4px 0 0; font-size: .82rem; color: var(--soft); display: flex; flex-wrap: wrap; gap: 2px 14px }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px }
.bar { display: flex; height: 26px; border-radius: 6px; overflow: hidden; margin-bottom: 8px }
.bar span { min-width: 1px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  margin-top: 12px }
.results { width: 100%; font-size: .9rem }
.results th, .results td { padding: 7px 12px; text-align: right; white-space: nowrap }
.results th:first-child { text-align: left; position: sticky; left: 0; background: var(--card) }
.results thead th { color: var(--soft); font-weight: 600 }
.results tbody tr { border-top: 1px solid var(--rule) }
.results tbody th { font-weight: inherit }
.results td small { display: block; color: var(--soft); font-size: .74rem; font-weight: 400 }
.results td.word { text-align: left }
.plans th { text-align: left }
.wide + h3 { margin-top: 20px }
.model { font-weight: 650 }
.numbers { width: 100%; max-width: 480px; font-size: .88rem }
.numbers td { padding: 2px 0; vertical-align: top }
.numbers td + td { text-align: right; padding-left: 12px }
.measures td + td { white-space: nowrap }
.facts td + td { overflow-wrap: anywhere }
.facts td:first-child { white-space: nowrap }
.words th, .words td { text-align: left; vertical-align: top; white-space: normal }
.words tbody th { white-space: nowrap }
.words ol, .words ul { margin: 0; padding-left: 18px }
summary { cursor: pointer; color: var(--c0); padding: 4px 0; margin-top: 8px }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px; overflow-x: auto;
  font-size: .82rem }
ul { padding-left: 20px }
"""


def _variables(ground: str, colors: tuple[str, ...]) -> str:
    return ground + "".join(f"--c{i}:{color};" for i, color in enumerate(colors))


def _color_classes(color: int) -> str:
    """Return the CSS classes of a color: `s` for strokes and `f` for fills in SVG, `b` for backgrounds in HTML."""
    name = f"var(--c{color})"
    return f".s{color}{{stroke:{name}}}.f{color}{{fill:{name}}}.b{color}{{background:{name}}}"


STYLE = "\n".join(
    [
        f":root{{color-scheme:light dark;{_variables(_LIGHT_GROUND, _LIGHT)}}}",
        f"@media (prefers-color-scheme:dark){{:root{{{_variables(_DARK_GROUND, _DARK)}}}}}",
        *(_color_classes(color) for color in range(len(_LIGHT))),
        _RULES,
    ]
)
