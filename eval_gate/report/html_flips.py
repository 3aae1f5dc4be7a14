"""The flipped queries of a page: side by side, with what differs first marked, filters and a search."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from eval_gate.report.drift import token_place
from eval_gate.report.text import clipped, first_token
from eval_gate.verdict import FlippedQuery, Verdict

SCRIPT = Path(__file__).with_name("filter.js").read_text(encoding="utf-8")
"""All the script of the page: it hides what a filter leaves out, and reads nothing but the page."""

MAX_SHOWN = 2000
MAX_EXPECTED = 200


def flips_section(verdict: Verdict) -> str:
    """The section, without its script."""
    flips = verdict.flipped[:MAX_SHOWN]
    if not flips:
        return '<section id="none"><h2>Flipped queries</h2><div class="soft">none</div></section>'
    total = len(verdict.flipped) + verdict.flipped_left_out
    more = "".join(
        f'<div class="soft">and {count} more in {where}</div>'
        for count, where in (
            (len(verdict.flipped) - len(flips), "verdict.json"),
            (verdict.flipped_left_out, "results.jsonl alone"),
        )
        if count
    )
    controls = "".join(
        [
            _select("direction", "lost and gained", ("lost", "gained")),
            _select("suite", "every suite", sorted({flip.suite for flip in flips})),
            _select("kind", "every kind", sorted({flip.kind for flip in flips})),
            '<input type="search" placeholder="search in ids, prompts and answers" aria-label="search">',
            '<span class="soft count" role="status"></span>',
        ]
    )
    return (
        f'<section id="flips"><h2>Flipped queries ({total})</h2>'
        f'<div class="controls" hidden>{controls}</div>{"".join(map(_flip, flips))}{more}</section>'
    )


def expected(flip: FlippedQuery) -> tuple[str, str]:
    """What was expected, as HTML short enough for a summary, and where that is cut the whole of it."""
    short = clipped(flip.expected, MAX_EXPECTED)
    whole = "" if short == flip.expected else f'<span class="soft">expected</span><pre>{escape(flip.expected)}</pre>'
    return escape(short), whole


def _select(name: str, everything: str, values: Sequence[str]) -> str:
    options = "".join(f'<option value="{escape(value)}">{escape(value)}</option>' for value in values)
    return f'<select name="{name}" aria-label="{name}"><option value="">{everything}</option>{options}</select>'


def _flip(flip: FlippedQuery) -> str:
    short, whole = expected(flip)
    where = token_place(flip)
    parted = "" if where is None else f'<div class="soft place">{escape(where)}</div>'
    data = f'data-direction="{flip.direction}" data-suite="{escape(flip.suite)}" data-kind="{escape(flip.kind)}"'
    return (
        f'<details {data}><summary><span class="{flip.direction}-tag">{flip.direction}</span> '
        f'<b>{escape(flip.id)}</b> <span class="soft">{escape(flip.suite)}, {escape(flip.kind)}; '
        f"expected {short}</span></summary>"
        f"<pre>{escape(flip.prompt)}</pre>{whole}{parted}"
        f'<div class="side"><div><span class="soft">training</span>{_answer(flip.training_answer, flip)}</div>'
        f'<div><span class="soft">serving</span>{_answer(flip.serving_answer, flip)}</div></div></details>'
    )


def _answer(answer: str, flip: FlippedQuery) -> str:
    head, token, tail = first_token(answer, flip.first_difference)
    marked = f'<mark class="first">{escape(token)}</mark>' if token else ""
    rest = f"<mark>{escape(tail)}</mark>" if tail else ""
    return f"<pre>{escape(head)}{marked}{rest}</pre>"
