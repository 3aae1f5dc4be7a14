"""`eval-gate run`: both arms, one verdict."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eval_gate.arms.records import Role
from eval_gate.checkers import Permissions, PoolLimits
from eval_gate.commands.options import (
    Alpha,
    BaselineFloor,
    ErrorCap,
    Margin,
    MarginKind,
    MarginOf,
    Mode,
    ModeOption,
    Rule,
    RuleOption,
    Spending,
)
from eval_gate.policy import GatePolicy
from eval_gate.report.progress import live_progress
from eval_gate.report.terminal import print_verdict
from eval_gate.run import ArmConfig, GateConfig, GateResult, Plan, prepare, run_gate
from trace_serve.errors import EXIT_INTERRUPTED, ConfigError


class Api(StrEnum):
    """Routes of `--api`."""

    CHAT = "chat"
    COMPLETIONS = "completions"


def run(
    training: Annotated[
        str, typer.Option(help="As trained: a URL, a model or policy directory (BF16), hf:DIR[@RECIPE], results:FILE.")
    ],
    serving: Annotated[str, typer.Option(help="As served: a URL, a policy directory (its recipe), results:FILE.")],
    out: Annotated[Path, typer.Option(help="Directory for results, verdict and reports.")],
    queries: Annotated[str, typer.Option(help="A query file, or the name of a suite.")] = "support",
    suite: Annotated[
        list[str] | None,
        typer.Option(help="A suite: support, support-dev, aime24, aime25, aime26, reasoning-gym:TASK:COUNT:SEED."),
    ] = None,
    margin: Margin = 0.05,
    margin_kind: MarginOf = MarginKind.ABSOLUTE,
    alpha: Alpha = 0.05,
    rule: RuleOption = Rule.CI,
    mode: ModeOption = Mode.POPULATION,
    repeats: Annotated[int, typer.Option(help="Samples of each query and arm.")] = 1,
    looks: Annotated[int, typer.Option(help="Judge after each of so many equal parts, and stop on a clear case.")] = 1,
    spending: Annotated[
        Spending, typer.Option(help="obf: strict early, lenient last; pocock: the same at every look.")
    ] = Spending.OBF,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    api: Annotated[Api, typer.Option(help="Route of both arms; completions has no chat template.")] = Api.CHAT,
    max_queries: Annotated[int | None, typer.Option(help="Size of a seeded random subsample.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of both arms after which it stops.")] = None,
    max_wall: Annotated[float | None, typer.Option(min=0, help="Seconds after which it asks nothing more.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the subsample and of the order.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests in flight at one arm.")] = 8,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one attempt at one answer.")] = 120.0,
    startup_timeout: Annotated[float, typer.Option(min=1, help="Seconds for an engine to start.")] = 600.0,
    error_cap: ErrorCap = 0.02,
    baseline_floor: BaselineFloor = 0.20,
    training_model: Annotated[str | None, typer.Option(help="Served name at the training URL.")] = None,
    serving_model: Annotated[str | None, typer.Option(help="Served name at the serving URL.")] = None,
    training_checkpoint: Annotated[Path | None, typer.Option(help="Directory that the training URL serves.")] = None,
    serving_checkpoint: Annotated[Path | None, typer.Option(help="Directory that the serving URL serves.")] = None,
    training_key_env: Annotated[str | None, typer.Option(help="Variable with the training URL's API key.")] = None,
    serving_key_env: Annotated[str | None, typer.Option(help="Variable with the serving URL's API key.")] = None,
    judge_url: Annotated[str | None, typer.Option(help="Endpoint of the judge, where checkers have one.")] = None,
    judge_model: Annotated[str | None, typer.Option(help="Served name of the judge; part of the policy.")] = None,
    judge_key_env: Annotated[str | None, typer.Option(help="Variable with the judge's API key.")] = None,
    redact: Annotated[str | None, typer.Option(help="presidio or module:function, applied to all messages.")] = None,
    allow_code: Annotated[bool, typer.Option(help="Run programs that a model wrote (checker code).")] = False,
    allow_code_network: Annotated[bool, typer.Option(help="Even where the network cannot be kept out.")] = False,
    allow_checker: Annotated[list[str] | None, typer.Option(help="A checker module:function to allow.")] = None,
    checker_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one check.")] = 30.0,
    checker_workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that checkers run in.")] = 2,
    key: Annotated[Path | None, typer.Option(help="Private key that signs the verdict.")] = None,
    allow_unproven: Annotated[bool, typer.Option(help="Judge arms that do not prove what they run.")] = False,
    reuse: Annotated[list[Path] | None, typer.Option(help="results.jsonl of another run to take answers from.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted run in --out.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Check all input and say what would be asked; ask nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Replay queries through both versions and decide. Exit code: 0 PASS, 1 BLOCK, 2 INCONCLUSIVE, 3, 4, 130."""
    if (judge_url is None) != (judge_model is None):
        raise ConfigError("--judge-url and --judge-model: got one of them, expected both", field="judge_url")
    policy = GatePolicy.build(
        margin=margin,
        margin_kind=margin_kind.value,
        alpha=alpha,
        rule=rule.value,
        mode=mode.value,
        repeats=repeats,
        looks=looks,
        spending=spending.value,
        temperature=temperature,
        api=api.value,
        judge=judge_model,
        max_queries=max_queries,
        sample_seed=seed,
        error_cap=error_cap,
        baseline_floor=baseline_floor,
        allow_unproven=allow_unproven,
    )
    config = GateConfig(
        training=ArmConfig(
            training, api_key(training_key_env, f"{Role.TRAINING}-key-env"), training_model, training_checkpoint
        ),
        serving=ArmConfig(
            serving, api_key(serving_key_env, f"{Role.SERVING}-key-env"), serving_model, serving_checkpoint
        ),
        queries=tuple(suite) if suite else queries,
        out=out,
        policy=policy,
        key=key,
        concurrency=concurrency,
        timeout_s=timeout,
        startup_timeout_s=startup_timeout,
        resume=resume,
        reuse=tuple(reuse or ()),
        permissions=Permissions(allow_code, allow_code_network, frozenset(allow_checker or ())),
        graders=PoolLimits(
            workers=checker_workers,
            timeout_s=checker_timeout,
            code_without_isolation=allow_code_network,
            import_from=Path.cwd() if allow_checker else None,
        ),
        judge=None if judge_url is None else ArmConfig(judge_url, api_key(judge_key_env, "judge-key-env")),
        redact=redact,
        max_tokens=max_tokens,
        max_wall_s=max_wall,
    )
    if dry_run:
        _show_plan(prepare(config), as_json)
        return
    try:
        with live_progress(Console(stderr=True)) as on_progress:
            result = run_gate(config, on_progress)
    except KeyboardInterrupt:
        typer.echo("interrupted: no verdict; the results so far are kept, continue with --resume", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _show(result, as_json)
    raise typer.Exit(result.verdict.exit_code)


def api_key(variable: str | None, flag: str) -> str | None:
    """The key in an environment variable; keys are never given on the command line or in a file.

    Raises:
        ConfigError: the variable is named but not set.
    """
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(f"--{flag} {variable}: not set in the environment, expected the API key", field="key_env")
    return value


def _show_plan(plan: Plan, as_json: bool) -> None:
    policy = plan.config.policy
    facts = {
        "training": plan.training.evidence.source,
        "serving": plan.serving.evidence.source,
        "queries": len(plan.queries.queries),
        "query_source": plan.queries.source,
        "query_digest": plan.queries.digest,
        "suites": sorted({query.suite for query in plan.queries.queries}),
        "repeats": policy.repeats,
        "requests": plan.samples,
        "most_answer_tokens": plan.most_tokens,
        "gate_policy": policy.digest,
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        typer.echo(f"{name:<18} {', '.join(value) if isinstance(value, list) else value}")
    typer.echo("dry run: nothing was started, asked or written")


def _show(result: GateResult, as_json: bool) -> None:
    if as_json:
        typer.echo(result.verdict.model_dump_json(indent=2))
        return
    print_verdict(result.verdict, Console())
    paths = result.paths
    written = [paths.verdict, paths.html, paths.results, *([paths.envelope] if paths.envelope else [])]
    typer.echo("written: " + ", ".join(str(path) for path in written))
