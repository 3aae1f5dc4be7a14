"""`eval-gate plan`: queries, repeats and cost for a margin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eval_gate.commands.options import (
    DEFAULT,
    Alpha,
    AsJson,
    Looks,
    Margin,
    MarginKind,
    MarginOf,
    Spending,
    SpendingOption,
)

if TYPE_CHECKING:
    from eval_gate.planning import Plans


def plan(
    pilot: Annotated[
        Path | None, typer.Option(help="results.jsonl of an earlier run with both arms; default: --discordance.")
    ] = None,
    queries: Annotated[
        str | None, typer.Option(help="The pilot's query file or suite, where its results lack suites and clusters.")
    ] = None,
    margin: Margin = DEFAULT.margin,
    margin_kind: MarginOf = MarginKind.ABSOLUTE,
    alpha: Alpha = DEFAULT.alpha,
    power: Annotated[float, typer.Option(help="Wanted probability of PASS at the expected gap.")] = 0.80,
    expected_gap: Annotated[float, typer.Option(help="True loss, in points, that should still pass.")] = 0.0,
    discordance: Annotated[float, typer.Option(help="Share of queries that one arm alone answers right.")] = 0.10,
    pass_rate: Annotated[
        float | None, typer.Option(help="Of the training arm, for a relative margin without a pilot.")
    ] = None,
    suites: Annotated[int, typer.Option(min=1, max=100, help="Suites that must all pass, without a pilot.")] = 1,
    looks: Looks = DEFAULT.looks,
    spending: SpendingOption = Spending.OBF,
    tokens_per_sample: Annotated[
        float | None, typer.Option(help="Prompt and answer tokens of one sample; default: the pilot's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how many queries and repeats a margin needs, and what they cost."""
    from eval_gate.pilot import default_variance, read_pilot
    from eval_gate.planning import plan_runs
    from eval_gate.policy import GatePolicy

    GatePolicy.build(margin=margin, margin_kind=margin_kind.value, alpha=alpha, looks=looks)
    weight = 1 - margin if margin_kind is MarginKind.RELATIVE else 1.0
    if pilot is None:
        one = default_variance(discordance, weight=weight, pass_rate=pass_rate)
        found = {"default": one} if suites == 1 else {f"suite {number + 1}": one for number in range(suites)}
    else:
        found = read_pilot(pilot, queries, weight=weight)
    if tokens_per_sample is not None:
        found = {name: one.model_copy(update={"tokens": 2 * tokens_per_sample}) for name, one in found.items()}
    plans = plan_runs(
        found,
        margin=margin,
        margin_kind=margin_kind.value,
        alpha=alpha,
        power=power,
        expected_gap=expected_gap,
        looks=looks,
        spending=spending.value,
    )
    if as_json:
        typer.echo(plans.model_dump_json(indent=2))
    else:
        _show(plans)


def _show(found: Plans) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(box=box.SIMPLE, caption=_caption(found), caption_justify="left")
    columns = ["repeats", "queries", "requests", "tokens"]
    if found.looks > 1:
        columns.insert(2, f"on average with {found.looks} looks")
    for column in columns:
        table.add_column(column, justify="right")
    for index, row in enumerate(found.plans):
        cells = [
            str(row.repeats),
            str(row.queries),
            str(row.requests),
            "-" if row.tokens is None else f"{row.tokens:,}",
        ]
        if found.looks > 1:
            cells.insert(2, str(row.expected_queries))
        table.add_row(*cells, style="bold" if index == found.cheapest else None)
    console.print(table)
    if len(found.variances) > 1:
        sizes = ", ".join(f"{suite} {size}" for suite, size in found.plans[found.cheapest].suites.items())
        console.print(f"queries of each suite in the cheapest plan: {sizes}", soft_wrap=True, highlight=False)
    if any(variance.within is None for variance in found.variances.values()):
        console.print("more than one repeat can be planned from a pilot with --repeats of at least 2", style="dim")


def _caption(found: Plans) -> str:
    of = " of the training pass rate" if found.margin_kind == "relative" else ""
    unit = "%" if of else " points"
    head = (
        f"margin {100 * found.margin:g}{unit}{of}, alpha {found.alpha:g}, power {found.power:g} at a gap of "
        f"{100 * found.expected_gap:g} points"
    )
    if len(found.variances) > 1:
        return (
            f"{head}; {len(found.variances)} suites, each planned for {found.suite_power:.3g}, so that all pass with "
            f"{found.power:g} at least"
        )
    (variance,) = found.variances.values()
    spread = f"{variance.of(1):.4f}" + ("" if variance.within is None else f" (within a query {variance.within:.4f})")
    return f"{head}; variance of one pair {spread} ({variance.source}), design effect {variance.design_effect:.2f}"
