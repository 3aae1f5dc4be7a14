"""Assembles the FastAPI application from a front-end's state."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from trace_serve.server import hint_files
from trace_serve.server.authorization import Authorization
from trace_serve.server.errors import ApiError, bad_request, not_found
from trace_serve.server.front_end import FrontEnd
from trace_serve.server.generation import GenerationRoute
from trace_serve.server.route_observer import RouteObserver
from trace_serve.server.schemas import MAX_CHOICES, ChatRequest, CompletionRequest
from trace_serve.server.service import EngineFactory, Service
from trace_serve.settings import Settings

ROLLOUT_ID = re.compile(r"trace-[0-9a-f]{32}")


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

    app = FastAPI(title="trace-serve", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.front = front
    app.add_middleware(RouteObserver, metrics=front.metrics)
    created = int(time.time())

    chat = GenerationRoute(front, "/v1/chat/completions", ChatRequest)
    completions = GenerationRoute(front, "/v1/completions", CompletionRequest)

    @app.post("/v1/chat/completions", openapi_extra=_body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await chat(request)

    @app.post("/v1/completions", openapi_extra=_body_of(CompletionRequest))
    async def text_completions(request: Request) -> Response:
        return await completions(request)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        front.authenticate(request)
        raise not_found(
            "this server samples text and makes no embeddings; use /v1/chat/completions or /v1/completions",
            code="unsupported_endpoint",
        )

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        front.authenticate(request)
        data = [_model_entry(service, created) for service in front.services.answering()]
        return _json({"object": "list", "data": data}, front.response_headers())

    @app.get("/v1/rollouts/{rollout_id}/hints")
    async def hints(request: Request, rollout_id: str) -> Response:
        front.authenticate(request)
        if ROLLOUT_ID.fullmatch(rollout_id) is None:
            raise not_found("rollout id: expected the x-trace-rollout header of an answer", param="id")
        if settings.hint_dir is None:
            raise not_found("this server keeps no hints; start it with --hint-dir", code="hints_off")
        choice = request.query_params.get("choice")
        if choice is not None and choice not in map(str, range(MAX_CHOICES)):
            raise bad_request(f"choice: got {choice[:20]!r}, expected 0 to {MAX_CHOICES - 1}", param="choice")
        name = rollout_id if choice is None else hint_files.choice_name(rollout_id, int(choice))
        path = await hint_files.find(settings.hint_dir, name)
        return FileResponse(path, media_type="application/octet-stream", filename=path.name)

    @app.get("/trace/report")
    async def report(request: Request) -> Response:
        front.authenticate(request)
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
    async def metrics() -> Response:
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


def _model_entry(service: Service, created: int) -> dict[str, Any]:
    authorization, engine = service.authorization, service.supervisor.engine
    return {
        "id": authorization.name,
        "object": "model",
        "created": created,
        "owned_by": "trace-serve",
        "policy_version": authorization.version,
        "policy_digest": authorization.digest,
        "max_model_len": None if engine is None else engine.limits.context_length,
    }


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The request body in the OpenAPI document; validation is `schemas.parse_request`."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}
