"""`eval-gate plan`: queries, repeats and cost for a margin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from eval_gate.arms.records import Role
from eval_gate.commands.options import Alpha, AsJson, Margin, Spending
from eval_gate.outcomes import Outcomes
from eval_gate.pairing import ItemSet, pair_up
from eval_gate.planning import Plans, Variance, default_variance, pilot_variance, plan_runs
from eval_gate.recorded import RecordedArm, common_queries, read_arm
from eval_gate.suites.named import open_queries
from trace_serve.errors import ConfigError


def plan(
    pilot: Annotated[
        Path | None, typer.Option(help="results.jsonl of an earlier run with both arms; default: --discordance.")
    ] = None,
    queries: Annotated[str | None, typer.Option(help="The pilot's query file or suite, for its clusters.")] = None,
    margin: Margin = 0.05,
    alpha: Alpha = 0.05,
    power: Annotated[float, typer.Option(help="Wanted probability of PASS at the expected gap.")] = 0.80,
    expected_gap: Annotated[float, typer.Option(help="True loss that should still pass.")] = 0.0,
    discordance: Annotated[float, typer.Option(help="Share of queries that one arm alone answers right.")] = 0.10,
    looks: Annotated[int, typer.Option(min=1, max=20, help="As of `run`.")] = 1,
    spending: Annotated[Spending, typer.Option(help="As of `run`.")] = Spending.OBF,
    tokens_per_sample: Annotated[
        float | None, typer.Option(help="Prompt and answer tokens of one sample; default: the pilot's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how many queries and repeats a margin needs, and what they cost."""
    if not 0 <= discordance <= 1:
        raise ConfigError(f"--discordance {discordance:g}: expected a share from 0 to 1", field="discordance")
    variance = default_variance(discordance) if pilot is None else read_pilot(pilot, queries)
    if tokens_per_sample is not None:
        variance = variance.model_copy(update={"tokens": 2 * tokens_per_sample})
    found = plan_runs(
        variance,
        margin=margin,
        alpha=alpha,
        power=power,
        expected_gap=expected_gap,
        looks=looks,
        spending=spending.value,
    )
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        _show(found, Console())


def read_pilot(path: Path, queries: str | None) -> Variance:
    """Variance components and tokens of a run's results.

    Raises:
        ConfigError: the file lacks an arm, or too little of it is scored.
    """
    one, two = read_arm(path, Role.TRAINING, only=True), read_arm(path, Role.SERVING, only=True)
    items: ItemSet = common_queries(one, two)
    if queries is not None:
        items = open_queries(queries)
    repeats = max(one.repeats, two.repeats)
    known = [query for query in items.queries if query.id in one.queries or query.id in two.queries]
    outcomes = Outcomes.of(pair_up(known, [*one.samples, *two.samples], repeats))
    counted = [_tokens(arm) for arm in (one, two)]
    tokens = None if any(count is None for count in counted) else sum(count or 0.0 for count in counted)
    return pilot_variance(outcomes, repeats, tokens, path.name)


def _tokens(arm: RecordedArm) -> float | None:
    sizes = [
        sample.prompt_tokens + sample.completion_tokens
        for sample in arm.samples
        if sample.prompt_tokens is not None and sample.completion_tokens is not None
    ]
    return sum(sizes) / len(sizes) if sizes else None


def _show(found: Plans, console: Console) -> None:
    variance = found.variance
    spread = f"{variance.of(1):.4f}" + ("" if variance.within is None else f" (within a query {variance.within:.4f})")
    table = Table(
        box=box.SIMPLE,
        caption=(
            f"margin {100 * found.margin:g} points, alpha {found.alpha:g}, power {found.power:g} at a gap of "
            f"{100 * found.expected_gap:g}; variance of one pair {spread} ({variance.source}), design effect "
            f"{variance.design_effect:.2f}"
        ),
        caption_justify="left",
    )
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
    if variance.within is None:
        console.print("more than one repeat can be planned from a pilot with --repeats of at least 2", style="dim")
