"""Which Host headers an open server on loopback answers to.

A page of another site can have its own name resolve to 127.0.0.1 (DNS rebinding); to the browser the server is then of
the page's own origin. The Host header still tells that site's name, and the page cannot change it. A server with keys
needs no such check, because the page has no key.
"""

from __future__ import annotations

import ipaddress

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from trace_serve.server.errors import ApiError


def is_loopback(host: str) -> bool:
    """Whether an address, or `localhost`, is reached from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def name_of(header: str) -> str:
    """The host in a Host header, without its port and brackets, in lower case."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


class KnownHosts:
    """ASGI middleware: 421 for a Host that is neither this machine nor listed.

    Args:
        app: what it wraps.
        listed: further names, in lower case.
    """

    def __init__(self, app: ASGIApp, listed: frozenset[str]) -> None:
        self._app = app
        self._listed = listed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            header = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
            name = name_of(header)
            if not is_loopback(name) and name not in self._listed:
                refusal = ApiError(
                    421,
                    f"host: got {header[:100]!r}, expected localhost; without API keys this server answers to its own "
                    "machine only: set a key, or name the host in TRACE_SERVE_ALLOWED_HOSTS",
                    kind="invalid_request_error",
                    code="unknown_host",
                )
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def check_hosts(app: FastAPI, *, open_to_all: bool, address: str, listed: str) -> None:
    """Adds the check to a server that has no keys and listens on loopback.

    Args:
        app: the application.
        open_to_all: whether requests need no key.
        address: what the server listens on.
        listed: further host names, separated by commas.
    """
    if open_to_all and is_loopback(address):
        names = frozenset(part.strip().lower() for part in listed.split(",") if part.strip())
        app.add_middleware(KnownHosts, listed=names)
