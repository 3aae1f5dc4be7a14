"""`eval-gate compare`: judges results that were recorded before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eval_gate.commands.options import (
    DEFAULT,
    Alpha,
    AsJson,
    BaselineFloor,
    DegenerateCap,
    ErrorCap,
    Looks,
    Margin,
    MarginKind,
    MarginOf,
    MaxQueries,
    Mode,
    ModeOption,
    Rule,
    RuleOption,
    Seed,
    Spending,
    SpendingOption,
    TruncationCap,
)
from eval_gate.policy import GatePolicy


def compare(
    training: Annotated[Path, typer.Argument(help="Results of the training-time version, JSON lines.")],
    serving: Annotated[Path, typer.Argument(help="Results of the serving-time version; one run's file may be both.")],
    queries: Annotated[
        str | None, typer.Option(help="Query file or shipped suite with suites, kinds and clusters.")
    ] = None,
    margin: Margin = DEFAULT.margin,
    margin_kind: MarginOf = MarginKind.ABSOLUTE,
    alpha: Alpha = DEFAULT.alpha,
    rule: RuleOption = Rule.CI,
    mode: ModeOption = Mode.POPULATION,
    looks: Looks = DEFAULT.looks,
    spending: SpendingOption = Spending.OBF,
    max_queries: MaxQueries = None,
    seed: Seed = DEFAULT.sample_seed,
    error_cap: ErrorCap = DEFAULT.error_cap,
    baseline_floor: BaselineFloor = DEFAULT.baseline_floor,
    degenerate_cap: DegenerateCap = DEFAULT.degenerate_cap,
    truncation_cap: TruncationCap = DEFAULT.truncation_cap,
    out: Annotated[Path | None, typer.Option(help="Directory for verdict.json and the reports.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge recorded results of any suite. Exit codes as of `run`; nothing is signed.

    A line is {"id": "q1", "passed": true}, with sample, suite, kind, cluster, text and error where known, or a line of
    a run's results.jsonl. With --looks the queries are taken in the order of --seed, and those after the look that
    decides do not count.
    """
    from eval_gate.compare_files import compare_files
    from eval_gate.report.write import write_reports

    settings = {
        "margin": margin,
        "margin_kind": margin_kind.value,
        "alpha": alpha,
        "rule": rule.value,
        "looks": looks,
        "spending": spending.value,
        "max_queries": max_queries,
        "sample_seed": seed,
        "error_cap": error_cap,
        "baseline_floor": baseline_floor,
        "degenerate_cap": degenerate_cap,
        "truncation_cap": truncation_cap,
        # Fixed-set mode needs repeats, which are known only once the files are read.
        "mode": mode.value,
        "repeats": 2 if mode is Mode.FIXED_SET else 1,
    }
    verdict = compare_files(training, serving, GatePolicy.build(**settings), queries)
    if out is not None:
        write_reports(verdict, out)
    if as_json:
        typer.echo(verdict.model_dump_json(indent=2))
    else:
        from rich.console import Console

        from eval_gate.report.terminal import print_verdict

        print_verdict(verdict, Console())
    raise typer.Exit(verdict.exit_code)
