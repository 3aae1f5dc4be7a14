"""The gap with its interval against the margin, as inline SVG."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from eval_gate.report import format as fmt
from eval_gate.report.text import clipped
from eval_gate.verdict import Comparison, Verdict

_WIDTH = 720
_LEFT = 150
_RIGHT = 24
_ROW = 30
_TOP = 26


def gap_plot(verdict: Verdict) -> str:
    """One row a kind (see `format.kinds`) and one for all queries.

    The point is the gap, the bar its interval, the dashed line the margin, the plain one no loss.
    """
    rows = [*fmt.kinds(verdict)[0], ("all queries", verdict.overall)]
    limit = verdict.policy.margin if verdict.overall.margin is None else verdict.overall.margin
    low, high = _range(rows, limit)
    height = _TOP + _ROW * len(rows) + 34

    def x(gap: float) -> float:
        return _LEFT + (gap - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    bottom = _TOP + _ROW * len(rows)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="gap and confidence interval per kind of query">',
        f'<rect class="over" x="{x(limit):.1f}" y="{_TOP - 8}" '
        f'width="{_WIDTH - _RIGHT - x(limit):.1f}" height="{bottom - _TOP + 8}"/>',
    ]
    for tick in _ticks(low, high):
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{_TOP - 8}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{bottom + 16}">{100 * tick:+.0f}</text>')
    parts.append(f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{_TOP - 8}" y2="{bottom}"/>')
    margin = x(limit)
    parts.append(f'<line class="margin" x1="{margin:.1f}" x2="{margin:.1f}" y1="{_TOP - 8}" y2="{bottom}"/>')
    parts.append(f'<text class="tick" x="{margin:.1f}" y="{_TOP - 13}">margin {100 * limit:.3g} points</text>')
    for index, (name, found) in enumerate(rows):
        parts += _row(name, found, _TOP + _ROW * index + _ROW / 2, x, overall=index == len(rows) - 1)
    parts.append(f'<text class="tick" x="{(_LEFT + _WIDTH) / 2:.0f}" y="{bottom + 31}">points lost by serving</text>')
    return "".join(parts) + "</svg>"


def _row(name: str, found: Comparison, y: float, x: Callable[[float], float], *, overall: bool) -> list[str]:
    style = "all" if overall else "kind"
    parts = [f'<text class="label {style}" x="{_LEFT - 14}" y="{y + 4:.1f}">{escape(clipped(name, 20))}</text>']
    if found.gap is None or found.lower is None or found.upper is None:
        return [*parts, f'<text class="tick" x="{_LEFT + 60}" y="{y + 4:.1f}">{fmt.NOT_SCORED}</text>']
    title = f"{escape(name)}: {fmt.points(found.gap)} {fmt.interval(found.lower, found.upper)}"
    parts.append(f'<g class="{style}"><title>{title}</title>')
    parts.append(f'<line class="bar" x1="{x(found.lower):.1f}" x2="{x(found.upper):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for bound in (found.lower, found.upper):
        parts.append(f'<line class="bar" x1="{x(bound):.1f}" x2="{x(bound):.1f}" y1="{y - 5:.1f}" y2="{y + 5:.1f}"/>')
    parts.append(f'<circle class="point" cx="{x(found.gap):.1f}" cy="{y:.1f}" r="{6 if overall else 4.5}"/></g>')
    return parts


def _range(rows: list[tuple[str, Comparison]], margin: float) -> tuple[float, float]:
    values = [0.0, margin * 1.5, -margin * 0.5]
    for _, found in rows:
        values += [value for value in (found.lower, found.upper) if value is not None]
    low, high = min(values), max(values)
    pad = (high - low) * 0.05
    return low - pad, high + pad


def _ticks(low: float, high: float) -> list[float]:
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if (high - low) / step <= 10)
    first = int(low / step) - 1
    return [index * step for index in range(first, first + 14) if low <= index * step <= high]
