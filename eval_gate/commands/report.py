"""`eval-gate report`: one verdict in any of its forms."""

from __future__ import annotations

import io
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from eval_gate.commands.options import AsJson
from trace_serve.errors import ConfigError

if TYPE_CHECKING:
    from eval_gate.verdict import Verdict


class Format(StrEnum):
    """Forms of `--format`."""

    TERMINAL = "terminal"
    JSON = "json"
    MARKDOWN = "markdown"
    JUNIT = "junit"
    HTML = "html"
    OTEL = "otel"


def load_verdict(results: Path) -> Verdict:
    """Reads the verdict of a run's directory, or a verdict.json.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    from eval_gate.verdict import Verdict

    path = results / "verdict.json" if results.is_dir() else results
    try:
        return Verdict.model_validate_json(path.read_bytes())
    except OSError as exc:
        raise ConfigError(
            f"{path}: cannot be read: {exc.strerror}; expected a run's directory or its verdict.json", field="results"
        ) from exc
    except ValidationError as exc:
        fault = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise ConfigError(f"{path}: not a verdict: {where}: {fault['msg']}", field="results") from exc


def _otel(verdict: Verdict, results: Path, out: Path | None) -> Path:
    """Writes the events of a run; the grades are in its results, which have to be those that were judged."""
    from eval_gate.arms.records import SampleRecord, read_results
    from eval_gate.report.otel import write_otel
    from trace_serve.policy.digest import digest_file

    if out is None:
        raise ConfigError("--format otel: expected --out FILE", field="out")
    path = (results if results.is_dir() else results.parent) / "results.jsonl"
    if digest_file(path) != verdict.subjects.results:
        raise ConfigError(f"{path}: not the results of this verdict; expected those of its run", field="results")
    write_otel(verdict, (one for one in read_results(path) if isinstance(one, SampleRecord)), out)
    return out


def report(
    results: Annotated[Path, typer.Argument(help="Directory of a run, or its verdict.json.")],
    form: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.TERMINAL,
    out: Annotated[Path | None, typer.Option(help="File to write to; default: standard output.")] = None,
    as_json: AsJson = False,
) -> None:
    """Render the verdict of an earlier run. The signature is not checked here; `verify` does that."""
    from rich.console import Console

    from eval_gate.arms.records import write_atomic
    from eval_gate.report.html import render_html
    from eval_gate.report.junit import render_junit
    from eval_gate.report.markdown import render_markdown
    from eval_gate.report.terminal import print_verdict

    verdict = load_verdict(results)
    form = Format.JSON if as_json else form
    if form is Format.OTEL:
        typer.echo(f"written: {_otel(verdict, results, out)}")
        return
    if form is Format.TERMINAL:
        if out is None:
            print_verdict(verdict, Console())
            return
        console = Console(record=True, file=io.StringIO(), width=120)
        print_verdict(verdict, console)
        text = console.export_text()
    else:
        text = {
            Format.JSON: lambda: verdict.model_dump_json(indent=2) + "\n",
            Format.MARKDOWN: lambda: render_markdown(verdict),
            Format.JUNIT: lambda: render_junit(verdict),
            Format.HTML: lambda: render_html(verdict),
        }[form]()
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        write_atomic(out, text.encode())
    except OSError as exc:
        raise ConfigError(f"--out {out}: cannot be written: {exc.strerror}", field="out") from exc
    typer.echo(f"written: {out}")
