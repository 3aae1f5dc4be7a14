"""`eval-gate attribute`: where a gap comes from, and what would mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eval_gate.attribute.answers import Recording
from eval_gate.attribute.run import attribute as run_attribution
from eval_gate.attribute.subject import DEFAULT_KV_TOKENS, AttributeConfig
from eval_gate.attribute.terminal import live_steps, print_attribution
from eval_gate.checkers import Permissions, PoolLimits
from eval_gate.commands.options import (
    Alpha,
    AsJson,
    BaselineFloor,
    ErrorCap,
    Margin,
    MarginKind,
    MarginOf,
    Rule,
    RuleOption,
)
from eval_gate.commands.run import Api
from eval_gate.policy import GatePolicy
from trace_serve.errors import EXIT_INTERRUPTED
from trace_serve.recipe import load_recipe


def attribute(
    model: Annotated[Path, typer.Option(help="A model or policy directory with BF16 weights.")],
    out: Annotated[Path, typer.Option(help="Directory for answers and reports; what is there is not asked again.")],
    recipe: Annotated[
        str | None, typer.Option(help="Recipe whose gap is explained: a preset or a file; default: the policy's own.")
    ] = None,
    queries: Annotated[str, typer.Option(help="A query file, or the name of a suite.")] = "support-dev",
    suite: Annotated[list[str] | None, typer.Option(help="A suite, as of `run`; may be given several times.")] = None,
    budget: Annotated[int, typer.Option(help="Engines to start at most, the BF16 one included.")] = 20,
    max_queries: Annotated[int | None, typer.Option(help="Size of a seeded random subsample.")] = None,
    max_wall: Annotated[float | None, typer.Option(min=0, help="Seconds after which it asks nothing more.")] = None,
    margin: Margin = 0.05,
    margin_kind: MarginOf = MarginKind.ABSOLUTE,
    alpha: Alpha = 0.05,
    rule: RuleOption = Rule.CI,
    repeats: Annotated[int, typer.Option(help="Samples of each query and recipe.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    api: Annotated[Api, typer.Option(help="Route; completions has no chat template.")] = Api.CHAT,
    seed: Annotated[int, typer.Option(help="Seed of the subsample and of the order.")] = 0,
    kv_tokens: Annotated[
        int, typer.Option(help="Tokens of KV cache that its bytes are weighed at against those of weights.")
    ] = DEFAULT_KV_TOKENS,
    logprobs: Annotated[bool, typer.Option(help="Record log-probabilities and token ids.")] = True,
    routed_experts: Annotated[bool, typer.Option(help="Record routed experts of every token; large.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests in flight.")] = 8,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one attempt at one answer.")] = 120.0,
    startup_timeout: Annotated[float, typer.Option(min=1, help="Seconds for an engine to start.")] = 600.0,
    error_cap: ErrorCap = 0.02,
    baseline_floor: BaselineFloor = 0.20,
    allow_code: Annotated[bool, typer.Option(help="Run programs that a model wrote (checker code).")] = False,
    allow_checker: Annotated[list[str] | None, typer.Option(help="A checker module:function to allow.")] = None,
    as_json: AsJson = False,
) -> None:
    """Try recipes on the same queries until the guilty part and layers, and a remedy that passes, are found.

    Exit code: 0 done, whatever was found; 3 configuration; 4 infrastructure; 130 interrupted, run again to go on.
    """
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
        kv_tokens=kv_tokens,
        recording=Recording(tokens=logprobs, routes=routed_experts),
        concurrency=concurrency,
        timeout_s=timeout,
        startup_timeout_s=startup_timeout,
        permissions=Permissions(allow_code, False, frozenset(allow_checker or ())),
        graders=PoolLimits(import_from=Path.cwd() if allow_checker else None),
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
