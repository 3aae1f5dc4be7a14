"""A verdict on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from eval_gate.report import drift
from eval_gate.report import format as fmt
from eval_gate.report.text import clipped, excerpt, one_line
from eval_gate.stats.rule import Outcome
from eval_gate.verdict import FlippedQuery, Verdict

COLOURS = {Outcome.PASS: "green", Outcome.BLOCK: "red", Outcome.INCONCLUSIVE: "yellow"}
NARROW = 80
"""Columns under which the pass rates of each kind are left out."""


def print_verdict(verdict: Verdict, console: Console, *, flipped: int = 5) -> None:
    """Prints outcome, numbers per kind and the first `flipped` flipped queries."""
    console.print(_headline(verdict))
    console.print(_numbers(verdict))
    console.print(_kinds(verdict, narrow=console.width < NARROW))
    if len(verdict.suites) > 1:
        console.print(_suites(verdict))
    if verdict.looks:
        console.print(_looks(verdict))
    for sentence in drift.sentences(verdict):
        console.print(Text(sentence))
    if verdict.flipped and flipped:
        console.print(_flips(verdict, flipped))


def _headline(verdict: Verdict) -> Panel:
    colour = COLOURS[verdict.outcome]
    lines = [Text(one_line(verdict.reasons[0]), style="bold")]
    lines += [Text(one_line(reason)) for reason in verdict.reasons[1:]]
    lines += [Text(one_line(label), style="yellow") for label in verdict.labels]
    name = verdict.policy_name or verdict.serving_evidence.source
    version = f" {verdict.policy_version}" if verdict.policy_version else ""
    title = f"[bold {colour}]{verdict.outcome}[/]  {escape(one_line(name + version))}"
    return Panel(Group(*lines), title=title, title_align="left", border_style=colour)


def _numbers(verdict: Verdict) -> Table:
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for column in ("arm", "pass rate", "errors", "truncated", "degenerate", "tokens/answer"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, arm in (("training", verdict.training), ("serving", verdict.serving)):
        table.add_row(
            name,
            fmt.pass_rate(arm.pass_rate_low, arm.pass_rate_high),
            str(sum(arm.unscored.values())),
            str(arm.truncated),
            str(arm.degenerate),
            fmt.mean_tokens(arm.mean_completion_tokens),
        )
    return table


def _kinds(verdict: Verdict, *, narrow: bool) -> Table:
    kinds, left = fmt.kinds(verdict)
    more = f"the kinds with the largest gaps, {left} more in the report; " if left else ""
    table = Table(
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        caption=f"{more}gap in points, positive = lost; {verdict.method}; margin {fmt.margin(verdict)}",
        caption_justify="left",
    )
    rates = () if narrow else ("training", "serving")
    for column in ("kind", "queries", *rates, "gap", "interval", "lost", "gained"):
        table.add_column(column, justify="left" if column == "kind" else "right", no_wrap=column != "kind")
    rows = [*kinds, ("all", verdict.overall)]
    for name, found in rows:
        table.add_row(
            escape(clipped(name, 60)),
            str(found.n),
            *(fmt.percent(rate) for rate in (found.training_pass_rate, found.serving_pass_rate)[: len(rates)]),
            fmt.points(found.gap),
            fmt.interval(found.lower, found.upper),
            str(found.only_training),
            str(found.only_serving),
            style="bold" if name == "all" else None,
        )
    return table


def _suites(verdict: Verdict) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("suite", "queries", "gap", "interval", "outcome"):
        table.add_column(column, justify="left" if column == "suite" else "right")
    for suite in verdict.suites:
        found = suite.comparison
        outcome = Text(suite.outcome, style=COLOURS[suite.outcome])
        bounds = fmt.interval(found.lower, found.upper)
        table.add_row(escape(suite.suite), str(found.n), fmt.points(found.gap), bounds, outcome)
    return table


def _looks(verdict: Verdict) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("look", "queries", "suite", "gap", "interval", "level", "outcome"):
        table.add_column(column, justify="left" if column == "suite" else "right")
    for look in verdict.looks:
        for suite in look.suites:
            found = suite.comparison
            table.add_row(
                f"{look.look} of {verdict.policy.looks}",
                str(found.n),
                escape(suite.suite),
                fmt.points(found.gap),
                fmt.interval(found.lower, found.upper),
                f"{suite.level:.4f}",
                Text(suite.outcome, style=COLOURS[suite.outcome]),
            )
    return table


def _flips(verdict: Verdict, limit: int) -> Table:
    rest = len(verdict.flipped) + verdict.flipped_left_out - limit
    table = Table(
        title="flipped queries",
        title_justify="left",
        caption=f"and {rest} more in the report" if rest > 0 else None,
        caption_justify="left",
        show_lines=True,
    )
    for column in ("query", "expected", "training answer", "serving answer"):
        table.add_column(column, overflow="fold")
    for flip in verdict.flipped[:limit]:
        table.add_row(
            _name(flip),
            Text(clipped(one_line(flip.expected), 160)),
            _answer(flip, flip.training_answer),
            _answer(flip, flip.serving_answer),
        )
    return table


def _name(flip: FlippedQuery) -> Text:
    name = Text(f"{clipped(one_line(flip.id), 60)} ({flip.direction})")
    found = flip.first_different_token
    return name if found is None else name.append(f"\nfrom token {found.index}", "dim")


def _answer(flip: FlippedQuery, answer: str) -> Text:
    head, token, tail = excerpt(answer, flip.first_difference)
    return Text.assemble(head, (token, "bold reverse"), (tail, "bold"))
