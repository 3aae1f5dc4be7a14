"""A short way to the routes that sample tokens, past the router and what FastAPI does for each request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class HotRoutes:
    """ASGI middleware; add it first, so that it is the innermost one and others see its answers.

    FastAPI has the same routes, for its own list of them. An endpoint answers for its refusals itself.

    Args:
        app: answers everything else.
        routes: endpoints for POST by exact path.
    """

    def __init__(self, app: ASGIApp, routes: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._routes.get(scope["path"]) if post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)
