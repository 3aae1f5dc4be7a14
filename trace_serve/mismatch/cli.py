"""`trace-serve mismatch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trace_serve.errors import ConfigError
from trace_serve.policy.manifest import load_policy


def mismatch_command(
    policy: Annotated[Path, typer.Argument(help="Policy directory, BF16 on disk.")],
    queries: Annotated[str, typer.Option(help="Query file or shipped suite to take prompts of.")] = "support-dev",
    prompts: Annotated[int, typer.Option(min=1, help="Rollouts.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Sampled tokens of each.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="Of sampling.")] = 1.0,
    mid: Annotated[bool, typer.Option(help="Keep hints of the experts' second product too.")] = False,
    gradients: Annotated[int, typer.Option(min=0, help="Rollouts whose gradients are compared.")] = 0,
    probe: Annotated[bool, typer.Option(help="Measure which layers can do without hints, and recommend.")] = False,
    html: Annotated[Path | None, typer.Option(help="Page to write.")] = None,
    engine_log: Annotated[Path | None, typer.Option(help="File for the engine's output.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Roll a policy out on the FP4 engine and measure how far training-time versions are from it.

    Example: trace-serve mismatch runs/quickstart/policy --prompts 4 --html mismatch.html
    """
    from trace_serve.mismatch import report
    from trace_serve.mismatch.prompts import prompt_ids
    from trace_serve.mismatch.run import Options, measure

    loaded = load_policy(policy)
    sites = ("experts_in", "k", "v", *(("experts_mid",) if mid else ()))
    options = Options(prompts, tokens, temperature, sites, min(gradients, prompts), probe)
    console = Console(stderr=True)
    ids = prompt_ids(policy, queries, prompts)
    if len(ids) < prompts:
        raise ConfigError(f"--prompts: got {prompts}, but {queries} has {len(ids)} queries", field="prompts")
    with console.status("") as status:
        measured = measure(loaded, ids, options, log_path=engine_log, progress=status.update)
    if html is not None:
        html.write_text(report.page(measured), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(report.to_dict(measured), indent=2))
        return
    out = Console()
    out.print(report.render(measured))
    if measured.advice is not None:
        out.print(f"probe: {measured.advice}", soft_wrap=True)
