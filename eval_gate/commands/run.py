"""`eval-gate run`: both arms, one verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eval_gate.commands.options import (
    DEFAULT,
    AllowChecker,
    AllowCode,
    Alpha,
    Api,
    ApiOption,
    BaselineFloor,
    Concurrency,
    DegenerateCap,
    ErrorCap,
    Looks,
    Margin,
    MarginKind,
    MarginOf,
    MaxQueries,
    MaxWall,
    Mode,
    ModeOption,
    Queries,
    Repeats,
    Resume,
    Rule,
    RuleOption,
    Seed,
    Spending,
    SpendingOption,
    StartupTimeout,
    Suites,
    Temperature,
    Timeout,
    TruncationCap,
    ValidDays,
    api_key,
    import_directory,
)
from eval_gate.policy import GatePolicy
from trace_serve.errors import EXIT_INTERRUPTED, ConfigError

if TYPE_CHECKING:
    from eval_gate.run import GateResult, Plan


def run(
    training: Annotated[
        str, typer.Option(help="As trained: a URL, a model or policy directory (BF16), hf:DIR[@RECIPE], results:FILE.")
    ],
    serving: Annotated[str, typer.Option(help="As served: a URL, a policy directory (its recipe), results:FILE.")],
    out: Annotated[Path, typer.Option(help="Directory for results, verdict and reports.")],
    queries: Queries = "support",
    suite: Suites = None,
    margin: Margin = DEFAULT.margin,
    margin_kind: MarginOf = MarginKind.ABSOLUTE,
    alpha: Alpha = DEFAULT.alpha,
    rule: RuleOption = Rule.CI,
    mode: ModeOption = Mode.POPULATION,
    repeats: Repeats = DEFAULT.repeats,
    looks: Looks = DEFAULT.looks,
    spending: SpendingOption = Spending.OBF,
    temperature: Temperature = DEFAULT.temperature,
    api: ApiOption = Api.CHAT,
    max_queries: MaxQueries = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of both arms after which it stops.")] = None,
    max_wall: MaxWall = None,
    seed: Seed = DEFAULT.sample_seed,
    concurrency: Concurrency = 8,
    timeout: Timeout = 120.0,
    startup_timeout: StartupTimeout = 600.0,
    error_cap: ErrorCap = DEFAULT.error_cap,
    baseline_floor: BaselineFloor = DEFAULT.baseline_floor,
    degenerate_cap: DegenerateCap = DEFAULT.degenerate_cap,
    truncation_cap: TruncationCap = DEFAULT.truncation_cap,
    valid_days: ValidDays = DEFAULT.valid_days,
    training_model: Annotated[str | None, typer.Option(help="Served name at the training URL.")] = None,
    serving_model: Annotated[str | None, typer.Option(help="Served name at the serving URL.")] = None,
    training_checkpoint: Annotated[Path | None, typer.Option(help="Directory that the training URL serves.")] = None,
    serving_checkpoint: Annotated[Path | None, typer.Option(help="Directory that the serving URL serves.")] = None,
    training_key_env: Annotated[str | None, typer.Option(help="Variable with the training URL's API key.")] = None,
    serving_key_env: Annotated[str | None, typer.Option(help="Variable with the serving URL's API key.")] = None,
    judge_url: Annotated[str | None, typer.Option(help="Endpoint of the judge, where checkers have one.")] = None,
    judge_model: Annotated[str | None, typer.Option(help="Served name of the judge; part of the policy.")] = None,
    judge_key_env: Annotated[str | None, typer.Option(help="Variable with the judge's API key.")] = None,
    redact: Annotated[
        str | None, typer.Option(help="presidio, presidio:MODEL or module:function, applied to all messages.")
    ] = None,
    allow_code: AllowCode = False,
    allow_code_network: Annotated[bool, typer.Option(help="Even where the network cannot be kept out.")] = False,
    allow_checker: AllowChecker = None,
    checker_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one check.")] = 30.0,
    checker_workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that checkers run in.")] = 2,
    key: Annotated[Path | None, typer.Option(help="Private key that signs the verdict.")] = None,
    allow_unproven: Annotated[bool, typer.Option(help="Judge arms that do not prove what they run.")] = False,
    reuse: Annotated[list[Path] | None, typer.Option(help="results.jsonl of another run to take answers from.")] = None,
    record_tokens: Annotated[
        bool, typer.Option(help="Ask for token ids and log-probabilities too, for token drift in the reports.")
    ] = False,
    otel: Annotated[Path | None, typer.Option(help="File for OpenTelemetry events of the grades (extra otel).")] = None,
    resume: Resume = False,
    dry_run: Annotated[bool, typer.Option(help="Check all input and say what would be asked; ask nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Replay queries through both versions and decide. Exit code: 0 PASS, 1 BLOCK, 2 INCONCLUSIVE, 3, 4, 130."""
    from rich.console import Console

    from eval_gate.checkers import Permissions, PoolLimits
    from eval_gate.report.progress import live_progress
    from eval_gate.run import ArmConfig, GateConfig, prepare, run_gate

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
        record_tokens=record_tokens,
        judge=judge_model,
        max_queries=max_queries,
        sample_seed=seed,
        error_cap=error_cap,
        baseline_floor=baseline_floor,
        degenerate_cap=degenerate_cap,
        truncation_cap=truncation_cap,
        valid_days=valid_days,
        allow_unproven=allow_unproven,
    )
    config = GateConfig(
        training=ArmConfig(
            training, api_key(training_key_env, "training-key-env"), training_model, training_checkpoint
        ),
        serving=ArmConfig(serving, api_key(serving_key_env, "serving-key-env"), serving_model, serving_checkpoint),
        queries=tuple(suite) if suite else queries,
        out=out,
        policy=policy,
        key=key,
        concurrency=concurrency,
        timeout_s=timeout,
        startup_timeout_s=startup_timeout,
        resume=resume,
        otel=otel,
        reuse=tuple(reuse or ()),
        permissions=Permissions(allow_code, allow_code_network, frozenset(allow_checker or ())),
        graders=PoolLimits(
            workers=checker_workers,
            timeout_s=checker_timeout,
            code_without_isolation=allow_code_network,
            import_from=import_directory(allow_checker),
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
    from rich.console import Console

    from eval_gate.report.terminal import print_verdict

    print_verdict(result.verdict, Console())
    paths = result.paths
    written = [paths.verdict, paths.html, paths.results, *([paths.envelope] if paths.envelope else [])]
    typer.echo("written: " + ", ".join(str(path) for path in written))
