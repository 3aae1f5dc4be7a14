"""A report as one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from trace_serve.load.histograms import Latencies
from trace_serve.load.render import TITLES, counts, figure, title_of, values, version
from trace_serve.load.report import LoadReport

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --a: #2a6fdb; --b: #d9822b; --c: #2e9e5b; --d: #a04fc4; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
td, th { padding: .25rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
td:first-child, th:first-child { text-align: left; }
.verdict { font-size: 1.3rem; font-weight: 600; } .met { color: #2e9e5b; } .missed { color: #cf3b3b; }
.invalid { color: #b98900; } code { word-break: break-all; } svg { width: 100%; height: auto; }
svg text { fill: currentColor; font-size: 12px; }
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 760.0, 320.0, 76.0, 40.0
_PERCENTS = [*range(1, 100), 99.5, 99.9, 99.99]
_CURVES = {"ttft_scheduled": "--a", "ttft_sent": "--b", "e2e_scheduled": "--c", "e2e_sent": "--d"}


def render_html(report: LoadReport) -> str:
    """The whole page."""
    state = report.verdict.value
    body = [
        f"<h1>Load test of {escape(report.host)}</h1>",
        f'<p class="verdict {state}">SLO {state}</p>',
        f"<p>{escape(report.began)} · {escape(_load(report))} · workload {report.plan.workload}"
        f" · seed {report.plan.seed} · load processes: {report.processes}</p>",
        _list("Invalid", report.invalid),
        _list("Notes", report.notes),
        _table(
            ["ms", "count", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"],
            [[title_of(each, report), str(each.count), *map(figure, values(each))] for each in report.latencies],
        ),
        _plot(report),
        f"<p>{report.offered} arrivals in {report.wall_s:.1f} s, {report.warmup_requests} more in the warm-up:"
        f" {escape(counts(report.outcomes))}.<br>{report.requests_per_s:.2f} requests/s,"
        f" {report.tokens_per_s:.1f} completion tokens/s, goodput {report.goodput:.1%}"
        f" ({report.goodput_per_s:.2f}/s).</p>",
        "<h2>SLO</h2>",
        _table(
            ["limit", "", "measured", ""],
            [
                [
                    check.name,
                    ("≥ " if check.at_least else "≤ ") + f"{check.limit:g}",
                    "none" if check.measured is None else f"{check.measured:.4g}",
                    "met" if check.met else "missed",
                ]
                for check in report.checks
            ],
        ),
        _list("What answered", [f"{each.requests} requests: {version(each)}" for each in report.versions]),
        _list("Swaps", [f"{s.at_s:.1f} s: {s.policy}, {s.fault or f'{s.seconds:.1f} s'}" for s in report.swaps]),
        _list("Why requests did not succeed", [f"{count} × {why}" for why, count in report.reasons.items()]),
        f"<details><summary>Plan</summary><pre>{escape(report.plan.model_dump_json(indent=1))}</pre></details>",
    ]
    return _document(f"Load test: {state}", "".join(body))


def page(title: str, headline: str, head: Sequence[str], rows: Iterable[Sequence[str]], remarks: Sequence[str]) -> str:
    """A page of one table."""
    body = f'<h1>{escape(title)}</h1><p class="verdict">{escape(headline)}</p>{_table(head, rows)}'
    return _document(title, body + _list("Remarks", remarks))


def _document(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _load(report: LoadReport) -> str:
    plan = report.plan
    if plan.arrivals == "closed":
        return f"closed loop of {plan.users} users"
    return f"{plan.arrivals} arrivals" + (f" at {plan.rate:g}/s" if plan.rate and plan.arrivals != "trace" else "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f"<table><tr>{titles}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f"<h2>{escape(title)}</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _plot(report: LoadReport) -> str:
    """Latency by percentile, both axes logarithmic, as HDR histograms are usually drawn."""
    latencies = Latencies()
    latencies.merge(report.histograms)
    shown = [name for name in _CURVES if latencies.count(name) and (report.plan.is_open or name.endswith("_sent"))]
    if not shown:
        return ""
    # A percentile that fewer than one value lies above is the maximum again; the curve ends before it.
    known = [each for each in _PERCENTS if latencies.count(shown[0]) * (1 - each / 100) >= 1] or _PERCENTS[:1]
    curves = {name: [max(value * 1000, 0.1) for value in latencies.curve(name, known)] for name in shown}
    low = math.floor(math.log10(min(map(min, curves.values()))))
    high = max(math.ceil(math.log10(max(map(max, curves.values())))), low + 1)

    def x(percent: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 110) * -math.log10(1 - percent / 100) / 4

    def y(value: float) -> float:
        return 10 + (_HEIGHT - _BOTTOM - 10) * (high - math.log10(value)) / (high - low)

    parts = []
    for exponent in range(low, high + 1):
        at = y(10.0**exponent)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - 110}" stroke="var(--line)"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**exponent:g} ms</text>')
    for percent in (50, 90, 99, 99.9, 99.99):
        parts.append(f'<text x="{x(percent):.1f}" y="{_HEIGHT - 18}" text-anchor="middle">p{percent:g}</text>')
    for row, (name, points) in enumerate(curves.items()):
        path = "L".join(f"{x(percent):.1f} {y(value):.1f}" for percent, value in zip(known, points, strict=True))
        parts.append(f'<path d="M{path}" fill="none" stroke="var({_CURVES[name]})" stroke-width="2"/>')
        key = f'x="{_WIDTH - 104}" y="{24 + 18 * row}" style="fill:var({_CURVES[name]})"'
        parts.append(f"<text {key}>{TITLES[name]}</text>")
    box = f'viewBox="0 0 {_WIDTH + 40} {_HEIGHT}" role="img" aria-label="latency by percentile"'
    return f"<svg {box}>{''.join(parts)}</svg>"
