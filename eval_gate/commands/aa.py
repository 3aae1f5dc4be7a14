"""`eval-gate aa`: the noise floor of one arm."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eval_gate.arms.records import Role
from eval_gate.commands.options import AsJson
from eval_gate.noise import NoiseFloor, measure_noise
from eval_gate.policy import GatePolicy
from eval_gate.report import format as fmt
from eval_gate.report.progress import live_progress
from eval_gate.run import ArmConfig, GateConfig
from trace_serve.errors import EXIT_INFRASTRUCTURE, EXIT_INTERRUPTED, ConfigError


class Served(StrEnum):
    """How `aa` starts a policy directory."""

    SERVING = "serving"
    TRAINING = "training"


def aa(
    arm: Annotated[str, typer.Option(help="A URL, or a directory that an engine is started for.")],
    out: Annotated[Path, typer.Option(help="Directory for results and noise.json.")],
    queries: Annotated[str, typer.Option(help="A shipped suite or a JSON-lines file.")] = "support",
    role: Annotated[
        Served, typer.Option("--as", help="A policy directory under its recipe (serving) or in BF16 (training).")
    ] = Served.SERVING,
    repeats: Annotated[int, typer.Option(help="Samples of each query in each pass.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    alpha: Annotated[float, typer.Option(help="One-sided error rate of the bounds.")] = 0.05,
    max_queries: Annotated[int | None, typer.Option(help="Size of a seeded random subsample.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="As of the run to be judged.")] = 8,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one attempt at one answer.")] = 120.0,
    startup_timeout: Annotated[float, typer.Option(min=1, help="Seconds for an engine to start.")] = 600.0,
    model: Annotated[str | None, typer.Option(help="Served name at the URL.")] = None,
    key_env: Annotated[str | None, typer.Option(help="Variable with the URL's API key.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted run in --out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask one arm everything twice: what differs is noise, whatever the seed. Exit code 4 with too many errors."""
    api_key = os.environ.get(key_env) if key_env else None
    if key_env and not api_key:
        raise ConfigError(f"--key-env {key_env}: not set in the environment, expected the API key", field="key_env")
    policy = GatePolicy.build(repeats=repeats, temperature=temperature, alpha=alpha, max_queries=max_queries)
    config = GateConfig(
        training=ArmConfig(arm, api_key, model),
        serving=ArmConfig(arm, api_key, model),
        queries=queries,
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
