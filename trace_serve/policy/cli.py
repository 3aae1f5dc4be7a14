"""`trace-serve policy`: build and inspect policy directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trace_serve.policy import storable
from trace_serve.policy.build import build_policy
from trace_serve.policy.layouts import BF16, LAYOUTS
from trace_serve.policy.manifest import Policy, load_policy
from trace_serve.recipe import load_recipe

app = typer.Typer(no_args_is_help=True, help="Build and inspect policy directories.")


@app.command()
def build(
    source: Annotated[Path, typer.Argument(help="Hugging Face model directory.")],
    out: Annotated[Path, typer.Option(help="Policy directory to create.")],
    name: Annotated[str | None, typer.Option(help="Name under which it is served; default: that of --out.")] = None,
    version: Annotated[str, typer.Option(help="Version of this policy.")] = "1",
    recipe: Annotated[str, typer.Option(help="Preset name or recipe JSON file.")] = "default",
    source_run: Annotated[str | None, typer.Option(help="Training run that produced the weights.")] = None,
    weights: Annotated[
        str, typer.Option("--format", help="Experts' weights on disk: bf16, modelopt or compressed-tensors.")
    ] = BF16,
) -> None:
    """Make a policy directory from a model directory and a recipe."""
    console = Console()
    policy = build_policy(
        source,
        out,
        name=name or out.resolve().name,
        version=version,
        recipe=load_recipe(recipe),
        source_run=source_run,
        weights=weights,
        progress=lambda line: console.print(line, soft_wrap=True),
    )
    for note in _notes(policy):
        console.print(f"note: {note}", soft_wrap=True)
    console.print(f"{policy.path}: {policy.name} {policy.version} {policy.digest}", soft_wrap=True)


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(help="Policy directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a policy directory and show what is in it."""
    policy = load_policy(directory)
    if as_json:
        typer.echo(json.dumps(summary(policy), indent=2, sort_keys=True))
        return
    # Plain lines: a table would fold digests at the terminal's width, and they are there to be copied.
    for key, value in summary(policy).items():
        text = value if isinstance(value, str) else json.dumps(value)
        Console().print(f"{key:<26} {text}", soft_wrap=True)


def summary(policy: Policy) -> dict[str, object]:
    """What `inspect` shows, as plain JSON values."""
    model = policy.model
    return {
        "name": policy.name,
        "version": policy.version,
        "digest": policy.digest,
        "base_digest": policy.base_digest,
        "recipe_id": policy.recipe_id,
        "recipe": policy.recipe.to_dict(),
        "source_run": policy.source_run,
        "tokenizer_digest": policy.tokenizer_digest,
        "chat_template_digest": policy.chat_template_digest,
        "model_type": model.model_type,
        "layers": model.layers,
        "layers_with_nvfp4_experts": sum(policy.recipe.quantizes_experts(i) for i in model.expert_layers),
        "layers_with_nvfp4_kv": sum(policy.recipe.quantizes_kv(i) for i in model.attention_layers),
        "tensors": len(policy.weights),
        "weight_bytes": policy.weight_bytes,
        "format": policy.format,
        "packed_by": policy.manifest.packed_by,
        "notes": _notes(policy),
    }


def _notes(policy: Policy) -> list[str]:
    layout = LAYOUTS.get(policy.format)
    if layout is None:
        return []
    out = storable.notes(policy.recipe, layout, policy.model.attention_layers)
    if policy.manifest.packed_by == "source":
        out.append("the weights came packed: the recipe's choices for weights describe them only if they were made so")
    return out
