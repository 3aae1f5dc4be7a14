"""A verdict as a Markdown step summary for a pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from eval_gate.report import drift
from eval_gate.report import format as fmt
from eval_gate.report.text import clipped, excerpt, one_line
from eval_gate.verdict import FlippedQuery, Verdict

MAX_FLIPS = 20
_MARKUP = re.compile(r"([\\`*_{}\[\]<>|#~&@$]|:(?=\S)|(?<=www)\.)")
_TEXT_COLUMNS = {
    "kind",
    "suite",
    "outcome",
    "arm",
    "query",
    "expected",
    "training answer",
    "serving answer",
    "first different token",
}


def render_markdown(verdict: Verdict) -> str:
    """Outcome, reasons, numbers per kind, suite, look and arm, the first flipped queries, and what was judged."""
    name = verdict.policy_name or verdict.serving_evidence.source
    version = f" {verdict.policy_version}" if verdict.policy_version else ""
    lines = [f"## {verdict.outcome}: {_text(name + version)}", ""]
    lines += [f"- {_text(text)}" for text in (*verdict.reasons, *verdict.labels)]
    lines += ["", f"{_text(verdict.method)}; margin {_text(fmt.margin(verdict))} points; positive = lost."]
    lines += _kinds(verdict)
    lines += _suites(verdict) + _looks(verdict) + _arms(verdict)
    said = drift.sentences(verdict)
    lines += ["", *(f"- {_text(sentence)}" for sentence in said)] if said else []
    lines += _flips(verdict)
    lines += ["", f"Expires {verdict.expires:%Y-%m-%d %H:%M} UTC.", "", "| subject | digest |", "|---|---|"]
    lines += [f"| {key} | `{value or 'unknown'}` |" for key, value in verdict.subjects.model_dump().items()]
    return "\n".join(lines) + "\n"


def _kinds(verdict: Verdict) -> list[str]:
    kinds, left = fmt.kinds(verdict)
    rows = [
        (
            _text(clipped(kind, 60)) if found is not verdict.overall else "**all**",
            found.n,
            fmt.percent(found.training_pass_rate),
            fmt.percent(found.serving_pass_rate),
            fmt.points(found.gap),
            fmt.interval(found.lower, found.upper),
            found.only_training,
            found.only_serving,
        )
        for kind, found in [*kinds, ("all", verdict.overall)]
    ]
    more = ["", f"The kinds with the largest gaps; {left} more in verdict.json."] if left else []
    return _table(("kind", "queries", "training", "serving", "gap", "interval", "lost", "gained"), rows) + more


def _suites(verdict: Verdict) -> list[str]:
    if len(verdict.suites) < 2:
        return []
    rows = []
    for suite in verdict.suites:
        found = suite.comparison
        bounds = fmt.interval(found.lower, found.upper)
        rows.append((_text(suite.suite), found.n, fmt.points(found.gap), bounds, suite.outcome))
    return _table(("suite", "queries", "gap", "interval", "outcome"), rows)


def _looks(verdict: Verdict) -> list[str]:
    rows = []
    for look in verdict.looks:
        for suite in look.suites:
            found = suite.comparison
            rows.append(
                (
                    f"{look.look} of {verdict.policy.looks}",
                    found.n,
                    _text(suite.suite),
                    fmt.points(found.gap),
                    fmt.interval(found.lower, found.upper),
                    f"{suite.level:.4f}",
                    suite.outcome,
                )
            )
    return _table(("look", "queries", "suite", "gap", "interval", "level", "outcome"), rows) if rows else []


def _arms(verdict: Verdict) -> list[str]:
    rows = [
        (
            name,
            fmt.pass_rate(arm.pass_rate_low, arm.pass_rate_high),
            sum(arm.unscored.values()),
            arm.truncated,
            arm.degenerate,
            fmt.mean_tokens(arm.mean_completion_tokens),
        )
        for name, arm in (("training", verdict.training), ("serving", verdict.serving))
    ]
    return _table(("arm", "pass rate", "errors", "truncated", "degenerate", "tokens/answer"), rows)


def _flips(verdict: Verdict) -> list[str]:
    total = len(verdict.flipped) + verdict.flipped_left_out
    if not verdict.flipped:
        return []
    shown = verdict.flipped[:MAX_FLIPS]
    tokens = any(flip.first_different_token for flip in shown)
    rows = [
        (
            f"{_text(clipped(flip.id, 80))} ({flip.direction})",
            _text(clipped(flip.expected, 80)),
            *(_answer(flip, answer) for answer in (flip.training_answer, flip.serving_answer)),
            *([_token(flip)] if tokens else []),
        )
        for flip in shown
    ]
    head = ("query", "expected", "training answer", "serving answer", *(["first different token"] if tokens else []))
    title = f"Flipped queries ({total})" if total == len(shown) else f"Flipped queries (first {len(shown)} of {total})"
    return ["", f"<details><summary>{title}</summary>", *_table(head, rows), "", "</details>"]


def _answer(flip: FlippedQuery, answer: str) -> str:
    head, token, tail = excerpt(answer, flip.first_difference)
    # A mark of emphasis does not close beside white space, and a model may say anything, so the mark is a tag.
    return _text(head) + (f"<b>{_text(token)}</b>" if token else "") + _text(tail)


def _token(flip: FlippedQuery) -> str:
    found = flip.first_different_token
    if found is None:
        return "–"
    sides = ["ended" if side is None else f"“{_text(clipped(side, 40))}”" for side in (found.training, found.serving)]
    return f"{found.index}: {sides[0]} / {sides[1]}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table, an empty one first; cells are Markdown already."""
    rule = "|" + "".join("---|" if name in _TEXT_COLUMNS else "---:|" for name in head)
    lines = ["", "| " + " | ".join(head) + " |", rule]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def _text(text: str) -> str:
    """Text on one line that starts no markup, ends no cell, and makes no link and no mention."""
    flat = one_line(" ".join(text.split()))
    kept = " " if text[:1].isspace() else "", " " if text[-1:].isspace() else ""
    return kept[0] + _MARKUP.sub(r"\\\1", flat) + kept[1]
