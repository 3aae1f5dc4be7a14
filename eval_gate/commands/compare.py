"""`eval-gate compare`: judges results that were recorded before."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eval_gate.arms.records import Role
from eval_gate.commands.options import (
    Alpha,
    AsJson,
    BaselineFloor,
    ErrorCap,
    Margin,
    MarginKind,
    MarginOf,
    Mode,
    ModeOption,
    Rule,
    RuleOption,
)
from eval_gate.decide import decide
from eval_gate.pairing import ArmResults, ItemSet
from eval_gate.policy import GatePolicy
from eval_gate.recorded import check_covered, common_queries, read_arm, without_collection
from eval_gate.report.terminal import print_verdict
from eval_gate.report.write import write_reports
from eval_gate.suites.named import open_queries
from eval_gate.verdict import Verdict
from trace_serve.errors import ConfigError


def compare_files(training: Path, serving: Path, policy: GatePolicy, queries: str | None = None) -> Verdict:
    """The verdict on two files of recorded results; `policy.repeats` is taken from the files.

    Recorded results show what was answered, not what answered, so unproven arms are allowed and labelled; such a
    verdict is not signed.

    Raises:
        ConfigError: a file cannot be used, or the arms have different numbers of samples a query.
    """
    with without_collection():
        return _compared(training, serving, policy, queries)


def _compared(training: Path, serving: Path, policy: GatePolicy, queries: str | None) -> Verdict:
    one, two = read_arm(training, Role.TRAINING), read_arm(serving, Role.SERVING)
    if one.repeats != two.repeats:
        raise ConfigError(
            f"{training} has {one.repeats} samples a query, {serving} has {two.repeats}; expected as many in both",
            field="repeats",
        )
    items: ItemSet
    if queries is None:
        items = common_queries(one, two)
    else:
        items = open_queries(queries)
        check_covered(items, (one, two))
    judged = policy.model_dump() | {"repeats": one.repeats, "allow_unproven": True}
    digest = "sha256:" + hashlib.sha256(f"{one.digest} {two.digest}".encode()).hexdigest()
    return decide(
        GatePolicy.build(**judged),
        items,
        ArmResults(one.evidence, one.samples),
        ArmResults(two.evidence, two.samples),
        results_digest=digest,
    )


def compare(
    training: Annotated[Path, typer.Argument(help="Results of the training-time version, JSON lines.")],
    serving: Annotated[Path, typer.Argument(help="Results of the serving-time version; one run's file may be both.")],
    queries: Annotated[
        str | None, typer.Option(help="Query file or shipped suite with suites, kinds and clusters.")
    ] = None,
    margin: Margin = 0.05,
    margin_kind: MarginOf = MarginKind.ABSOLUTE,
    alpha: Alpha = 0.05,
    rule: RuleOption = Rule.CI,
    mode: ModeOption = Mode.POPULATION,
    error_cap: ErrorCap = 0.02,
    baseline_floor: BaselineFloor = 0.20,
    out: Annotated[Path | None, typer.Option(help="Directory for verdict.json and the reports.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge recorded results of any suite. Exit codes as of `run`; nothing is signed.

    A line is {"id": "q1", "passed": true}, with sample, suite, kind, cluster, text and error where known, or a line of
    a run's results.jsonl.
    """
    settings = {
        "margin": margin,
        "margin_kind": margin_kind.value,
        "alpha": alpha,
        "rule": rule.value,
        "error_cap": error_cap,
        "baseline_floor": baseline_floor,
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
        print_verdict(verdict, Console())
    raise typer.Exit(verdict.exit_code)
