"""An attribution as one HTML file that needs nothing else: no network, no script, every text escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from eval_gate.attribute.result import Attribution
from eval_gate.attribute.terminal import ANSWER_COLUMNS, ANSWER_NOTE, answer_cells, bf16_cells, megabytes
from eval_gate.report import format as fmt
from eval_gate.report.drift import token_place
from eval_gate.report.html_flips import expected
from eval_gate.report.text import first_token

_STYLE = Path(__file__).parents[1] / "report" / "style.css"
_CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MAX_FLIPS = 200


def render_html(found: Attribution) -> str:
    """The whole report."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text('Attribution: ' + found.described)}</title>",
            f"<style>{_STYLE.read_text(encoding='utf-8')}</style></head><body><main>",
            _header(found),
            _section(
                "Found",
                "<ul>" + "".join(f'<li class="reason">{_text(one)}</li>' for one in found.conclusions) + "</ul>",
            ),
            _section("Recipes tried on the same queries", _gaps(found) + _recipes(found)),
            _section("How the answers moved", _answers(found)),
            _remedy(found),
            _left_out(found),
            _flips(found),
            _provenance(found),
            "</main></body></html>\n",
        ]
    )


def _header(found: Attribution) -> str:
    return (
        f'<header><div><h1>Where the gap comes from</h1><div class="soft">{_text(found.described)} against BF16, '
        f"{found.queries} queries of {_text(found.query_source)}, {found.created:%Y-%m-%d %H:%M} UTC"
        "</div></div></header>"
    )


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _unbroken(text: str) -> str:
    return text.replace(" ", "&nbsp;")


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{name}</th>" for name in head) + f"</tr>{body}</table>"


def _recipes(found: Attribution) -> str:
    head = ("in FP4", "for", "gap", "interval", "lost", "gained", "outcome", "weights", "KV B/token")
    rows = []
    for step in found.steps:
        paired = step.comparison
        rows.append(
            (
                _text(step.described),
                _text(step.stage),
                fmt.points(paired.gap),
                _unbroken(fmt.interval(paired.lower, paired.upper)),
                str(paired.only_training),
                str(paired.only_serving),
                f'<b class="{step.outcome}-text">{step.outcome}</b>',
                _unbroken(megabytes(step.cost.weights_bytes)),
                f"{step.cost.kv_bytes_per_token:,}",
            )
        )
    return _table(head, rows)


def _gaps(found: Attribution) -> str:
    """One bar a step: the interval, with the gap as a point, the margin dashed."""
    rows = [step for step in found.steps if step.comparison.lower is not None and step.comparison.upper is not None]
    if not rows:
        return ""
    margin = next((s.comparison.margin for s in rows if s.comparison.margin is not None), found.policy.margin)
    low = min(0.0, *(step.comparison.lower or 0.0 for step in rows))
    high = max(1.5 * margin, *(step.comparison.upper or 0.0 for step in rows))
    left, width, row = 330, 860, 24

    def x(gap: float) -> float:
        return left + (gap - low) / (high - low) * (width - left - 20)

    bottom = 18 + row * len(rows)
    parts = [f'<svg viewBox="0 0 {width} {bottom + 22}" role="img" aria-label="gap and interval of each recipe">']
    for name, place in (("zero", 0.0), ("margin", margin)):
        parts.append(f'<line class="{name}" x1="{x(place):.1f}" x2="{x(place):.1f}" y1="10" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x(place):.1f}" y="{bottom + 15}">{100 * place:.3g}</text>')
    for index, step in enumerate(rows):
        paired, y = step.comparison, 26 + row * index
        ends = f'x1="{x(paired.lower or 0.0):.1f}" x2="{x(paired.upper or 0.0):.1f}"'
        name = step.described if len(step.described) <= 52 else step.described[:51] + "…"
        parts.append(f'<text class="label" x="{left - 12}" y="{y + 4}">{_text(name)}</text>')
        parts.append(f"<g><title>{_text(step.reason)}</title>")
        parts.append(f'<line class="bar" {ends} y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="point" cx="{x(paired.gap or 0.0):.1f}" cy="{y}" r="4.5"/></g>')
    return "".join(parts) + "</svg>"


def _answers(found: Attribution) -> str:
    rows = [("BF16", *bf16_cells(found.bf16, found.bf16_refusals))]
    rows += [(_text(step.described), *answer_cells(found, index)) for index, step in enumerate(found.steps)]
    return _table(("answers", *ANSWER_COLUMNS), rows) + f'<div class="soft">{_text(ANSWER_NOTE)}</div>'


def _remedy(found: Attribution) -> str:
    if found.remedy is None:
        return ""
    one = found.remedy
    cost = (
        f"{one.extra_weights_bytes:+,} B of weights and {one.extra_kv_bytes_per_token:+,} B of KV cache a token beside "
        f"the recipe as it is; {megabytes(one.cost.weights_bytes)} and {one.cost.kv_bytes_per_token:,} B a token in all"
    )
    body = f"<p><b>{_text(one.label)}</b>: {_text(one.described)}</p><p>{cost}</p>"
    return _section("A recipe that passes here", body + f"<pre>{_text(json.dumps(one.recipe, indent=1))}</pre>")


def _left_out(found: Attribution) -> str:
    if not found.left_out:
        return ""
    return _section("Not tried", "<ul>" + "".join(f"<li>{_text(one)}</li>" for one in found.left_out) + "</ul>")


def _flips(found: Attribution) -> str:
    shown = found.flipped[:_MAX_FLIPS]
    if not shown:
        return ""
    parts = []
    for flip in shown:
        sides = []
        for name, answer in (("BF16", flip.training_answer), ("FP4", flip.serving_answer)):
            head, token, tail = first_token(answer, flip.first_difference)
            marked = f'<mark class="first">{_text(token)}</mark>' if token else ""
            rest = f"<mark>{_text(tail)}</mark>" if tail else ""
            sides.append(f'<div><span class="soft">{name}</span><pre>{_text(head)}{marked}{rest}</pre></div>')
        short, whole = expected(flip)
        where = token_place(flip)
        parted = "" if where is None else f'<div class="soft place">{_text(where)}</div>'
        parts.append(
            f'<details><summary><span class="{flip.direction}-tag">{flip.direction}</span> <b>{_text(flip.id)}</b> '
            f'<span class="soft">{_text(flip.kind)}; expected {short}</span></summary>'
            f'<pre>{_text(flip.prompt)}</pre>{whole}{parted}<div class="side">{"".join(sides)}</div></details>'
        )
    left = len(found.flipped) - len(shown)
    more = f'<div class="soft">and {left} more in attribution.json</div>' if left else ""
    return _section(f"Flipped under the recipe as it is ({len(found.flipped)})", "".join(parts) + more)


def _provenance(found: Attribution) -> str:
    rows = [
        ("model", found.model),
        ("model digest", found.model_digest),
        ("recipe_id", found.recipe_id),
        ("recipe", json.dumps(found.recipe, sort_keys=True)),
        ("query digest", found.query_digest),
        ("gate policy", json.dumps(found.policy.model_dump(mode="json"), sort_keys=True)),
        ("engines", f"{len(found.steps) + 1} of at most {found.budget}, BF16 included"),
        ("tools", ", ".join(f"{name} {version}" for name, version in found.tools.items())),
    ]
    body = "".join(f"<tr><td>{_text(name)}</td><td><code>{_text(value)}</code></td></tr>" for name, value in rows)
    return _section("Provenance", f'<table class="provenance">{body}</table>')
