"""Assembles the FastAPI application from a front-end's state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from trace_serve.server.authorization import Authorization
from trace_serve.server.cors import allow_origins, parse_origins
from trace_serve.server.errors import ApiError, not_found
from trace_serve.server.front_end import FrontEnd
from trace_serve.server.generation import GenerationRoute
from trace_serve.server.hosts import check_hosts
from trace_serve.server.models_routes import models_router
from trace_serve.server.observe.route_observer import RouteObserver
from trace_serve.server.relay.hot_routes import HotRoutes
from trace_serve.server.rollouts.routes import rollout_router
from trace_serve.server.schemas.parsing import ChatRequest, CompletionRequest
from trace_serve.server.service import EngineFactory
from trace_serve.server.tokenize import tokenize_router
from trace_serve.server.web import web_router
from trace_serve.settings import Settings


def create_app(
    settings: Settings,
    authorization: Authorization | None,
    factory: EngineFactory,
    *,
    on_exit: Callable[[], None] = lambda: None,
) -> FastAPI:
    """The application of one front-end; its `state.front` is the `FrontEnd`.

    Args:
        settings: limits and time-outs; `hint_dir` is where hint files are served from.
        authorization: the policy that is active from the start; None when the admin API will activate one.
        factory: makes an unstarted engine process for a policy.
        on_exit: called when the server should end.
    """
    front = FrontEnd(settings, authorization, factory, on_exit=on_exit)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await front.open()
        try:
            yield
        finally:
            await front.close()

    app = FastAPI(title="trace-serve", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.front = front
    chat = GenerationRoute(front, "/v1/chat/completions", ChatRequest)
    completions = GenerationRoute(front, "/v1/completions", CompletionRequest)
    app.add_middleware(HotRoutes, routes={"/v1/chat/completions": chat, "/v1/completions": completions})
    app.add_middleware(RouteObserver, metrics=front.metrics)
    allow_origins(app, parse_origins(settings.cors_origins))
    check_hosts(app, open_to_all=front.access.open, address=settings.host, listed=settings.allowed_hosts)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await chat(request)

    @app.post("/v1/completions")
    async def text_completions(request: Request) -> Response:
        return await completions(request)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        front.authenticate(request)
        raise not_found(
            "this server samples text and makes no embeddings; use /v1/chat/completions or /v1/completions",
            code="unsupported_endpoint",
        )

    app.include_router(models_router(front))
    app.include_router(rollout_router(front))
    app.include_router(tokenize_router(front))
    app.include_router(web_router(pages=settings.web_pages))

    @app.get("/trace/report")
    async def report(request: Request) -> Response:
        front.authenticate(request, "report")
        return _json(await front.active.report(), front.response_headers())

    @app.get("/health/live")
    async def live() -> Response:
        return _json({"status": "live"})

    # The model gateway (smg) registers a worker by this name.
    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> Response:
        active = front.active
        limits, label = active.engine_without_doubt().limits, active.authorization.label
        return _json({"status": "ready", "policy": label, "context_length": limits.context_length})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        if settings.metrics_need_key:
            front.authenticate(request, "metrics")
        return Response(await front.metrics_page.render(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> Response:
        return error.response(front.response_headers())

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        refusal = ApiError(error.status_code, message, kind="invalid_request_error", code="unknown_route")
        return refusal.response(dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> Response:
        refusal = ApiError(500, "internal error of the server; see its log", kind="server_error", code="internal_error")
        return refusal.response(front.response_headers())

    return app


def _json(content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), headers=headers, media_type="application/json")
