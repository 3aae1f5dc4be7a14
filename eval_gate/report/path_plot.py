"""The looks at the data: gap and bounds after each, as inline SVG and as a table."""

from __future__ import annotations

from html import escape

from eval_gate.report import format as fmt
from eval_gate.verdict import LookResult, Verdict

_WIDTH = 720
_HEIGHT = 220
_LEFT = 60
_RIGHT = 24
_TOP = 20
_BOTTOM = 40


def path_section(verdict: Verdict) -> str:
    """One plot a suite; empty when the data were looked at once."""
    if not verdict.looks:
        return ""
    suites = [result.suite for result in verdict.looks[0].suites]
    plots = "".join(
        (f"<h3>{escape(suite)}</h3>" if len(suites) > 1 else "") + _plot(verdict, index)
        for index, suite in enumerate(suites)
    )
    rows = "".join(_row(look, index) for look in verdict.looks for index in range(len(suites)))
    head = "".join(
        f"<th>{name}</th>" for name in ("look", "suite", "queries", "gap", "interval", "one-sided level", "outcome")
    )
    return (
        f'<section id="looks"><h2>Looks: {len(verdict.looks)} of {verdict.policy.looks}</h2>{plots}'
        f"<table><tr>{head}</tr>{rows}</table></section>"
    )


def _row(look: LookResult, index: int) -> str:
    suite = look.suites[index]
    found = suite.comparison
    cells = (
        look.look,
        escape(suite.suite),
        f"{found.n}",
        fmt.points(found.gap),
        fmt.interval(found.lower, found.upper),
        f"{suite.level:.4f}",
        suite.outcome,
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _plot(verdict: Verdict, index: int) -> str:
    found = [(look, look.suites[index]) for look in verdict.looks]
    margin = found[-1][1].comparison.margin
    # The first look's bounds may reach far; the scale is that of the last look's, and longer bars end at the edge.
    last = found[-1][1].comparison
    values = [0.0, last.lower, last.upper, *(suite.comparison.gap for _, suite in found)]
    values += [] if margin is None else [2 * margin, -margin]
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    pad = (high - low) * 0.06
    low, high = low - pad, high + pad
    planned = verdict.looks[-1].planned

    def x(queries: int) -> float:
        return _LEFT + queries / planned * (_WIDTH - _LEFT - _RIGHT)

    def y(gap: float) -> float:
        gap = min(max(gap, low), high)
        return _TOP + (high - gap) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    right = _WIDTH - _RIGHT
    label = f"gap and bounds after each look, suite {escape(found[0][1].suite)}"
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">']
    parts.append(f'<line class="zero" x1="{_LEFT}" x2="{right}" y1="{y(0):.1f}" y2="{y(0):.1f}"/>')
    parts.append(f'<text class="tick" x="{_LEFT - 22}" y="{y(0) + 4:.1f}">0</text>')
    if margin is not None:
        parts.append(f'<line class="margin" x1="{_LEFT}" x2="{right}" y1="{y(margin):.1f}" y2="{y(margin):.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 22}" y="{y(margin) + 4:.1f}">{100 * margin:+.3g}</text>')
    for look, suite in found:
        one = suite.comparison
        place = x(look.queries)
        parts.append(f'<text class="tick" x="{place:.1f}" y="{_HEIGHT - _BOTTOM + 18}">{look.queries}</text>')
        if one.gap is None or one.lower is None or one.upper is None:
            continue
        title = f"look {look.look}: {fmt.points(one.gap)} {fmt.interval(one.lower, one.upper)}"
        parts.append(f'<g class="all"><title>{title}</title>')
        bar = f'x1="{place:.1f}" x2="{place:.1f}" y1="{y(one.lower):.1f}" y2="{y(one.upper):.1f}"'
        parts.append(f'<line class="bar" {bar}/>')
        parts.append(f'<circle class="point" cx="{place:.1f}" cy="{y(one.gap):.1f}" r="5"/></g>')
    parts.append(f'<text class="tick" x="{(_LEFT + right) / 2:.0f}" y="{_HEIGHT - 4}">queries of {planned}</text>')
    return "".join(parts) + "</svg>"
