"""Draws charts of bars, lines and points as SVG, in colors for light and for dark pages."""

import dataclasses
import hashlib
import io
import json
from typing import Any

INK = {"light": "#1d2129", "dark": "#e6e9ee"}
GRID = {"light": "#dde1e7", "dark": "#3a404b"}
COLORS = {
    "light": ["#2766b0", "#d2691e", "#2f8f57", "#a4478c", "#8b909a", "#b8960c", "#2b8fa3"],
    "dark": ["#6ea8f0", "#f0975a", "#62c68b", "#d987c4", "#9aa3b2", "#cdb658", "#63c3d6"],
}
WIDTH = 8.0
BAR_HEIGHT = 0.21
TITLE_HEIGHT = 0.32
LEGEND_HEIGHT = 0.2
LEGEND_GAP = 0.08
FOOTER_HEIGHT = 0.22
"""Sizes in inches."""


@dataclasses.dataclass(frozen=True)
class Series:
    """Values of one color, for example of one system."""

    label: str
    values: list[float | None]
    """Lengths of the bars per category, or the y values of a line."""
    spread: list[tuple[float, float] | None] = dataclasses.field(default_factory=list)
    """Ends of the error bars."""
    x: list[float] = dataclasses.field(default_factory=list)
    """X values of a line."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes: horizontal bars if it has categories, else lines."""

    series: list[Series]
    x_label: str
    y_label: str = ""
    title: str = ""
    categories: list[str] = dataclasses.field(default_factory=list)
    limit: tuple[float, str] | None = None
    """A dashed line with a label: at this y of lines, or this x of bars."""
    log_x: bool = False
    log_y: bool = False
    """Scales of lines; `log_x` also applies to bars."""
    colors: list[int] = dataclasses.field(default_factory=list)
    """Numbers of the colors per category, if there is a single series."""
    is_scatter: bool = False
    """Draw points without lines, and the diagonal."""
    start: float = 0.0
    """Start of the axis of bars."""
    decimals: int = 0
    """Decimals of the labels of bars."""


@dataclasses.dataclass(frozen=True)
class Chart:
    """Panels next to each other, with a common title and a footer that names hardware and date."""

    title: str
    panels: list[Panel]
    footer: str

    @property
    def digest(self) -> str:
        """A digest of all texts and values."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()


def draw(chart: Chart, name: str, theme: str) -> str:
    """Return a chart as SVG text."""
    import matplotlib
    from cycler import cycler

    matplotlib.use("svg")
    ink = INK[theme]
    settings: Any = {
        "svg.hashsalt": name,
        "svg.fonttype": "none",
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.edgecolor": GRID[theme],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=COLORS[theme]),
        "grid.color": GRID[theme],
        "xtick.color": ink,
        "ytick.color": ink,
        "text.color": ink,
        "axes.labelcolor": ink,
        "legend.frameon": False,
        "xtick.bottom": False,
        "ytick.left": False,
    }
    with matplotlib.rc_context(settings):
        return _svg(chart)


def _svg(chart: Chart) -> str:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    height = _height(chart)
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.subplots(1, len(chart.panels), squeeze=False)[0]
    for number, (panel, axis) in enumerate(zip(chart.panels, axes, strict=True)):
        if panel.categories:
            _draw_bars(panel, axis)
            if number and panel.categories == chart.panels[0].categories:
                axis.set_yticklabels([])
        else:
            _draw_lines(panel, axis)
        axis.set_title(panel.title, fontsize=9, loc="left")
        axis.set_xlabel(panel.x_label)
        axis.set_ylabel(panel.y_label)
    handles, labels = axes[0].get_legend_handles_labels()
    columns = 3 if sum(map(len, labels)) > 90 else 4
    lines = -(-len(labels) // columns)
    top = height - TITLE_HEIGHT - LEGEND_HEIGHT * lines - (LEGEND_GAP if lines else 0)
    rect = (0, FOOTER_HEIGHT / height, 1, (top - FOOTER_HEIGHT) / height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=rect))
    if labels:
        above = (0, 1 - TITLE_HEIGHT / height)
        figure.legend(handles, labels, loc="upper left", bbox_to_anchor=above, ncols=columns, fontsize=8)
    figure.text(0.008, 1 - 0.06 / height, chart.title, va="top", fontsize=11, fontweight="bold")
    figure.text(0.008, 0.06 / height, chart.footer, va="bottom", fontsize=7)
    text = io.StringIO()
    description = f"digest {chart.digest}"
    metadata = {"Date": None, "Creator": "docs/charts.py", "Title": chart.title, "Description": description}
    figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    return text.getvalue().replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans', sans-serif")


def _height(chart: Chart) -> float:
    bars = max(len(panel.categories) * (len(panel.series) + 0.8) for panel in chart.panels)
    return 1.35 + BAR_HEIGHT * bars if bars else 3.6


def _draw_bars(panel: Panel, axis: Any) -> None:
    count = len(panel.series)
    height = 1 / (count + 0.8)
    for number, series in enumerate(panel.series):
        label = series.label
        for position, value in enumerate(series.values):
            if value is None:
                continue
            color = f"C{panel.colors[position] if panel.colors else number}"
            y = position + (number - (count - 1) / 2) * height
            axis.barh(y, value, height * 0.9, color=color, label=label)
            label = ""
            ends = series.spread[position] if series.spread else None
            if ends:
                axis.plot(ends, [y, y], color=axis.xaxis.label.get_color(), linewidth=1)
            end = max(value, ends[1] if ends else value, 0)
            text = f"{value:,.{panel.decimals}f}"
            axis.annotate(text, (end, y), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(panel.categories)), panel.categories)
    axis.set_ylim(len(panel.categories) - 0.5, -0.5)
    axis.margins(x=0.2)
    axis.grid(axis="x", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines["left"].set_visible(False)
    if panel.log_x:
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter("")
    else:
        axis.set_xlim(left=panel.start or None)
        axis.locator_params(axis="x", nbins=5)
    axis.xaxis.set_major_formatter("{x:,g}")
    if panel.limit:
        axis.axvline(panel.limit[0], linestyle="--", linewidth=1, color="C4")


def _draw_lines(panel: Panel, axis: Any) -> None:
    for series in panel.series:
        width = 0 if panel.is_scatter else 1.6
        axis.plot(series.x, series.values, marker="o", markersize=3.5, linewidth=width, label=series.label)
        if series.spread:
            low, high = zip(*series.spread, strict=True)
            axis.fill_between(series.x, low, high, alpha=0.2, linewidth=0)
    if panel.limit:
        y, text = panel.limit
        axis.axhline(y, linestyle="--", linewidth=1, color="C4")
        axis.annotate(text, (0, y), (3, 3), ("axes fraction", "data"), "offset points", fontsize=8)
    if panel.is_scatter:
        values = [value for series in panel.series for value in [*series.x, *series.values] if value is not None]
        axis.plot([min(values), max(values)], [min(values), max(values)], linewidth=1, linestyle="--", color="C4")
    axis.grid(linewidth=0.6)
    if panel.log_x:
        axis.set_xscale("log")
    elif all(float(x).is_integer() and x < 10 for series in panel.series for x in series.x):
        axis.locator_params(axis="x", integer=True)
    if panel.log_y:
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter("")
    axis.xaxis.set_minor_formatter("")
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.yaxis.set_major_formatter("{x:,g}")
