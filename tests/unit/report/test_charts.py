import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.report.charts import assign_colors, axis_over, counting_axis, downsample, finite_segments, smooth
from nestrec.report.formatting import compact, duration, memory, significant
from nestrec.report.markup import GRAY, element

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(finite, min_size=1))
def test_axis_contains_values_and_ticks(values: list[float]) -> None:
    axis = axis_over(values, 0, 100)
    assert all(-1e-6 <= axis.position(value) <= 100 + 1e-6 for value in values)
    ticks = [value for value, _ in axis.ticks()]
    assert 1 <= len(ticks) <= 12
    assert all(-1e-3 <= axis.position(tick) <= 100 + 1e-3 for tick in ticks)


@given(st.lists(st.floats(1e-3, 1e12), min_size=1))
def test_log_axis_contains_values_and_ticks(values: list[float]) -> None:
    axis = axis_over(values, 0, 100, is_log=True)
    assert all(-1e-6 <= axis.position(value) <= 100 + 1e-6 for value in values)
    assert len(axis.ticks()) <= 12


@given(st.lists(st.integers(0, 10**6), min_size=1))
def test_axis_of_steps_has_integer_ticks(values: list[int]) -> None:
    ticks = [value for value, _ in counting_axis(values, 0, 100).ticks()]
    assert ticks
    assert all(tick == round(tick) for tick in ticks)


def test_axis_without_values_has_ticks() -> None:
    assert axis_over([], 0, 1).ticks()
    assert axis_over([math.nan], 0, 1).ticks()


def test_curve_smoothing_follows_half_life_and_ignores_gaps() -> None:
    assert smooth([3.0, 3.0, 3.0], 2) == pytest.approx([3.0, 3.0, 3.0])
    assert smooth([1.0, 0.0], 1) == pytest.approx([1.0, 1 / 3])
    gap = smooth([math.nan, 2.0, math.nan, 2.0], 1)
    assert math.isnan(gap[0])
    assert gap[1:] == pytest.approx([2.0, 2.0, 2.0])


def test_curve_thinning_preserves_mean_and_short_curves() -> None:
    x, y = downsample(list(range(1000)), [float(i % 2) for i in range(1000)], max_points=100)
    assert len(x) == len(y) == 100
    assert y == pytest.approx([0.5] * 100)
    assert downsample([1.0, 2.0], [3.0, 4.0]) == ([1.0, 2.0], [3.0, 4.0])


def test_curve_breaks_at_gaps() -> None:
    assert finite_segments([1, 2, 3, 4], [1.0, math.nan, 3.0, 4.0]) == [[(1, 1.0)], [(3, 3.0), (4, 4.0)]]


def test_number_format_is_readable() -> None:
    assert significant(0.0) == "0"
    assert significant(1234567.0) == "1,234,567"
    assert significant(0.123456) == "0.1235"
    assert significant(math.nan) == "nan"
    assert [compact(value) for value in (999.0, 12_345.0, 3.4e6, 5e-4, 0.0)] == ["999", "12.3k", "3.4M", "5e-4", "0"]
    assert [duration(seconds) for seconds in (3.2, 200, 3720, math.nan)] == ["3s", "3m 20s", "1h 02m", "-"]
    assert [memory(mib) for mib in (512.4, 2048)] == ["512 MiB", "2 GiB"]


def test_html_elements_escape_text_and_attributes() -> None:
    inner = element("b", "<&>")
    assert element("p", inner, '"', title='"<', class_="x", hidden=None) == (
        '<p title="&quot;&lt;" class="x"><b>&lt;&amp;&gt;</b>&quot;</p>'
    )


def test_chart_colors_are_unique() -> None:
    names = [f"part {i}" for i in range(10)]
    colors = assign_colors(["compute", *names, "other"], {"compute": 0, "communication": 1})
    assert (colors["compute"], colors["other"]) == (0, GRAY)
    assert len(set(colors.values())) == 12
    assert 1 not in colors.values()
