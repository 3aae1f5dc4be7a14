"""Counts and logs the requests of all routes but the two that sample, which write down more themselves."""

from __future__ import annotations

import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trace_serve.server.observe.metrics import Metrics

log = structlog.get_logger("trace_serve.request")

SAMPLING = frozenset({"/v1/chat/completions", "/v1/completions"})
_QUIET = ("/health", "/metrics")
"""Asked every few seconds by machines: their lines are logged at level debug, also while they say 503."""


class RouteObserver:
    """ASGI middleware.

    Args:
        app: what it wraps.
        metrics: where requests are counted; unknown paths share one label, so that scans cannot make series.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["path"] in SAMPLING and scope["method"] == "POST"):
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status, size = 500, 0

        async def counted(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            self._write_down(scope, status, size, time.monotonic() - began)

    def _write_down(self, scope: Scope, status: int, size: int, total_s: float) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        outcome = "ok" if status < 400 else "refused" if status < 500 else "failed"
        self._metrics.requests.labels(route, str(status), outcome).inc()
        if route.endswith("/hints") and status == 200 and scope["method"] == "GET":
            self._metrics.hint_bytes_served.inc(size)
        (log.debug if route.startswith(_QUIET) else log.info)(
            "request",
            route=route,
            method=scope["method"],
            status=status,
            outcome=outcome,
            bytes=size,
            total_s=round(total_s, 4),
        )
