"""`eval-gate aa`: the noise floor of one arm."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eval_gate.commands.options import (
    DEFAULT,
    Alpha,
    Api,
    ApiOption,
    AsJson,
    Concurrency,
    MaxQueries,
    Queries,
    Repeats,
    Resume,
    Seed,
    StartupTimeout,
    Suites,
    Temperature,
    Timeout,
    api_key,
)
from eval_gate.policy import GatePolicy
from trace_serve.errors import EXIT_INFRASTRUCTURE, EXIT_INTERRUPTED

if TYPE_CHECKING:
    from eval_gate.noise import NoiseFloor


class Served(StrEnum):
    """How `aa` starts a policy directory."""

    SERVING = "serving"
    TRAINING = "training"


def aa(
    arm: Annotated[str, typer.Option(help="A URL, or a directory that an engine is started for.")],
    out: Annotated[Path, typer.Option(help="Directory for results and noise.json.")],
    queries: Queries = "support",
    suite: Suites = None,
    role: Annotated[
        Served, typer.Option("--as", help="A policy directory under its recipe (serving) or in BF16 (training).")
    ] = Served.SERVING,
    repeats: Repeats = DEFAULT.repeats,
    temperature: Temperature = DEFAULT.temperature,
    api: ApiOption = Api.CHAT,
    alpha: Alpha = DEFAULT.alpha,
    max_queries: MaxQueries = None,
    seed: Seed = DEFAULT.sample_seed,
    concurrency: Concurrency = 8,
    timeout: Timeout = 120.0,
    startup_timeout: StartupTimeout = 600.0,
    model: Annotated[str | None, typer.Option(help="Served name at the URL.")] = None,
    key_env: Annotated[str | None, typer.Option(help="Variable with the URL's API key.")] = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Ask one arm everything twice: what differs is noise, whatever the seed. Exit code 4 with too many errors."""
    from rich.console import Console

    from eval_gate.arms.records import Role
    from eval_gate.noise import measure_noise
    from eval_gate.report.progress import live_progress
    from eval_gate.run import ArmConfig, GateConfig

    key = api_key(key_env, "key-env")
    policy = GatePolicy.build(
        repeats=repeats,
        temperature=temperature,
        api=api.value,
        alpha=alpha,
        max_queries=max_queries,
        sample_seed=seed,
    )
    config = GateConfig(
        training=ArmConfig(arm, key, model),
        serving=ArmConfig(arm, key, model),
        queries=tuple(suite) if suite else queries,
        out=out,
        policy=policy,
        concurrency=concurrency,
        timeout_s=timeout,
        startup_timeout_s=startup_timeout,
        resume=resume,
    )
    try:
        with live_progress(Console(stderr=True)) as on_progress:
            found = measure_noise(config, Role(role.value), on_progress)
    except KeyboardInterrupt:
        typer.echo("interrupted: the results so far are kept, continue with --resume", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    typer.echo(found.model_dump_json(indent=2) if as_json else _text(found))
    if found.unscored > policy.error_cap * 2 * found.queries * found.repeats:
        raise typer.Exit(EXIT_INFRASTRUCTURE)


def _text(found: NoiseFloor) -> str:
    from eval_gate.report import format as fmt

    lines = [
        f"{found.source}: {found.queries} queries twice, {found.repeats} samples each, temperature "
        f"{found.temperature:g}, {found.concurrency} in flight",
        f"answers differ in {found.texts_differ} queries, grades in {found.grades_differ} "
        f"({fmt.percent(found.discordance)}, 90% interval {fmt.percent(found.discordance_low)} to "
        f"{fmt.percent(found.discordance_high)})",
        f"gap of the arm to itself {fmt.points(found.gap)} points, interval {fmt.interval(found.lower, found.upper)}; "
        f"with these queries a margin must exceed {fmt.points(found.smallest_margin)} points",
    ]
    if found.unscored:
        lines.append(f"{found.unscored} samples without a grade")
    return "\n".join(lines)
