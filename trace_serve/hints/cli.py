"""`trace-serve hints`: look into hint files and verify them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from trace_serve.errors import HintFormatError
from trace_serve.hints import merge as merging
from trace_serve.hints import wire
from trace_serve.hints.inspect import summarize
from trace_serve.hints.syndrome.cli import pack_command, unpack_command
from trace_serve.hints.syndrome.packed import PackedHints

app = typer.Typer(no_args_is_help=True, help="Inspect and verify hint files.")
app.command("pack")(pack_command)
app.command("unpack")(unpack_command)

_File = Annotated[Path, typer.Argument(help="Hint file (.safetensors).")]


@app.command()
def inspect(file: _File, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the sites, shapes and sizes of a hint file."""
    summary = summarize(wire.read(file))
    if as_json:
        typer.echo(json.dumps(summary, indent=2, sort_keys=True))
        return
    console = Console()
    for key in ("rows", "first_token", "recipe_id", "model_digest", "weight_versions", "logprobs", "routed_experts"):
        console.print(f"{key:<16} {summary[key]}", soft_wrap=True)
    console.print(_table(summary))


def _table(summary: dict[str, Any]) -> Table:
    table = Table("site", "layers", "values", "scale", "B/token", "full codes", "present", "ones")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, site in summary["sites"].items():
        table.add_row(
            name,
            str(site["layers"]),
            f"{site['values']:,}",
            site["scale"],
            f"{site['bytes_per_token']:,}",
            f"{site['full_bytes_per_token']:,}",
            _share(site["present"]),
            _share(site["ones"]),
        )
    table.add_section()
    table.add_row(
        "total", "", "", "", f"{summary['bytes_per_token']:,}", f"{summary['full_bytes_per_token']:,}", "", ""
    )
    table.caption = f"full codes of the paper's 35B model: {summary['paper_bytes_per_token']:,} B a token"
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


@app.command()
def verify(
    file: _File,
    recipe_id: Annotated[str | None, typer.Option(help="Refuse hints of another recipe.")] = None,
    require_complete: Annotated[bool, typer.Option(help="Refuse a file with missing rows.")] = False,
) -> None:
    """Check a hint file's schema, byte counts and checksums; exit code 3 says what is wrong."""
    hints = wire.read(file, expect_recipe_id=recipe_id)
    coded = hints.coded if isinstance(hints, PackedHints) else {}
    missing = {site.name: int((~coded.get(site.name, site).present).sum()) for site in hints.sites}
    if require_complete and any(missing.values()):
        listed = ", ".join(f"{count} of {name}" for name, count in missing.items() if count)
        raise HintFormatError(f"{file}: rows are missing: {listed} of {hints.rows}", field="present")
    Console().print(f"{file}: ok, {hints.rows} rows, missing {json.dumps(missing)}", soft_wrap=True)


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Hint files; a trajectory is named after its file.")],
    out: Annotated[Path, typer.Option(help="Directory to create.")],
) -> None:
    """Store hints of many requests with every shared prefix once."""
    named = {path.name.removesuffix(".safetensors"): path for path in files}
    if len(named) != len(files):
        raise HintFormatError("files: two have the same name; a trajectory is named after its file", field="files")
    done = merging.merge(named, out)
    saved = 1 - done.bytes_after / done.bytes_before if done.bytes_before else 0.0
    typer.echo(f"{out}: {done.trajectories} trajectories in {done.parts} parts, {saved:.1%} smaller")


@app.command()
def split(
    directory: Annotated[Path, typer.Argument(help="Directory that `merge` wrote.")],
    name: Annotated[str, typer.Argument(help="Trajectory.")],
    out: Annotated[Path, typer.Option(help="Hint file to write.")],
) -> None:
    """Take one trajectory out of a merged directory, as the hint file that it was."""
    merging.trajectory(directory, name, out)
    typer.echo(f"{out}: ok")
