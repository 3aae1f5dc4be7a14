"""`eval-gate verify`: a signed verdict, and whether files are those it was signed for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eval_gate.commands.options import AsJson


def verify(
    envelope: Annotated[Path, typer.Argument(help="Signed verdict (verdict.dsse.json).")],
    public_key: Annotated[Path, typer.Option(help="Public key of the signer: a PEM file, or env:NAME.")],
    policy: Annotated[Path | None, typer.Option(help="Policy directory that the verdict must authorise.")] = None,
    training: Annotated[Path | None, typer.Option(help="Directory of the training artifact.")] = None,
    queries: Annotated[list[str] | None, typer.Option(help="Query file or suite; again for each of several.")] = None,
    gate_policy: Annotated[Path | None, typer.Option(help="gate-policy.json that it must be judged under.")] = None,
    results: Annotated[Path | None, typer.Option(help="results.jsonl that it must be judged from.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a signed verdict, and with files that they are what it judged. Exit code 3, with the first fault, if not.

    Without --policy the outcome is printed, not checked: a signed BLOCK is a valid verdict.
    """
    from eval_gate.signing import verify_verdict
    from eval_gate.verification import SubjectFiles, check_subjects

    verdict = verify_verdict(envelope, public_key)
    files = SubjectFiles(policy, training, tuple(queries or ()), gate_policy, results)
    checked = list(check_subjects(verdict, files))
    if as_json:
        typer.echo(verdict.model_dump_json(indent=2))
        return
    typer.echo(f"signature valid: {verdict.outcome}, {verdict.policy_name or verdict.serving_evidence.source}")
    typer.echo(f"serving {verdict.subjects.serving or 'unknown'}")
    typer.echo(f"expires {verdict.expires:%Y-%m-%d %H:%M} UTC")
    for line in checked:
        typer.echo(line)
