"""OpenTelemetry for the front-end, off unless an endpoint is given; nothing of it is imported until then.

`telemetry_otel` has the implementation (extra `otel`). Here is the interface that requests see, and the decision.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from trace_serve.errors import ConfigError
from trace_serve.settings import Settings

log = structlog.get_logger("trace_serve.telemetry")

_ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)
_PROTOCOL = "http/protobuf"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_TRACESTATE = 512


@dataclass(frozen=True)
class Ended:
    """How a request ended.

    Attributes:
        status: HTTP status that was sent, 499 when the client had gone.
        outcome: `ok`, `client_gone` or an error code.
        total_s, first_s: seconds from arrival to the last byte and to the first frame of a stream; None without one.
        usage: token counts as the engine gave them, if it did.
        finish_reasons: of each choice, as far as known.
    """

    status: int
    outcome: str
    total_s: float
    first_s: float | None
    usage: Mapping[str, Any] | None
    finish_reasons: tuple[str, ...]


class RequestSpan(Protocol):
    """One request in a trace."""

    @property
    def trace_id(self) -> str: ...

    def headers(self) -> dict[str, str]:
        """Headers that make the engine's spans children of this one."""

    def set(self, name: str, value: str | int | float | bool) -> None:
        """Sets one attribute."""

    def describe(self, model: str, attributes: Mapping[str, str | int | float | bool]) -> None:
        """Names the model once it is known, and sets further attributes."""

    def end(self, ended: Ended) -> None: ...


class Telemetry(Protocol):
    """Makes spans and records the GenAI server metrics."""

    def request(self, request_id: str, route: str, headers: Mapping[str, str]) -> RequestSpan: ...

    def close(self, timeout_s: float) -> None:
        """Sends what waits, for at most `timeout_s`. Blocks."""


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """W3C trace headers of a client, for an engine whose front-end takes no part in the trace."""
    parent = headers.get("traceparent")
    if parent is None or _TRACEPARENT.fullmatch(parent) is None:
        return {}
    state = headers.get("tracestate")
    if state and len(state) <= _MAX_TRACESTATE and state.isascii() and state.isprintable():
        return {"traceparent": parent, "tracestate": state}
    return {"traceparent": parent}


def open_telemetry(settings: Settings, environment: Mapping[str, str] | None = None) -> Telemetry | None:
    """What the settings and the standard OTEL_ variables ask for; None when that is nothing.

    Args:
        settings: `otel_endpoint` wins over the variables.
        environment: default is the process's.

    Raises:
        ConfigError: another protocol than OTLP over HTTP is asked for, or `--otel-endpoint` without the extra `otel`.
    """
    environ = os.environ if environment is None else environment
    endpoint = settings.otel_endpoint
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if endpoint is None and not any(environ.get(name) for name in _ENDPOINTS):
        return None
    protocol = environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", _PROTOCOL)
    if protocol != _PROTOCOL:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL: got {protocol!r}, expected {_PROTOCOL!r}, the one that is built in; unset "
            "it and name the collector's HTTP port (4318 as a rule)",
            field="otel_endpoint",
        )
    try:
        from trace_serve.server.observe.otel import OtelTelemetry
    except ModuleNotFoundError as exc:
        if not (exc.name or "").startswith(("opentelemetry", "google", "requests")):
            raise
        if endpoint is None:
            # The variables are often set for a whole cluster, so they alone do not stop a server.
            log.warning("otel_not_installed", missing=exc.name, remedy="pip install 'trace-serve[otel]'")
            return None
        raise ConfigError(
            f"--otel-endpoint: {exc.name} is not installed; run `pip install 'trace-serve[otel]'`",
            field="otel_endpoint",
        ) from exc
    return OtelTelemetry(
        endpoint,
        host=settings.host,
        port=settings.port,
        traces=_exports("TRACES", endpoint, environ),
        metrics=_exports("METRICS", endpoint, environ),
    )


def _exports(signal: str, endpoint: str | None, environ: Mapping[str, str]) -> bool:
    """Whether a signal has somewhere to go; a collector named for the other one alone is not sent both."""
    if environ.get(f"OTEL_{signal}_EXPORTER", "otlp").strip().lower() == "none":
        return False
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return endpoint is not None or any(environ.get(name) for name in names)
