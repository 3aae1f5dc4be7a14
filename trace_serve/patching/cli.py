"""`trace-serve patch`: apply, status, revert, lock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trace_serve.patching.operations import Outcome, write_lock
from trace_serve.patching.operations import apply as apply_patches
from trace_serve.patching.operations import revert as revert_patches
from trace_serve.patching.status import State
from trace_serve.patching.status import status as read_status

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Put the patches on the installed SGLang, or take them off."
)

TargetOption = Annotated[
    Path | None,
    typer.Option("--target", metavar="DIR", help="Another site-packages directory; default: this environment's."),
]
PatchesOption = Annotated[
    Path | None,
    typer.Option("--patches", metavar="DIR", help="Another patch directory; default: the shipped one."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("apply")
def apply_command(target: TargetOption = None, patches: PatchesOption = None) -> None:
    """Apply every patch, or none. Safe to repeat."""
    outcome = apply_patches(target, patches)
    typer.echo(_summary(outcome, "already applied", "applied"))


@app.command("revert")
def revert_command(target: TargetOption = None, patches: PatchesOption = None) -> None:
    """Bring back the released files, byte for byte. Safe to repeat."""
    outcome = revert_patches(target, patches)
    typer.echo(_summary(outcome, "already as released", "reverted"))


@app.command("status")
def status_command(target: TargetOption = None, patches: PatchesOption = None, as_json: JsonOption = False) -> None:
    """Show the state of each patch and each file; changes nothing."""
    status = read_status(target, patches)
    if as_json:
        typer.echo(json.dumps(status.to_dict(), indent=2))
        return
    typer.echo(f"sglang {status.version} in {status.root}: {status.state}")
    for patch in status.patches:
        typer.echo(f"  {patch.state:<12}{patch.name}  {patch.subject}")
    for file in status.files:
        if file.state is not State.APPLIED:
            typer.echo(f"  {file.state:<12}{file.path}")


@app.command("lock")
def lock_command(target: TargetOption = None, patches: PatchesOption = None) -> None:
    """For developers: write the lock anew after a patch was edited."""
    typer.echo(f"wrote {write_lock(target, patches)}")


def _summary(outcome: Outcome, unchanged: str, changed: str) -> str:
    status = outcome.status
    done = f"{changed}: {len(outcome.changed)} files rewritten" if outcome.changed else unchanged
    return f"{len(status.patches)} patches {done} (sglang {status.version} in {status.root})"
