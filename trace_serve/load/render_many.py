"""Tables of a search and of a comparison, for the terminal and as HTML."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trace_serve.load.bootstrap import Ratio
from trace_serve.load.compare import Comparison
from trace_serve.load.html import page
from trace_serve.load.render import figure
from trace_serve.load.search import SearchResult, Step


def step_line(step: Step) -> str:
    missed = f" ({', '.join(step.missed)})" if step.missed else ""
    return f"{step.rate:.4g} requests/s offered: SLO {step.verdict.value}{missed}"


def _conclusion(result: SearchResult) -> str:
    if result.highest is None:
        return "no rate met the SLO"
    if any(step.verdict.value == "invalid" for step in result.steps):
        return f"ended by an invalid step; {result.highest:.4g} requests/s met the SLO before"
    end = "" if result.bounded else ", the end of the range: the server may sustain more"
    return f"highest rate that met the SLO: {result.highest:.4g} requests/s{end}"


_STEPS = ("offered/s", "answered/s", "tokens/s", "goodput", "SLO", "missed")


def _step_cells(step: Step) -> list[str]:
    numbers = [f"{step.rate:.4g}", f"{step.requests_per_s:.4g}", f"{step.tokens_per_s:.4g}", f"{step.goodput:.1%}"]
    return [*numbers, step.verdict.value, ", ".join(step.missed)]


def render_search(result: SearchResult) -> RenderableType:
    rows = [_step_cells(step) for step in sorted(result.steps, key=lambda each: each.rate)]
    return Group(_table(_STEPS, rows), Text(_conclusion(result), style="bold"))


def search_html(result: SearchResult) -> str:
    rows = [_step_cells(step) for step in sorted(result.steps, key=lambda each: each.rate)]
    return page("Search for the highest rate", _conclusion(result), _STEPS, rows, [])


def _heads(result: Comparison) -> tuple[str, ...]:
    return ("", result.a.name, result.b.name, "ratio", "95 % interval", "rounds")


def _ratio_cells(each: Ratio) -> list[str]:
    interval = "none" if each.low is None or each.high is None else f"{each.low:.3f} - {each.high:.3f}"
    spread = f"{min(each.rounds):.3f} - {max(each.rounds):.3f}"
    return [each.name, figure(each.a), figure(each.b), f"{each.ratio:.3f}", interval, spread]


def _remarks(result: Comparison) -> list[str]:
    lines = [f"{result.a.name}: {result.a.host}", f"{result.b.name}: {result.b.host}"]
    lines += [f"note: {note}" for note in result.notes]
    lines += [f"SLO missed: {each}" for each in result.missed]
    return lines + [f"invalid: {each}" for each in result.invalid]


def render_comparison(result: Comparison) -> RenderableType:
    rows = [_ratio_cells(each) for each in result.ratios]
    head = f"{result.b.name} over {result.a.name}, {result.rounds} rounds, {result.pairs} pairs of answers"
    return Group(Text(head, style="bold"), _table(_heads(result), rows), Text("\n".join(_remarks(result))))


def comparison_html(result: Comparison) -> str:
    rows = [_ratio_cells(each) for each in result.ratios]
    head = f"{result.rounds} rounds in turns, {result.pairs} pairs of answers"
    return page(f"{result.b.name} over {result.a.name}", head, _heads(result), rows, _remarks(result))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        table.add_column(head)
    for row in rows:
        table.add_row(*row)
    return table
