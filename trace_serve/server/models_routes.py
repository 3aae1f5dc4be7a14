"""`/v1/models`: the policies whose answers clients get."""

from __future__ import annotations

import time
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from trace_serve.server.front_end import FrontEnd
from trace_serve.server.model_names import check_model
from trace_serve.server.service import Service


def models_router(front: FrontEnd) -> APIRouter:
    """The list, and one of them by any name that a request may give."""
    router = APIRouter()
    created = int(time.time())

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        front.authenticate(request)
        data = [_entry(service, created) for service in front.services.answering()]
        return _json({"object": "list", "data": data}, front)

    @router.get("/v1/models/{model}")
    async def model(request: Request, model: str) -> Response:
        front.authenticate(request)
        answering = front.services.answering()
        check_model(model, answering)
        return _json(_entry(next(s for s in answering if model in s.model_names), created), front)

    return router


def _json(content: dict[str, Any], front: FrontEnd) -> Response:
    return Response(orjson.dumps(content), headers=front.response_headers(), media_type="application/json")


def _entry(service: Service, created: int) -> dict[str, Any]:
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
