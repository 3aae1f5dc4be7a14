"""`trace-serve mismatch`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trace_serve.errors import ConfigError
from trace_serve.hints.sinks import atomic
from trace_serve.recipe import load_recipe


def mismatch_command(
    policy: Annotated[Path, typer.Argument(help="Policy, or Hugging Face model directory, with BF16 weights.")],
    recipe: Annotated[
        str | None, typer.Option(help="Preset name or recipe JSON file; not given, the policy's own or `default`.")
    ] = None,
    queries: Annotated[str, typer.Option(help="Query file or shipped suite to take prompts of.")] = "support-dev",
    prompts: Annotated[int, typer.Option(min=1, help="Rollouts.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Sampled tokens of each.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="Of sampling.")] = 1.0,
    top: Annotated[int, typer.Option(min=1, help="Most probable tokens that distributions are compared on.")] = 1000,
    mid: Annotated[bool, typer.Option(help="Keep hints of the experts' second product too.")] = False,
    quads: Annotated[bool, typer.Option(help="Sample rollouts of QUADS in transformers too.")] = True,
    gradients: Annotated[int, typer.Option(min=0, help="Rollouts whose gradients are compared.")] = 0,
    probe: Annotated[bool, typer.Option(help="Measure which hints can be left out, and recommend.")] = False,
    threads: Annotated[
        int, typer.Option(min=1, help="Torch threads of the training side; more pay on idle cores.")
    ] = 1,
    html: Annotated[Path | None, typer.Option(help="Page to write.")] = None,
    engine_log: Annotated[Path | None, typer.Option(help="File for the engine's output.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Roll a policy out on the FP4 engine and measure how far training-time versions are from it.

    Example: trace-serve mismatch runs/quickstart/policy --prompts 4 --html mismatch.html
    """
    from trace_serve.mismatch import page, report
    from trace_serve.mismatch.prompts import prompt_ids
    from trace_serve.mismatch.run import Options, measure
    from trace_serve.mismatch.subject import open_subject

    subject = open_subject(policy, None if recipe is None else load_recipe(recipe))
    options = Options(prompts, tokens, temperature, top, mid, quads, min(gradients, prompts), probe, threads)
    ids = prompt_ids(policy, queries, prompts)
    if len(ids) < prompts:
        raise ConfigError(f"--prompts: got {prompts}, but {queries} has {len(ids)} queries", field="prompts")
    if html is not None and not html.absolute().parent.is_dir():
        raise ConfigError(f"--html {html}: its directory does not exist; make it first", field="html")
    with _progress() as progress:
        measured = measure(subject, ids, options, log_path=engine_log, progress=progress)
    if html is not None:
        atomic.write(html.absolute().parent, html.name, [page.page(measured).encode()])
    if as_json:
        typer.echo(json.dumps(report.to_dict(measured), indent=2))
        return
    out = Console()
    for table in report.render(measured):
        out.print(table)
    if measured.advice is not None:
        out.print(f"probe: {measured.advice}", soft_wrap=True)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A status line on a terminal; elsewhere a line with the seconds so far for each step."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
    else:
        began = time.monotonic()
        yield lambda text: typer.echo(f"{time.monotonic() - began:6.0f} s  {text}", err=True)
