"""Where the tokens of both arms part, in words and as one section of a page."""

from __future__ import annotations

from html import escape

from eval_gate.report import format as fmt
from eval_gate.report.text import one_line
from eval_gate.verdict import Divergence, FlippedQuery, Verdict

_WIDTH = 720
_HEIGHT = 180
_LEFT = 40
_BOTTOM = 40


def share(found: Divergence) -> float:
    """Share of the compared pairs of answers that part."""
    return found.diverged / found.pairs


def sentences(verdict: Verdict) -> list[str]:
    """What every report says of the divergence; nothing where tokens were not recorded."""
    found = verdict.divergence
    if found is None:
        return []
    said = f"tokens part in {found.diverged} of {found.pairs} pairs of answers ({fmt.percent(share(found))})"
    if found.quantiles:
        places = ", ".join(f"{100 * float(name):g}%: {place}" for name, place in found.quantiles.items())
        said += f"; index of the first different token, by share of those pairs: {places}"
    out = [said, f"tokens an answer: training {found.training_tokens:.1f}, serving {found.serving_tokens:.1f}"]
    if found.pairs < found.answered:
        out.append(f"{found.answered - found.pairs} pairs of answers without the tokens of both arms are not in this")
    if verdict.policy.temperature > 0:
        out.append(f"temperature {verdict.policy.temperature:g}: answers part by chance too")
    return out


def token_place(flip: FlippedQuery) -> str | None:
    """Where a flipped query's tokens part; None where they were not recorded."""
    found = flip.first_different_token
    if found is None:
        return None
    sides = (
        f"ended before {found.index}" if side is None else f"“{one_line(side)}”"
        for side in (found.training, found.serving)
    )
    return f"first different token: {found.index}, training {next(sides)}, serving {next(sides)}"


def drift_section(verdict: Verdict) -> str:
    """The section of the HTML report."""
    found = verdict.divergence
    if found is None:
        body = '<div class="soft">not recorded; `eval-gate run --record-tokens` asks both arms for their tokens</div>'
        return f'<section id="drift"><h2>Token drift</h2>{body}</section>'
    lines = "".join(f"<div>{escape(line)}</div>" for line in sentences(verdict))
    return (
        f'<section id="drift"><h2>Token drift</h2>{lines}{_histogram(found)}{_kinds(found)}'
        f'<div class="soft">compared by {escape(found.unit)}; the first token of an answer is 0</div></section>'
    )


def _histogram(found: Divergence) -> str:
    if not found.bins:
        return ""
    most = max(one.pairs for one in found.bins)
    step = (_WIDTH - 2 * _LEFT) / len(found.bins)
    floor = _HEIGHT - _BOTTOM
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="pairs by first different token">']
    parts.append(f'<line class="zero" x1="{_LEFT}" x2="{_WIDTH - _LEFT}" y1="{floor}" y2="{floor}"/>')
    for index, one in enumerate(found.bins):
        height = (floor - 24) * one.pairs / most
        x, middle = _LEFT + step * index, _LEFT + step * (index + 0.5)
        name = str(one.first) if one.first == one.last else f"{one.first}–{one.last}"
        parts.append(f"<g><title>tokens {name}: {one.pairs} pairs</title>")
        size = f'width="{step - 6:.1f}" height="{height:.1f}"'
        parts.append(f'<rect class="count" x="{x + 3:.1f}" y="{floor - height:.1f}" {size}/>')
        parts.append(f'<text class="tick" x="{middle:.1f}" y="{floor - height - 5:.1f}">{one.pairs}</text></g>')
        parts.append(f'<text class="tick" x="{middle:.1f}" y="{floor + 16}">{name}</text>')
    parts.append(
        f'<text class="tick" x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 6}">first different token of the pairs that part</text>'
    )
    return "".join(parts) + "</svg>"


def _kinds(found: Divergence) -> str:
    if len(found.kinds) < 2:
        return ""
    rows = "".join(
        f"<tr><td>{escape(kind)}</td><td>{one.pairs}</td><td>{one.diverged}</td>"
        f"<td>{fmt.percent(one.diverged / one.pairs)}</td>"
        f"<td>{'–' if one.median is None else f'{one.median:g}'}</td></tr>"
        for kind, one in found.kinds.items()
    )
    head = "".join(f"<th>{name}</th>" for name in ("kind", "pairs", "part", "share", "median first token"))
    return f"<table><tr>{head}</tr>{rows}</table>"
