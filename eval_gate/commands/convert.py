"""`eval-gate convert`: other tools' files as query files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from eval_gate.importers import FORMATS, ImportOptions
from eval_gate.importers import convert as run_importer
from eval_gate.importers.records import CHECKERS, RECORDED, load_answers


def convert(
    source: Annotated[Path, typer.Argument(help="File to read.")],
    out: Annotated[Path, typer.Argument(help="Query file to write.")],
    from_format: Annotated[str, typer.Option("--from", help=f"Format of the file: {', '.join(FORMATS)}.")],
    checker: Annotated[
        str | None, typer.Option(help=f"{', '.join(CHECKERS)}; default: as the format compares.")
    ] = None,
    answers: Annotated[
        str | None, typer.Option(help="File with the expected answers by id, or `recorded` for those that were given.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Limit of an answer where the record has none.")] = 1024,
    suite: Annotated[str | None, typer.Option(help="Suite of all queries.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Model directory, for records that hold token ids.")] = None,
    skip_unsupported: Annotated[
        bool, typer.Option(help="Leave out, and list, records that have no counterpart.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Turn batches, evals, logs and dumps into a query file. Exit code 3 when a record cannot be turned."""
    options = ImportOptions(
        checker=checker,
        answers=None if answers is None or answers == RECORDED else load_answers(Path(answers)),
        recorded=answers == RECORDED,
        max_tokens=max_tokens,
        suite=suite,
        tokenizer=tokenizer,
    )
    done = run_importer(from_format, source, out, options, skip_unsupported=skip_unsupported)
    if as_json:
        typer.echo(json.dumps({"written": done.written, "skipped": list(done.skipped), "out": str(out)}, indent=2))
        return
    for line in done.skipped:
        typer.echo(f"skipped: {line}", err=True)
    typer.echo(f"{out}: {done.written} queries" + (f", {len(done.skipped)} skipped" if done.skipped else ""))
