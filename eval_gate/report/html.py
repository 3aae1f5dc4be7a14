"""A verdict as one HTML file that needs nothing else: no network, no script but the filter, every text escaped."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path

from eval_gate.report import format as fmt
from eval_gate.report.drift import drift_section
from eval_gate.report.html_flips import SCRIPT, flips_section
from eval_gate.report.path_plot import path_section
from eval_gate.report.plot import gap_plot
from eval_gate.verdict import Comparison, Verdict

_STYLE = Path(__file__).with_name("style.css")
_SCRIPT_DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
_CONTENT_POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_SCRIPT_DIGEST}'"


def render_html(verdict: Verdict) -> str:
    """The whole report."""
    name = verdict.policy_name or verdict.serving_evidence.source
    version = f" {verdict.policy_version}" if verdict.policy_version else ""
    title = _text(f"{verdict.outcome}: {name}{version}")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>",
            f"<style>{_STYLE.read_text(encoding='utf-8')}</style></head>",
            f'<body class="{verdict.outcome}"><main>',
            _header(verdict, name + version),
            _figures(verdict),
            f"<section><h2>Gap against margin</h2>{gap_plot(verdict)}"
            f'<div class="soft">{_text(verdict.method)}; {_deciding(verdict)}</div></section>',
            path_section(verdict),
            _suites(verdict),
            _kinds(verdict),
            f'<div class="columns">{_matrix(verdict.overall)}{_arms(verdict)}</div>',
            drift_section(verdict),
            flips_section(verdict),
            _provenance(verdict),
            f"</main><script>{SCRIPT}</script></body></html>\n",
        ]
    )


def _deciding(verdict: Verdict) -> str:
    said = "each suite decides by its own bounds" if len(verdict.suites) > 1 else "the lowest bar decides"
    left = fmt.kinds(verdict)[1]
    return f"{said}; the kinds with the largest gaps, {left} more in the table" if left else said


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _header(verdict: Verdict, name: str) -> str:
    reasons = "".join(f'<li class="reason">{_text(reason)}</li>' for reason in verdict.reasons)
    labels = "".join(f'<li class="label-warning">{_text(label)}</li>' for label in verdict.labels)
    return (
        f'<header><span class="badge">{verdict.outcome}</span><div><h1>{_text(name)}</h1>'
        f'<div class="soft">as trained / as served, {verdict.overall.n} queries of {_text(verdict.query_source)}, '
        f"{verdict.created:%Y-%m-%d %H:%M} UTC</div></div></header>"
        f"<section><ul>{reasons}{labels}</ul></section>"
    )


def _figures(verdict: Verdict) -> str:
    found = verdict.overall
    figures = [
        ("training pass rate", fmt.pass_rate(verdict.training.pass_rate_low, verdict.training.pass_rate_high)),
        ("serving pass rate", fmt.pass_rate(verdict.serving.pass_rate_low, verdict.serving.pass_rate_high)),
        ("gap, points", fmt.points(found.gap)),
        ("interval, points", fmt.interval(found.lower, found.upper)),
        ("margin, points", "unknown" if found.margin is None else f"{100 * found.margin:.3g}"),
        ("McNemar exact p", fmt.p_value(found.mcnemar_exact_p)),
    ]
    cells = "".join(
        f'<div class="figure"><span class="soft">{name}</span><b>{value}</b></div>' for name, value in figures
    )
    return f'<section class="figures">{cells}</section>'


def _suites(verdict: Verdict) -> str:
    head = ("suite", "queries", "training", "serving", "gap", "interval", "margin", "lost", "gained", "outcome")
    rows = []
    for suite in verdict.suites:
        found = suite.comparison
        cells = (
            _text(suite.suite),
            found.n if found.n == found.scored else f"{found.n} ({found.scored} scored)",
            fmt.percent(found.training_pass_rate),
            fmt.percent(found.serving_pass_rate),
            fmt.points(found.gap),
            fmt.interval(found.lower, found.upper),
            "unknown" if found.margin is None else f"{100 * found.margin:.3g}",
            found.only_training,
            found.only_serving,
            f'<b class="{suite.outcome}-text">{suite.outcome}</b>',
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    note = "its upper bound has to stay below the margin"
    if len(rows) > 1:
        note = "every suite must pass; with several, the lower bounds are Holm's"
    return (
        '<section id="suites"><h2>By suite</h2><table><tr>'
        + "".join(f"<th>{name}</th>" for name in head)
        + f'</tr>{"".join(rows)}</table><div class="soft">{note}</div></section>'
    )


def _kinds(verdict: Verdict) -> str:
    groups = [*verdict.kinds.items(), ("all queries", verdict.overall)]
    head = ("kind", "queries", "training", "serving", "gap", "interval", "lost", "gained")
    rows = []
    for name, found in groups:
        cells = (
            _text(name),
            found.n if found.n == found.scored else f"{found.n} ({found.scored} scored)",
            fmt.percent(found.training_pass_rate),
            fmt.percent(found.serving_pass_rate),
            fmt.points(found.gap),
            fmt.interval(found.lower, found.upper),
            found.only_training,
            found.only_serving,
        )
        style = ' class="all"' if found is verdict.overall else ""
        rows.append(f"<tr{style}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return (
        "<section><h2>By kind of query</h2><table><tr>"
        + "".join(f"<th>{name}</th>" for name in head)
        + "</tr>"
        + "".join(rows)
        + "</table></section>"
    )


def _matrix(found: Comparison) -> str:
    return (
        '<section><h2>Pairs</h2><table class="matrix"><tr><th></th><th>serving right</th><th>serving wrong</th></tr>'
        f'<tr><td class="soft">training right</td><td>{found.both}</td><td class="lost">{found.only_training}</td></tr>'
        f'<tr><td class="soft">training wrong</td><td class="gained">{found.only_serving}</td>'
        f"<td>{found.neither}</td></tr>"
        "</table></section>"
    )


def _arms(verdict: Verdict) -> str:
    one, two = verdict.training, verdict.serving
    rows: list[tuple[str, object, object]] = [
        ("samples", one.samples, two.samples),
        ("right", one.passed, two.passed),
        ("wrong", one.failed, two.failed),
        ("cut at the token limit", one.truncated, two.truncated),
        ("one token repeated", one.degenerate, two.degenerate),
        (
            "tokens an answer",
            fmt.mean_tokens(one.mean_completion_tokens),
            fmt.mean_tokens(two.mean_completion_tokens),
        ),
        ("requests made", one.attempts, two.attempts),
    ]
    for kind in sorted(set(one.unscored) | set(two.unscored)):
        rows.append((f"error: {kind}", one.unscored.get(kind, 0), two.unscored.get(kind, 0)))
    body = "".join(f"<tr><td>{_text(name)}</td><td>{a}</td><td>{b}</td></tr>" for name, a, b in rows)
    return f"<section><h2>Arms</h2><table><tr><th></th><th>training</th><th>serving</th></tr>{body}</table></section>"


def _provenance(verdict: Verdict) -> str:
    rows = [
        (f"digest: {name.replace('_', ' ')}", value or "unknown")
        for name, value in verdict.subjects.model_dump().items()
    ]
    rows += [
        ("recipe_id", verdict.recipe_id or "none"),
        ("training arm", verdict.training_evidence.source),
        ("serving arm", verdict.serving_evidence.source),
    ]
    for name, evidence in (("training", verdict.training_evidence), ("serving", verdict.serving_evidence)):
        if evidence.report is not None:
            rows.append((f"{name} engine", json.dumps(evidence.report.model_dump(mode="json"), sort_keys=True)))
    rows += [
        ("gate policy", json.dumps(verdict.policy.model_dump(mode="json"), sort_keys=True)),
        ("smallest possible upper bound", fmt.points(verdict.floor)),
        ("fewest queries for this margin", str(verdict.queries_needed)),
        ("expires", f"{verdict.expires:%Y-%m-%d %H:%M} UTC"),
        ("tools", ", ".join(f"{name} {version}" for name, version in verdict.tools.items())),
    ]
    body = "".join(f"<tr><td>{_text(name)}</td><td><code>{_text(value)}</code></td></tr>" for name, value in rows)
    return f'<section><h2>Provenance</h2><table class="provenance">{body}</table></section>'
