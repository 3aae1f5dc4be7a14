"""Line charts: what is drawn where."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from trace_serve.mismatch.charts import line_chart


def lines(chart: str) -> list[list[tuple[float, float]]]:
    paths = re.findall(r'<path d="M([^"]*?)(?:h0)?" fill', chart)
    return [[tuple(map(float, point.split())) for point in path.split("L")] for path in paths]


def test_greater_values_are_higher_and_later_ones_further_right() -> None:
    chart = line_chart("loss", "layer", range(3), {"a": [1.0, 2.0, 4.0], "b": [0.0, 0.0, 0.0]})
    ElementTree.fromstring(chart)
    (first, second) = lines(chart)
    assert [x for x, _ in first] == sorted(x for x, _ in first)
    assert first[0][1] > first[1][1] > first[2][1]
    # Linear: twice the value is twice the height above zero.
    ground = second[0][1]
    assert ground - first[1][1] == pytest.approx(2 * (ground - first[0][1]), abs=0.2)


def test_equal_factors_are_equal_heights_on_a_logarithmic_axis() -> None:
    (points,) = lines(line_chart("loss", "step", range(3), {"a": [0.001, 0.1, 10.0]}, logarithmic=True))
    assert points[0][1] - points[1][1] == pytest.approx(points[1][1] - points[2][1], abs=0.2)
    (low,) = lines(line_chart("loss", "step", range(2), {"a": [0.0, 1.0]}, logarithmic=True))
    assert low[0][1] >= low[1][1]


def test_a_missing_value_interrupts_the_line() -> None:
    found = lines(line_chart("share", "layer", range(4), {"a": [1.0, None, 2.0, 3.0]}))
    assert [len(run) for run in found] == [1, 2]


def test_zeros_alone_are_drawn_on_the_ground() -> None:
    (zeros,) = lines(line_chart("share", "step", range(2), {"a": [0.0, 0.0]}))
    (beside,) = lines(line_chart("share", "step", range(2), {"a": [0.0, 1.0]}))
    assert [y for _, y in zeros] == [beside[0][1]] * 2


def test_names_are_escaped() -> None:
    chart = line_chart("<t>", "x&y", [1], {"<script>": [1.0]})
    assert "<script>" not in chart
    ElementTree.fromstring(chart)


@pytest.mark.parametrize(("x", "series"), [([1], {}), ([1], {"a": [None]}), ([1, 2], {"a": [1.0]})])
def test_a_chart_of_nothing_is_refused(x: list[float], series: dict[str, list[float | None]]) -> None:
    with pytest.raises(ValueError, match="expected"):
        line_chart("t", "x", x, series)
