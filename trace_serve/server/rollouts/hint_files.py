"""A rollout's hint files, which the engine writes behind its answer: found, described, and removed once read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from trace_serve.hints.sinks import forget, marks
from trace_serve.hints.sinks.target import SUFFIX
from trace_serve.server.errors import ApiError, not_found

WAIT_S = 1.0
"""Longest wait for a file that is not there yet; writing one takes milliseconds."""
_POLL_S = 0.05


def choice_name(rollout_id: str, choice: int) -> str:
    """What the engine calls the hints of one of several choices."""
    return f"{rollout_id}_0-{choice}"


def state(directory: Path, name: str) -> dict[str, Any]:
    """What has become of hints.

    Args:
        directory: the engine's hint directory.
        name: a rollout id, or `choice_name`.

    Returns:
        `status`: `ready` with `bytes`; `dropped`, `failed` or `expired` with `reason`; else `absent`, which is not
        written yet, or removed.
    """
    path = directory / (name + SUFFIX)
    if path.is_file() and not path.is_symlink():
        return {"status": "ready", "bytes": path.stat().st_size}
    for kind in marks.KINDS:
        mark = directory / marks.file_name(name, kind)
        if mark.is_file() and not mark.is_symlink():
            return {"status": kind, "reason": marks.reason_of(mark.read_bytes())}
    return {"status": "absent"}


async def find(directory: Path, name: str, *, wait_s: float = WAIT_S) -> Path:
    """The hint file of that name, once it is there.

    Args:
        directory: the engine's hint directory.
        name: a rollout id, or `choice_name`.
        wait_s: seconds to wait for it.

    Raises:
        ApiError: 410 where a mark says that the hints were dropped, failed or expired; 404 where there is nothing.
    """
    for attempt in range(max(1, round(wait_s / _POLL_S))):
        if attempt:
            await asyncio.sleep(_POLL_S)
        found = await asyncio.to_thread(state, directory, name)
        if found["status"] == "ready":
            return directory / (name + SUFFIX)
        if found["status"] != "absent":
            message = f"the hints of {name} are gone ({found['status']}): {found['reason']}"
            raise ApiError(410, message, kind="invalid_request_error", code=f"hints_{found['status']}")
    raise not_found(
        f"no hints of {name}: not finished, not asked for with trace_hints, or removed", code="hints_not_found"
    )


async def remove(directory: Path, name: str) -> bool:
    """Removes hints and marks of that name, which their reader needs no more; False when there were none."""
    return await asyncio.to_thread(forget, directory, name)


class ReadOnce(FileResponse):
    """Sends a hint file and removes it when the last byte has been handed to the connection.

    A client that leaves before, or asks for a part of it, leaves the file where it is.
    """

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__(directory / (name + SUFFIX), media_type="application/octet-stream", filename=name + SUFFIX)
        self._directory = directory
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, ended = 0, False

        async def watched(message: Any) -> None:
            nonlocal status, ended
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                ended = not message.get("more_body", False)

        await super().__call__(scope, receive, watched)
        if scope["method"] == "GET" and status == 200 and ended:
            await remove(self._directory, self._name)
