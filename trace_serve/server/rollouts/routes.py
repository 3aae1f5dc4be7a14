"""The routes below `/v1/rollouts`: the record of a rollout, and its hints."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response

from trace_serve.server.errors import bad_request, not_found
from trace_serve.server.front_end import FrontEnd
from trace_serve.server.rollouts import hint_files
from trace_serve.server.rollouts.record import with_hints
from trace_serve.server.schemas.base import MAX_CHOICES

ROLLOUT_ID = re.compile(r"trace-[0-9a-f]{32}")


def rollout_router(front: FrontEnd) -> APIRouter:
    """`GET /v1/rollouts/{id}`, `GET` and `DELETE /v1/rollouts/{id}/hints`."""
    router = APIRouter()
    hint_dir = front.settings.hint_dir

    @router.get("/v1/rollouts/{rollout_id}")
    async def rollout(request: Request, rollout_id: str) -> Response:
        caller = front.authenticate(request, "hints")
        _check_id(rollout_id)
        record = front.rollouts.get(rollout_id, caller.name)
        complete = await asyncio.to_thread(with_hints, record, hint_dir)
        return Response(orjson.dumps(complete), media_type="application/json", headers={"cache-control": "no-store"})

    # One route for both methods, so that a 405 allows both.
    @router.api_route("/v1/rollouts/{rollout_id}/hints", methods=["GET", "DELETE"])
    async def hints(request: Request, rollout_id: str) -> Response:
        directory, name = _locate(request, rollout_id)
        if request.method == "DELETE":
            if not await hint_files.remove(directory, name):
                raise not_found(f"no hints of {name}: there is nothing to remove", code="hints_not_found")
            return Response(status_code=204)
        acknowledged = request.query_params.get("ack", "0")
        if acknowledged not in ("0", "1"):
            raise bad_request(f"ack: got {acknowledged[:20]!r}, expected 0 or 1", param="ack")
        path = await hint_files.find(directory, name)
        if acknowledged == "1":
            return hint_files.ReadOnce(directory, name)
        return FileResponse(path, media_type="application/octet-stream", filename=path.name)

    def _locate(request: Request, rollout_id: str) -> tuple[Path, str]:
        """The hint directory, and the name of the hints that a request is about."""
        caller = front.authenticate(request, "hints")
        _check_id(rollout_id)
        if hint_dir is None:
            raise not_found("this server keeps no hints; start it with --hint-dir", code="hints_off")
        choice = request.query_params.get("choice")
        if choice is not None and choice not in map(str, range(MAX_CHOICES)):
            raise bad_request(f"choice: got {choice[:20]!r}, expected 0 to {MAX_CHOICES - 1}", param="choice")
        if not front.rollouts.readable_by(rollout_id, caller.name):
            raise not_found(f"no hints of {rollout_id} for this key", code="hints_not_found")
        return hint_dir, rollout_id if choice is None else hint_files.choice_name(rollout_id, int(choice))

    return router


def _check_id(rollout_id: str) -> None:
    if ROLLOUT_ID.fullmatch(rollout_id) is None:
        raise not_found("rollout id: expected the x-trace-rollout header of an answer", param="rollout_id")
