"""Which web pages may call the server from a browser: none, unless their origins are listed."""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from trace_serve.errors import ConfigError

_EXPOSED = [
    "retry-after",
    "x-request-id",
    "x-trace-policy",
    "x-trace-policy-digest",
    "x-trace-rollout",
    "x-trace-verdict",
    "x-trace-weight-version",
    *(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
]
_PREFLIGHT_AGE_S = 600


def parse_origins(text: str) -> tuple[str, ...]:
    """Origins separated by commas, as a browser sends them: scheme and host, with the port where it is not the default.

    Raises:
        ConfigError: `*`, a path, or anything else that no browser would send; it would never match, or match all.
    """
    origins = tuple(part.strip() for part in text.split(",") if part.strip())
    for origin in origins:
        if not _is_origin(origin):
            raise ConfigError(
                f"--cors-origin: got {origin[:200]!r}, expected an origin like https://console.example.com, without "
                "path or wildcard",
                field="cors_origins",
            )
    return origins


def allow_origins(app: FastAPI, origins: tuple[str, ...]) -> None:
    """Adds the headers for these origins; without any the application stays as it is, and preflights are refused."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=_EXPOSED,
            max_age=_PREFLIGHT_AGE_S,
        )


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    host = parts.hostname or ""
    expected = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}" + ("" if port is None else f":{port}")
    return parts.scheme in ("http", "https") and bool(host) and "*" not in host and text == expected
