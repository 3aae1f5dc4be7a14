"""`trace-serve keys`: makes, lists and revokes the API keys of a key file."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, cast

import typer

from trace_serve.errors import ConfigError
from trace_serve.server.keys.file import locked, read_keys, write_keys
from trace_serve.server.keys.key import DEFAULT_SCOPES, SCOPES, KeyEntry, KeyLimits, Scope, mint_key, new_entry

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Make, list and revoke API keys.")

File = Annotated[Path, typer.Option("--key-file", envvar="TRACE_SERVE_KEY_FILE", help="The key file.")]


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Who the key is for; names it in logs.")],
    key_file: File,
    scope: Annotated[
        list[str] | None, typer.Option(help=f"What it opens, repeated: {', '.join(SCOPES)}; default: all but metrics.")
    ] = None,
    expires_days: Annotated[float | None, typer.Option(help="Days until it expires; default: never.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Overrides the server's setting.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Prompt and completion tokens.")] = None,
    concurrent: Annotated[int | None, typer.Option(min=1, help="Requests running and waiting at once.")] = None,
) -> None:
    """Adds a key and prints it, once: the file keeps its hash only. A running server takes it within a second."""
    scopes = _scopes(scope or list(DEFAULT_SCOPES))
    if expires_days is not None and not 0 < expires_days <= 36500:
        raise ConfigError(
            f"--expires-days: got {expires_days:g}, expected more than 0, up to 36500", field="expires_days"
        )
    expires = None if expires_days is None else _now() + timedelta(days=expires_days)
    limits = KeyLimits(
        requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute, concurrent=concurrent
    )
    key = mint_key()
    try:
        entry = new_entry(name, key, expires=expires, scopes=scopes, limits=limits)
    except ValueError:
        raise ConfigError(
            f"NAME: got {name[:80]!r}, expected up to 64 letters, digits, dots, dashes and underscores", field="name"
        ) from None
    with locked(key_file):
        keys = _read(key_file) if key_file.exists() else []
        if any(each.name == name for each in keys):
            raise ConfigError(f"NAME: {key_file} has a key {name!r} already; revoke it or choose another", field="name")
        write_keys(key_file, [*keys, entry])
    typer.echo(f"key {name!r} is in {key_file}; this is shown once:", err=True)
    typer.echo(key)


@app.command("list")
def list_keys(key_file: File) -> None:
    """Lists the keys of a file: names, scopes, limits and times; keys themselves are kept nowhere."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("name", "state", "scopes", "limits", "created", "expires"):
        table.add_column(heading)
    for entry in _read(key_file):
        state = "expired" if entry.expired(_now()) else "valid"
        expires = "never" if entry.expires is None else f"{entry.expires:%Y-%m-%d}"
        created = f"{entry.created:%Y-%m-%d}"
        table.add_row(entry.name, state, "\n".join(entry.scopes), _shown(entry.limits), created, expires)
    Console().print(table)


@app.command()
def revoke(name: Annotated[str, typer.Argument(help="Name of the key.")], key_file: File) -> None:
    """Takes a key out of the file. A running server refuses it within a second; what runs under it ends as usual."""
    with locked(key_file):
        keys = _read(key_file)
        kept = [each for each in keys if each.name != name]
        if len(kept) == len(keys):
            known = ", ".join(each.name for each in keys) or "no keys"
            raise ConfigError(f"NAME: {key_file} has no key {name!r}, it has {known}", field="name")
        write_keys(key_file, kept)
    typer.echo(f"revoked {name!r}", err=True)


def _shown(limits: KeyLimits) -> str:
    units = {
        "requests_per_minute": "requests/min",
        "tokens_per_minute": "tokens/min",
        "concurrent": "at once",
    }
    own = limits.model_dump(exclude_none=True)
    return "\n".join(f"{own[name]} {unit}" for name, unit in units.items() if name in own) or "the server's"


def _read(path: Path) -> list[KeyEntry]:
    return read_keys(path)[0].keys


def _scopes(given: list[str]) -> list[Scope]:
    for each in given:
        if each not in SCOPES:
            raise ConfigError(f"--scope: got {each!r}, expected one of {', '.join(SCOPES)}", field="scope")
    return cast(list[Scope], list(dict.fromkeys(given)))


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
