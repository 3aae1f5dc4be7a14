"""`trace-serve admin`: the admin API from a shell."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from trace_serve.errors import ConfigError, EngineError, TraceServeError, VerdictRefused
from trace_serve.server.policies.audit import verify as verify_chain

app = typer.Typer(
    no_args_is_help=True,
    help="Activate, try and roll back policies of a running server.\n\nThe key is read from TRACE_SERVE_ADMIN_KEY.",
)

Url = Annotated[
    str, typer.Option("--url", envvar="TRACE_SERVE_ADMIN_URL", help="Address of the admin API.", show_default=True)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Policy = Annotated[str, typer.Argument(help="NAME@VERSION, or a NAME that one policy of the registry has.")]
DEFAULT_URL = "http://127.0.0.1:8081"
LOAD_TIMEOUT_S = 3600.0


@app.command("list")
def list_policies(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the registry: digests, verdicts, and what serves."""
    answer = _call(url, "GET", "/admin/policies")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    rows = [("policy", "serves", "digest", "verdict")]
    rows += [
        (row["policy"], _part(row, answer), (row.get("digest") or "-")[:19], _verdict(row))
        for row in answer["policies"]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:  # no table: its reasons would fold at the terminal's width
        typer.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]))


@app.command()
def state(url: Url = DEFAULT_URL) -> None:
    """Show what serves, what is being tried, and what is being done, as JSON."""
    typer.echo(json.dumps(_call(url, "GET", "/admin/state"), indent=2))


@app.command()
def activate(
    policy: Policy,
    method: Annotated[
        str, typer.Option(help="auto; refit: in the running engine; switch: by a second engine.")
    ] = "auto",
    url: Url = DEFAULT_URL,
) -> None:
    """Make a policy the active one; the old one serves until the new one can."""
    _done(_call(url, "POST", "/admin/activate", {"policy": policy, "method": method}))


@app.command()
def deactivate(url: Url = DEFAULT_URL) -> None:
    """Take the active policy out of service."""
    _done(_call(url, "POST", "/admin/deactivate"))


@app.command()
def rollback(url: Url = DEFAULT_URL) -> None:
    """Make the policy active again that was before."""
    _done(_call(url, "POST", "/admin/rollback"))


@app.command()
def canary(
    policy: Policy, share: Annotated[float, typer.Option(help="Of the requests, 0 to 1.")], url: Url = DEFAULT_URL
) -> None:
    """Let another policy answer a share of the requests; again to change the share."""
    _done(_call(url, "POST", "/admin/candidate", {"policy": policy, "trial": "canary", "share": share}))


@app.command()
def shadow(
    policy: Policy, share: Annotated[float, typer.Option(help="Of the requests, 0 to 1.")], url: Url = DEFAULT_URL
) -> None:
    """Send another policy copies of a share of the requests; its answers are stored and go to nobody."""
    _done(_call(url, "POST", "/admin/candidate", {"policy": policy, "trial": "shadow", "share": share}))


@app.command()
def promote(url: Url = DEFAULT_URL) -> None:
    """Make the canary the active policy."""
    _done(_call(url, "POST", "/admin/promote"))


@app.command()
def drop(url: Url = DEFAULT_URL) -> None:
    """End the trial of a canary or a shadow."""
    _done(_call(url, "DELETE", "/admin/candidate"))


@app.command()
def audit(lines: Annotated[int, typer.Option(help="Events to show, 1 to 1000.")] = 20, url: Url = DEFAULT_URL) -> None:
    """Show the last events of the audit log, as JSON lines."""
    for event in _call(url, "GET", f"/admin/audit?lines={lines}")["events"]:
        typer.echo(json.dumps(event))


@app.command("verify-audit")
def verify_audit(
    file: Annotated[Path, typer.Argument(help="audit.jsonl of a state directory.")],
    head: Annotated[str | None, typer.Option(help="Digest that the last line must have, kept elsewhere.")] = None,
) -> None:
    """Check that no line of an audit log was edited, removed or inserted."""
    chain = verify_chain(file)
    if head is not None and chain.head != head:
        raise ConfigError(
            f"{file}: the last line has the digest {chain.head}, expected {head}; lines were cut off or added",
            field="head",
        )
    typer.echo(f"{file}: {chain.lines} lines, head {chain.head}")


def _done(answer: dict[str, Any]) -> None:
    active = answer["active"]
    serving = "no policy is active" if active is None else f"{active['policy']} is active"
    candidate = answer["candidate"]
    beside = "" if not candidate else f", {candidate['policy']} as {candidate['trial']} ({candidate['share']:.1%})"
    typer.echo(f"{answer['operation']} done in {answer['seconds']:.1f} s: {serving}{beside}")


def _part(row: dict[str, Any], answer: dict[str, Any]) -> str:
    if answer["active"] and answer["active"]["policy"] == row["policy"]:
        return "active"
    if answer["candidate"] and answer["candidate"]["policy"] == row["policy"]:
        return f"{answer['candidate']['trial']} {answer['candidate']['share']:.1%}"
    return "previous" if answer["previous"] == row["policy"] else "-"


def _verdict(row: dict[str, Any]) -> str:
    if row.get("fault"):
        return f"unusable: {row['fault']}"
    verdict = row["verdict"]
    if verdict["authorizes"]:
        return f"{verdict['outcome']} until {verdict['expires'][:16]}"
    return f"does not authorize: {verdict['reason']}"


def _call(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    key = os.environ.get("TRACE_SERVE_ADMIN_KEY")
    if not key:
        raise ConfigError("TRACE_SERVE_ADMIN_KEY: missing, expected the key of the admin API", field="admin_key")
    request = urllib.request.Request(
        url.rstrip("/") + quote(path, safe="/?=&@"),
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=LOAD_TIMEOUT_S) as answer:
            parsed: dict[str, Any] = json.loads(answer.read())
            return parsed
    except urllib.error.HTTPError as error:
        raise _told(error) from error
    except OSError as exc:
        raise EngineError(f"{url}: the admin API does not answer ({exc}); is the server running?") from exc


def _told(error: urllib.error.HTTPError) -> TraceServeError:
    """The server's own words, as the error that they stand for."""
    with error:
        try:
            told = json.loads(error.read())["error"]["message"]
        except (ValueError, KeyError, TypeError):
            told = f"the admin API answered {error.code}"
    if error.code == 403:
        return VerdictRefused(told)
    return ConfigError(told) if error.code < 500 else EngineError(told)
