"""Assembles the admin API."""

from __future__ import annotations

import hmac
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from trace_serve.errors import ConfigError, TraceServeError, VerdictRefused
from trace_serve.server.admin.weights import install_weight_routes
from trace_serve.server.errors import ApiError, bad_request, unauthorized
from trace_serve.server.front_end import FrontEnd
from trace_serve.server.policies.activation import Activator, Method

MAX_AUDIT_LINES = 1000

Label = Annotated[str, Field(min_length=1, max_length=129, description="name@version, or a name that one policy has")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Activate(_Body):
    """Body of POST /admin/activate."""

    policy: Label
    method: Method = Field(
        "auto", description="refit exchanges the weights in the running engine, switch starts a second engine first"
    )


class Try(_Body):
    """Body of POST /admin/candidate."""

    policy: Label
    trial: Literal["canary", "shadow"] = Field(
        description="canary answers a share of the requests; shadow gets copies, and its answers are only stored"
    )
    share: float = Field(ge=0.0, le=1.0, allow_inf_nan=False, description="of requests")


router = APIRouter(prefix="/admin")


def actor(request: Request) -> str:
    """Checks the key; who asks, for the audit log."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    key: str = request.app.state.key
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
        raise unauthorized()
    host = request.client.host if request.client else "unknown"
    return f"{request.headers.get('x-trace-actor', 'admin')[:64]}@{host}"


def activator(request: Request) -> Activator:
    found: Activator | None = request.app.state.activator
    if found is None:
        raise ApiError(
            404,
            "this server has one policy and no registry; start it with --registry DIR",
            kind="invalid_request_error",
            code="no_registry",
        )
    return found


Actor = Annotated[str, Depends(actor)]
Policies = Annotated[Activator, Depends(activator)]


@router.get("/state")
async def state(_: Actor, on: Policies) -> Response:
    return _json(on.state())


@router.get("/policies")
async def listing(_: Actor, on: Policies) -> Response:
    return _json({"policies": await on.entries(), **on.state()})


@router.get("/policies/{label}/verdict")
async def verdict(_: Actor, on: Policies, label: str) -> Response:
    return _json(await on.in_thread(lambda: on.registry.verdict(label)))


@router.post("/activate")
async def activate(who: Actor, on: Policies, body: Activate) -> Response:
    return _json(await on.activate(body.policy, method=body.method, actor=who))


@router.post("/deactivate")
async def deactivate(who: Actor, on: Policies) -> Response:
    return _json(await on.deactivate(actor=who))


@router.post("/rollback")
async def rollback(who: Actor, on: Policies) -> Response:
    return _json(await on.rollback(actor=who))


@router.post("/candidate")
async def try_beside(who: Actor, on: Policies, body: Try) -> Response:
    return _json(await on.try_beside(body.policy, body.trial, body.share, actor=who))


@router.delete("/candidate")
async def drop(who: Actor, on: Policies) -> Response:
    return _json(await on.drop(actor=who))


@router.post("/promote")
async def promote(who: Actor, on: Policies) -> Response:
    return _json(await on.promote(actor=who))


@router.get("/audit")
async def audit(_: Actor, on: Policies, lines: Annotated[int, Query(ge=1, le=MAX_AUDIT_LINES)] = 100) -> Response:
    return _json({"head": on.audit.head, "events": await on.in_thread(lambda: on.audit.tail(lines))})


def create_admin_app(front: FrontEnd, policies: Activator | None, key: str) -> FastAPI:
    """The admin API of one front-end.

    Args:
        front: what it changes.
        policies: operations on policies; None when the server has no registry.
        key: the bearer key that every request must send.
    """
    app = FastAPI(title="trace-serve admin", docs_url=None, redoc_url=None)
    app.state.key, app.state.activator = key, policies
    app.include_router(router)
    install_weight_routes(app, front, actor, None if policies is None else policies.audit)

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(TraceServeError)
    async def failed(_: Request, error: TraceServeError) -> Response:
        return _refusal(error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][1:]) or "body"
        return bad_request(f"{name}: {first['msg']}", param=name).response()

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        refusal = ApiError(error.status_code, message, kind="invalid_request_error", code="unknown_route")
        return refusal.response(dict(error.headers or {}))

    return app


def _refusal(error: TraceServeError) -> ApiError:
    """What a failed operation means to who asked for it; what served before serves on."""
    if isinstance(error, VerdictRefused):
        return ApiError(403, str(error), kind="permission_error", param=error.field, code="verdict_refused")
    if isinstance(error, ConfigError):
        return bad_request(str(error), param=error.field, code="cannot_be_served")
    return ApiError(502, str(error), kind="engine_error", param=error.field, code="engine_failed")


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
