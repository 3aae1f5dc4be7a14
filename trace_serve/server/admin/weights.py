"""Weight updates by a trainer, relayed to the active engine: rollout mode only.

The engine's address and key stay inside; `trace_serve.engine.push.Push(f"{admin_url}/engine", admin_key)` works as it
does against an engine.
"""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
import structlog
from fastapi import FastAPI, Request
from fastapi.responses import Response

from trace_serve.server.errors import ApiError, engine_failed
from trace_serve.server.front_end import FrontEnd
from trace_serve.server.policies.audit import AuditLog

log = structlog.get_logger("trace_serve.admin")

ROUTES = (
    "pause_generation",
    "continue_generation",
    "begin_weight_update",
    "update_weights_from_tensor",
    "update_weights_from_distributed",
    "update_weights_from_disk",
    "end_weight_update",
    "init_weights_update_group",
    "destroy_weights_update_group",
)
"""SGLang's routes that change weights; nothing else of the engine can be reached."""

CHANGES_WEIGHTS = ("end_weight_update", "update_weights_from_disk")


def install_weight_routes(
    app: FastAPI, front: FrontEnd, actor: Callable[[Request], str], audit: AuditLog | None
) -> None:
    """Adds `POST /engine/<route>` for each of `ROUTES`.

    Args:
        app: the admin API.
        front: whose active engine is meant.
        actor: checks the key.
        audit: where changes of weights are written.
    """

    async def relay(request: Request) -> Response:
        who = actor(request)
        route = request.url.path.rpartition("/")[2]
        if front.settings.mode != "rollout":
            raise ApiError(
                403,
                f"/engine/{route}: in production mode weights change only by /admin/activate, which checks the verdict",
                kind="permission_error",
                code="not_in_production",
            )
        service = front.active
        engine = service.engine_in_service()
        try:
            status, content = await front.client.pass_on(
                engine, f"/{route}", request.stream(), timeout_s=front.settings.engine_start_timeout_s
            )
            if route in CHANGES_WEIGHTS:
                await service.supervisor.read_weight_version()
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise engine_failed(f"/engine/{route}: the engine did not answer ({exc or type(exc).__name__})") from exc
        if audit is not None and route in CHANGES_WEIGHTS:
            audit.append(route, actor=who, policy=service.authorization.label, status=status)
        log.info("weights", route=route, actor=who, status=status, version=service.supervisor.weight_version)
        return Response(content, status_code=status, media_type="application/json")

    for name in ROUTES:
        app.add_api_route(f"/engine/{name}", relay, methods=["POST"], name=name)
