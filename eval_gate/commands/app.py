"""All commands as one application; what they run is imported when they run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from eval_gate.commands.aa import aa
from eval_gate.commands.attribute import attribute
from eval_gate.commands.compare import compare
from eval_gate.commands.completion import PROGRAM, completion
from eval_gate.commands.convert import convert
from eval_gate.commands.plan import plan
from eval_gate.commands.report import report
from eval_gate.commands.run import run
from eval_gate.commands.verify import verify
from eval_gate.settings import load_settings

UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Base of the errors that the argument parser raises; where it lives depends on typer's version."""

app = typer.Typer(
    name=PROGRAM,
    help="Decide whether a policy as served is as good as it was when trained.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


EXAMPLES: dict[Callable[..., None], str] = {
    run: "eval-gate run --training models/base --serving policies/mine --looks 4 --out gate --key gate.pem",
    compare: "eval-gate compare bf16.jsonl fp4.jsonl --margin 0.02 --out gate",
    plan: "eval-gate plan --pilot gate/results.jsonl --margin 0.01 --looks 5",
    aa: "eval-gate aa --arm http://127.0.0.1:8080 --queries support --concurrency 32 --out noise",
    attribute: "eval-gate attribute --model policies/mine --queries support-dev --budget 16 --out why",
    report: "eval-gate report gate --format junit --out junit.xml",
    verify: "eval-gate verify gate/verdict.dsse.json --public-key gate.pub --policy policies/mine",
    convert: "eval-gate convert batch.jsonl queries.jsonl --from openai-batch --answers answers.jsonl",
    completion: "eval-gate completion bash",
}
for command, example in EXAMPLES.items():
    app.command(epilog=f"Example: {example}")(command)


@app.callback()
def settings(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Settings file; default: eval-gate.toml.")] = None,
) -> None:
    """Decide whether a policy as served is as good as it was when trained."""
    commands = getattr(context.command, "commands", {})
    flags = {name: _flags(command) for name, command in commands.items()}
    context.default_map = {**(context.default_map or {}), **load_settings(config, flags)}


def _flags(command: Any) -> dict[str, str]:
    """Long flags without dashes, to the parameters they set."""
    return {
        option.removeprefix("--"): parameter.name
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and option != "--help"
    }


@app.command(epilog="Example: eval-gate keygen gate.pem gate.pub")
def keygen(
    private_key: Annotated[Path, typer.Argument(help="File for the private key (owner-only).")],
    public_key: Annotated[
        Path | None, typer.Argument(help="File for the public key; default: the same with .pub.")
    ] = None,
) -> None:
    """Make an Ed25519 key pair for signing verdicts."""
    from eval_gate.keys import generate_key

    public = public_key or private_key.with_suffix(private_key.suffix + ".pub")
    generate_key(private_key, public)
    typer.echo(f"private {private_key}\npublic  {public}")
