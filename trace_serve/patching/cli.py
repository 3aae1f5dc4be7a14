"""`trace-serve patch`: apply, status, revert, lock, check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trace_serve.patching.fit import Fit, PatchFit
from trace_serve.patching.operations import Outcome, write_lock
from trace_serve.patching.operations import apply as apply_patches
from trace_serve.patching.operations import revert as revert_patches
from trace_serve.patching.release_check import ReleaseReport, check_release
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


@app.command("check")
def check_command(
    wheel: Annotated[
        Path, typer.Option("--sglang-wheel", metavar="FILE", help="From `pip download --no-deps sglang==VERSION`.")
    ],
    patches: PatchesOption = None,
    as_json: JsonOption = False,
) -> int:
    """Report what still fits another SGLang release: patches, hook targets, registries, imported names.

    Nothing in the wheel is run, and the installed SGLang stays as it is. Exit code 0 when all fits, else 1.
    """
    report = check_release(wheel, patches)
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else "\n".join(_lines(report)))
    return 0 if report.ok else 1


def _lines(report: ReleaseReport) -> list[str]:
    lines = [f"sglang {report.version}"]
    for patch in report.patches:
        lines.append(f"  {patch.fit:<10}{patch.name}  {patch.subject}")
        lines += _hunk_lines(patch)
    bad = [seam for seam in report.seams if not seam.ok]
    kinds = {kind: sum(seam.kind == kind for seam in report.seams) for kind in ("hook", "registry", "import")}
    lines += [f"  missing   {seam.kind} {seam.name} {seam.target}: {seam.detail}" for seam in bad]
    fitting = sum(patch.fit in (Fit.CLEAN, Fit.OFFSET) for patch in report.patches)
    total = len(report.seams)
    lines.append(
        f"{fitting} of {len(report.patches)} patches apply; {total - len(bad)} of {total} seams are there "
        f"(of {kinds['hook']} hooks, {kinds['registry']} registries, {kinds['import']} imported names)"
    )
    return lines


def _hunk_lines(patch: PatchFit) -> list[str]:
    """One line a file for hunks that merely moved, one a hunk for the others."""
    moved: dict[str, set[int]] = {}
    for hunk in patch.hunks:
        if hunk.offset:
            moved.setdefault(hunk.path, set()).add(hunk.offset)
    lines = [f"{path}: moved by {', '.join(f'{by:+d}' for by in sorted(found))} lines" for path, found in moved.items()]
    lines += [f"{hunk.path}:{hunk.line}: {hunk.detail}" for hunk in patch.hunks if hunk.detail]
    return [f"            {line}" for line in lines]


def _summary(outcome: Outcome, unchanged: str, changed: str) -> str:
    status = outcome.status
    done = f"{changed}: {len(outcome.changed)} files rewritten" if outcome.changed else unchanged
    return f"{len(status.patches)} patches {done} (sglang {status.version} in {status.root})"
