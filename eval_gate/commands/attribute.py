"""`eval-gate attribute`: where a gap comes from, and what would mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eval_gate.attribute.cost import DEFAULT_KV_TOKENS
from eval_gate.commands.options import (
    DEFAULT,
    AllowChecker,
    AllowCode,
    Alpha,
    Api,
    ApiOption,
    AsJson,
    BaselineFloor,
    Concurrency,
    ErrorCap,
    Margin,
    MarginKind,
    MarginOf,
    MaxQueries,
    MaxWall,
    Queries,
    Repeats,
    Rule,
    RuleOption,
    Seed,
    StartupTimeout,
    Suites,
    Temperature,
    Timeout,
    import_directory,
)
from eval_gate.policy import GatePolicy
from trace_serve.errors import EXIT_INTERRUPTED
from trace_serve.recipe import load_recipe


def attribute(
    model: Annotated[Path, typer.Option(help="A model or policy directory with BF16 weights.")],
    out: Annotated[Path, typer.Option(help="Directory for answers and reports; what is there is not asked again.")],
    recipe: Annotated[
        str | None, typer.Option(help="Recipe whose gap is explained: a preset or a file; default: the policy's own.")
    ] = None,
    queries: Queries = "support-dev",
    suite: Suites = None,
    budget: Annotated[int, typer.Option(help="Engines to start at most, the BF16 one included.")] = 20,
    max_queries: MaxQueries = None,
    max_wall: MaxWall = None,
    margin: Margin = DEFAULT.margin,
    margin_kind: MarginOf = MarginKind.ABSOLUTE,
    alpha: Alpha = DEFAULT.alpha,
    rule: RuleOption = Rule.CI,
    repeats: Repeats = DEFAULT.repeats,
    temperature: Temperature = DEFAULT.temperature,
    api: ApiOption = Api.CHAT,
    seed: Seed = DEFAULT.sample_seed,
    kv_tokens: Annotated[
        int, typer.Option(help="Tokens of KV cache that its bytes are weighed at against those of weights.")
    ] = DEFAULT_KV_TOKENS,
    rounding: Annotated[
        int,
        typer.Option(
            min=0,
            help="Queries asked again for rounding hints; the training-time version scores their answers.",
        ),
    ] = 0,
    logprobs: Annotated[bool, typer.Option(help="Record log-probabilities and token ids.")] = True,
    routed_experts: Annotated[bool, typer.Option(help="Record routed experts of every token; large.")] = False,
    concurrency: Concurrency = 8,
    timeout: Timeout = 120.0,
    startup_timeout: StartupTimeout = 600.0,
    error_cap: ErrorCap = DEFAULT.error_cap,
    baseline_floor: BaselineFloor = DEFAULT.baseline_floor,
    allow_code: AllowCode = False,
    allow_checker: AllowChecker = None,
    as_json: AsJson = False,
) -> None:
    """Try recipes on the same queries until the guilty part and layers, and a remedy that passes, are found.

    Exit code: 0 done, whatever was found; 3 configuration; 4 infrastructure; 130 interrupted, run again to go on.
    """
    from rich.console import Console

    from eval_gate.attribute.answers import Recording
    from eval_gate.attribute.run import attribute as run_attribution
    from eval_gate.attribute.subject import AttributeConfig
    from eval_gate.attribute.terminal import live_steps, print_attribution
    from eval_gate.checkers import Permissions, PoolLimits

    config = AttributeConfig(
        model=model,
        queries=tuple(suite) if suite else (queries,),
        out=out,
        recipe=None if recipe is None else load_recipe(recipe),
        policy=GatePolicy.build(
            margin=margin,
            margin_kind=margin_kind.value,
            alpha=alpha,
            rule=rule.value,
            repeats=repeats,
            temperature=temperature,
            api=api.value,
            max_queries=max_queries,
            sample_seed=seed,
            error_cap=error_cap,
            baseline_floor=baseline_floor,
        ),
        budget=budget,
        max_wall_s=max_wall,
        rounding=rounding,
        kv_tokens=kv_tokens,
        recording=Recording(tokens=logprobs, routes=routed_experts),
        concurrency=concurrency,
        timeout_s=timeout,
        startup_timeout_s=startup_timeout,
        permissions=Permissions(allow_code, False, frozenset(allow_checker or ())),
        graders=PoolLimits(import_from=import_directory(allow_checker)),
    )
    try:
        with live_steps(Console(stderr=True)) as on_progress:
            found = run_attribution(config, on_progress)
    except KeyboardInterrupt:
        typer.echo("interrupted: the answers so far are kept, run the same command to go on", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    print_attribution(found, Console())
    typer.echo(f"written: {out / 'attribution.json'}, {out / 'attribution.html'}")
