"""A report as a table for the terminal, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trace_serve.load.report import Latency, LoadReport

TITLES = {
    "ttft_scheduled": "TTFT from schedule",
    "ttft_sent": "TTFT from send",
    "e2e_scheduled": "E2E from schedule",
    "e2e_sent": "E2E from send",
    "tpot": "TPOT",
    "itl": "ITL",
    "lag": "sent - scheduled",
    "hints": "hint file",
}
COLORS = {"met": "green", "missed": "red", "invalid": "yellow"}


def render(report: LoadReport) -> RenderableType:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("ms")
    for title in ("count", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"):
        table.add_column(title, justify="right")
    for each in report.latencies:
        if report.plan.is_open or each.metric not in ("ttft_scheduled", "e2e_scheduled", "lag"):
            table.add_row(title_of(each, report), str(each.count), *map(figure, values(each)))
    lines = [
        f"{report.offered} arrivals in {report.wall_s:.1f} s"
        f" (and {report.warmup_requests} in the warm-up): {counts(report.outcomes)}",
        f"{report.requests_per_s:.2f} requests/s, {report.tokens_per_s:.1f} completion tokens/s,"
        f" goodput {report.goodput:.1%} ({report.goodput_per_s:.2f}/s)",
    ]
    lines += [f"answered {each.requests}: {version(each)}" for each in report.versions]
    lines += [
        f"swap at {each.at_s:.1f} s to {each.policy}: {each.fault or f'{each.seconds:.1f} s'}" for each in report.swaps
    ]
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"{count} x {reason}" for reason, count in list(report.reasons.items())[:10]]
    lines += [f"invalid: {reason}" for reason in report.invalid]
    parts: list[RenderableType] = [table, Text("\n".join(lines)), _slo_table(report)]
    parts.append(Text(f"SLO {report.verdict.value}", style=f"bold {COLORS[report.verdict.value]}"))
    return Group(*parts)


def _slo_table(report: LoadReport) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("SLO", "limit", "measured", ""):
        table.add_column(title)
    for check in report.checks:
        bound = ("≥ " if check.at_least else "≤ ") + f"{check.limit:g}"
        measured = "none" if check.measured is None else f"{check.measured:.4g}"
        table.add_row(check.name, bound, measured, "met" if check.met else "missed")
    return table


def title_of(latency: Latency, report: LoadReport) -> str:
    title = TITLES[latency.metric]
    return title if report.plan.is_open else title.removesuffix(" from send")


def values(latency: Latency) -> list[float]:
    return [latency.mean, *latency.quantiles.values(), latency.maximum]


def figure(value: float) -> str:
    """Three significant digits below 100, whole numbers above: what the histogram holds."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def counts(of: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in of.items() if count) or "none"


def version(each: Any) -> str:
    """The labels of a `Version` that the server gave."""
    given = {"policy": each.policy, "digest": each.digest, "weights": each.weight_version, "verdict": each.verdict}
    return ", ".join(f"{name} {value}" for name, value in given.items() if value)


def summary_csv(report: LoadReport) -> str:
    """One line a metric."""
    rows: list[list[Any]] = [
        ["metric", "count", "mean_ms", "p50_ms", "p90_ms", "p95_ms", "p99_ms", "p99.9_ms", "max_ms"]
    ]
    rows += [[each.metric, each.count, *(f"{value:.3f}" for value in values(each))] for each in report.latencies]
    return _csv(rows)


COLUMNS = (
    "index", "client", "outcome", "scheduled_s", "sent_s", "first_s", "end_s", "prompt_tokens", "completion_tokens",
    "events", "good", "hint_s", "hint_bytes", "policy", "policy_digest", "weight_version", "verdict", "reason",
)  # fmt: skip


def requests_csv(rows: Iterable[dict[str, Any]]) -> str:
    """One line a request in the order of arrival; seconds since the run began."""
    lines: list[list[Any]] = [list(COLUMNS)]
    for row in sorted(rows, key=lambda each: each["index"]):
        names = ("policy", "policy_digest", "weight_version", "verdict")
        full = {**row, **dict(zip(names, row["labels"], strict=True))}
        lines.append([_cell(full[name]) for name in COLUMNS])
    return _csv(lines)


def _cell(value: Any) -> Any:
    return f"{value:.6f}" if isinstance(value, float) else "" if value is None else value


def _csv(rows: Iterable[list[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
