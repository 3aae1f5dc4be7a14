"""Line charts as inline SVG: no script, no font and no picture from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#2a6fdb", "#d9822b", "#2e9e5b", "#a04fc4", "#cf3b3b", "#0b8a93", "#8a6d3b", "#7a7f87")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900.0, 280.0, 70.0, 250.0, 14.0, 36.0
_TICKS = 5


def line_chart(
    title: str,
    x_label: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    *,
    logarithmic: bool = False,
) -> str:
    """One chart with a line a series.

    Args:
        title: what is on the vertical axis.
        x: places on the horizontal axis, ascending, at least one.
        series: values at each of `x` by name; None interrupts the line.
        logarithmic: powers of ten on the vertical axis; a value of 0 or less is drawn at the lowest that is not.

    Raises:
        ValueError: no value at all, or a series of another length than `x`.
    """
    for name, values in series.items():
        if len(values) != len(x):
            raise ValueError(f"{name}: got {len(values)} values, expected {len(x)}")
    known = [value for values in series.values() for value in values if value is not None]
    if not known:
        raise ValueError(f"{title}: got no value, expected at least one")
    ticks = _powers(known) if logarithmic else _steps(min(*known, 0.0), max(known))
    low, high = _scaled(ticks[0], logarithmic), _scaled(ticks[-1], logarithmic)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def at_x(value: float) -> float:
        return _LEFT + (right - _LEFT) * ((value - x[0]) / (x[-1] - x[0]) if x[-1] > x[0] else 0.5)

    def at_y(value: float) -> float:
        place = (_scaled(max(value, ticks[0]), logarithmic) - low) / (high - low)
        return bottom - (bottom - _TOP) * place

    parts = []
    for tick in ticks:
        parts.append(f'<path d="M{_LEFT} {at_y(tick):.1f}H{right}" stroke="#8886"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at_y(tick) + 4:.1f}" text-anchor="end">{tick:.3g}</text>')
    for tick in x[:: max(1, math.ceil(len(x) / 10))]:
        parts.append(f'<text x="{at_x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    for index, (name, values) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        dash = ' stroke-dasharray="6 4"' if index >= len(COLOURS) else ""
        for run in _runs(x, values):
            path = "L".join(f"{at_x(place):.1f} {at_y(value):.1f}" for place, value in run)
            stroke = f'fill="none" stroke="{colour}" stroke-width="2" stroke-linecap="round"{dash}'
            # A run of one point is drawn as the dot that a round cap makes of it.
            parts.append(
                f'<path d="M{path}{"h0" if len(run) == 1 else ""}" {stroke}><title>{escape(name)}</title></path>'
            )
        parts.append(f'<text x="{right + 12}" y="{_TOP + 8 + 17 * index}" style="fill:{colour}">{escape(name)}</text>')
    box = f'viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(title)}"'
    return f"<figure><figcaption>{escape(title)}</figcaption><svg {box}>{''.join(parts)}</svg></figure>"


def _scaled(value: float, logarithmic: bool) -> float:
    return math.log10(value) if logarithmic else value


def _powers(values: Sequence[float]) -> list[float]:
    positive = [value for value in values if value > 0] or [1.0]
    low = math.floor(math.log10(min(positive)))
    high = max(math.ceil(math.log10(max(positive))), low + 1)
    return [10.0**exponent for exponent in range(low, high + 1)]


def _steps(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    raw = (high - low or 1.0) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.floor(low / step)
    return [index * step for index in range(first, max(math.ceil(high / step), first + 1) + 1)]


def _runs(x: Sequence[float], values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for place, value in zip(x, values, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((place, value))
    return [run for run in runs if run]
