"""Charts as inline SVG: axes, line charts, histograms and stacked bars; smoothing and downsampling of curves.

Colors are CSS classes of the page, so that they follow its light and dark mode. All functions are pure.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nestrec.report.formatting import compact, significant
from nestrec.report.markup import GRAY, Child, Markup, element, leaf, number


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis that maps values from [low, high] to coordinates from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False
    has_integer_ticks: bool = False
    """Restricts the ticks to integers."""

    def position(self, value: float) -> float:
        low, high = self._scale(self.low), self._scale(self.high)
        return self.start + (self._scale(value) - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Return (value, label) of each tick on the axis."""
        smallest = 1.0 if self.has_integer_ticks else 0.0
        values = _log_ticks(self.low, self.high) if self.is_log else _linear_ticks(self.low, self.high, smallest)
        return [(value, compact(value)) for value in values]

    def _scale(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.is_log else value


def axis_over(
    values: Iterable[float], start: float, end: float, *, is_log: bool = False, from_zero: bool = False
) -> Axis:
    """Return an axis that contains all finite values; with `from_zero` it also contains 0."""
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)]
    low, high = (min(finite), max(finite)) if finite else (1.0 if is_log else 0.0, 10.0 if is_log else 1.0)
    if is_log:
        return Axis(low, high if high > low else low * 10, start, end, is_log=True)
    low = min(0.0, low) if from_zero else low
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return Axis(low if low == 0 else low - margin, high + margin, start, end)


def counting_axis(values: Iterable[float], start: float, end: float) -> Axis:
    """Return an axis for steps or epochs, from the first to the last, with ticks at integers."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low = min(finite)
    high = max(finite)
    return (
        Axis(low, high, start, end, has_integer_ticks=True)
        if high > low
        else Axis(low - 1, low + 1, start, end, has_integer_ticks=True)
    )


def _linear_ticks(low: float, high: float, smallest: float, target: int = 5) -> list[float]:
    rough = max((high - low) / target, smallest)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first = math.ceil(math.log10(low) - 1e-9)
    last = math.floor(math.log10(high) + 1e-9)
    if last - first >= 2:
        every = max(1, -(-(last - first) // 7))
        return [10.0**power for power in range(first, last + 1, every)]
    candidates = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
    return [value for value in candidates if low * 0.999 <= value <= high * 1.001]


def smooth(values: Sequence[float], half_life: float) -> list[float]:
    """Smooth values by an exponential moving average with bias correction.

    The weight of a value halves after `half_life` further values. Values that are not finite repeat the last average.
    """
    decay = 0.5 ** (1.0 / max(half_life, 1e-9))
    average = 0.0
    weight = 0.0
    result = []
    for value in values:
        if math.isfinite(value):
            average = decay * average + (1 - decay) * value
            weight = decay * weight + (1 - decay)
        result.append(average / weight if weight > 0 else math.nan)
    return result


def downsample(x: Sequence[float], y: Sequence[float], max_points: int = 300) -> tuple[list[float], list[float]]:
    """Reduce a curve to at most `max_points` means of equal groups of points; a group with a NaN has the mean NaN."""
    if len(x) <= max_points:
        return list(x), list(y)
    bounds = [len(x) * i // max_points for i in range(max_points + 1)]
    groups = list(itertools.pairwise(bounds))
    return [_mean(x[a:b]) for a, b in groups], [_mean(y[a:b]) for a, b in groups]


def finite_segments(x: Sequence[float], y: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Split a curve into segments of consecutive finite points."""
    segments: list[list[tuple[float, float]]] = [[]]
    for point in zip(x, y, strict=True):
        if math.isfinite(point[0]) and math.isfinite(point[1]):
            segments[-1].append(point)
        elif segments[-1]:
            segments.append([])
    return [segment for segment in segments if segment]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


WIDTH, HEIGHT = 380, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 14, 10, 38
_MAX_HINTS = 120


@dataclass(frozen=True, slots=True)
class Line:
    """Curve of a chart; `low` and `high`, if they are set, are drawn as a band around it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    style: str = ""
    """CSS class `faint` or `dashed`; empty for a solid line."""
    low: Sequence[float] = field(default_factory=tuple)
    high: Sequence[float] = field(default_factory=tuple)

    @property
    def has_hints(self) -> bool:
        return not self.style


def line_chart(
    title: str, lines: Sequence[Line], *, x_label: str, from_zero: bool = False, is_log_x: bool = False
) -> Markup:
    """Draw curves over one x axis; several curves get a legend, and points show their values on hover."""
    x_values = [x for line in lines for x in line.x]
    right = WIDTH - _RIGHT
    x_axis = axis_over(x_values, _LEFT, right, is_log=True) if is_log_x else counting_axis(x_values, _LEFT, right)
    y_values = [y for line in lines for y in (*line.y, *line.low, *line.high)]
    y_axis = axis_over(y_values, HEIGHT - _BOTTOM, _TOP, from_zero=from_zero)
    drawn = [_curve(line, x_axis, y_axis) for line in lines]
    legend = _legend({line.label: line.color for line in lines}) if len(lines) > 1 else None
    return figure(title, [_frame(x_axis, y_axis, x_label), drawn], legend)


def histogram(title: str, edges: Sequence[int], counts: Sequence[int], *, x_label: str, y_label: str) -> Markup:
    """Draw a histogram with logarithmic axes; bin i is [edges[i], edges[i + 1])."""
    x_axis = axis_over(edges, _LEFT, WIDTH - _RIGHT, is_log=True)
    y_axis = Axis(0.7, max([*counts, 1]) * 1.3, HEIGHT - _BOTTOM, _TOP, is_log=True)
    bars = []
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        if count > 0:
            start = x_axis.position(left)
            end = x_axis.position(right)
            top = y_axis.position(count)
            hint = element("title", f"{left:,} to {right - 1:,}: {count:,} {y_label}")
            width = max(end - start - 0.6, 0.6)
            bars.append(element("rect", hint, class_="f0", x=start, y=top, width=width, height=y_axis.start - top))
    return figure(title, [_frame(x_axis, y_axis, x_label), bars], element("p", f"{y_label} (log)", class_="legend"))


def stacked_bar(parts: Mapping[str, float], unit: str, color_of: Mapping[str, int] | None = None) -> Markup:
    """Draw a stacked bar with a table of the values and fractions of its parts; colors are assigned by default."""
    total = sum(parts.values())
    colors = color_of or assign_colors(parts)
    segments = [
        element(
            "span",
            class_=f"b{colors[name]}",
            style=f"flex:{number(value / total * 1000)}",
            title=f"{name}: {significant(value)} {unit}",
        )
        for name, value in parts.items()
        if value > 0
    ]
    rows = [
        element(
            "tr",
            element("td", swatch(colors[name]), name),
            element("td", f"{significant(value, 3)} {unit}"),
            element("td", f"{value / total:.1%}"),
        )
        for name, value in parts.items()
    ]
    return element(
        "div", element("div", segments, class_="bar", role="img"), element("table", rows, class_="numbers measures")
    )


def assign_colors(names: Iterable[str], fixed_colors: Mapping[str, int] | None = None) -> dict[str, int]:
    """Assign a distinct color to each name: fixed colors first, then the others in order, and gray if none is left."""
    fixed = {"other": GRAY, **(fixed_colors or {})}
    names = list(names)
    free = [color for color in range(GRAY) if color not in fixed.values()]
    others = [name for name in names if name not in fixed]
    assigned = dict(zip(others, [*free, *[GRAY] * len(others)], strict=False))
    return {name: fixed.get(name, assigned.get(name, GRAY)) for name in names}


def figure(title: str, content: Child, legend: Markup | None = None) -> Markup:
    """Return a figure with a title, an SVG of the default size and a legend."""
    drawing = element("svg", content, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)
    return element("figure", element("figcaption", title), drawing, legend)


def swatch(color: int) -> Markup:
    """Return a small colored square for a legend."""
    return element("i", class_=f"swatch b{color}")


def _legend(color_of: Mapping[str, int]) -> Markup:
    items = [element("span", swatch(color), label) for label, color in color_of.items()]
    return element("p", items, class_="legend")


def _frame(x_axis: Axis, y_axis: Axis, x_label: str) -> list[Markup]:
    """Draw grid lines, tick labels and the name of the x axis."""
    bottom = HEIGHT - _BOTTOM
    parts = []
    for value, label in y_axis.ticks():
        y = y_axis.position(value)
        parts += [
            leaf("line", class_="grid", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y),
            element("text", label, x=_LEFT - 6, y=y + 4, text_anchor="end"),
        ]
    for value, label in x_axis.ticks():
        x = x_axis.position(value)
        parts += [
            leaf("line", class_="grid", x1=x, x2=x, y1=bottom, y2=bottom + 4),
            element("text", label, x=x, y=bottom + 16, text_anchor="middle"),
        ]
    parts.append(leaf("line", class_="axis", x1=_LEFT, x2=WIDTH - _RIGHT, y1=bottom, y2=bottom))
    parts.append(element("text", x_label, x=(_LEFT + WIDTH - _RIGHT) / 2, y=HEIGHT - 6, text_anchor="middle"))
    return parts


def _curve(line: Line, x_axis: Axis, y_axis: Axis) -> list[Markup]:
    color = line.color
    parts = [_band(line, x_axis, y_axis, color)] if line.low and line.high else []
    style = f"s{color} {line.style}".strip()
    for segment in finite_segments(line.x, line.y):
        points = [(x_axis.position(x), y_axis.position(y)) for x, y in segment]
        parts.append(leaf("polyline", class_=style, points=_points(points)))
        if len(segment) == 1:
            parts.append(leaf("circle", class_=f"f{color}", cx=points[0][0], cy=points[0][1], r=3))
    return parts + (_hints(line, x_axis, y_axis, color) if line.has_hints else [])


def _band(line: Line, x_axis: Axis, y_axis: Axis, color: int) -> Markup:
    bounds = zip(line.x, line.low, line.high, strict=True)
    known = [(x, low, high) for x, low, high in bounds if math.isfinite(low) and math.isfinite(high)]
    upper = [(x_axis.position(x), y_axis.position(high)) for x, _, high in known]
    lower = [(x_axis.position(x), y_axis.position(low)) for x, low, _ in reversed(known)]
    return leaf("polygon", class_=f"f{color} band", points=_points(upper + lower))


def _hints(line: Line, x_axis: Axis, y_axis: Axis, color: int) -> list[Markup]:
    """Draw invisible circles that show a point and its value on hover."""
    points = [point for segment in finite_segments(line.x, line.y) for point in segment]
    every = max(1, -(-len(points) // _MAX_HINTS))
    return [
        element(
            "circle",
            element("title", f"{line.label} {significant(y)} at {significant(x)}"),
            class_=f"f{color} hint",
            cx=x_axis.position(x),
            cy=y_axis.position(y),
            r=4,
        )
        for x, y in points[::every]
    ]


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{number(x)},{number(y)}" for x, y in points)
