"""Finding a rollout's hint file, which the engine writes behind its answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from trace_serve.hints.sinks import marks
from trace_serve.hints.sinks.target import SUFFIX
from trace_serve.server.errors import ApiError, not_found

WAIT_S = 1.0
"""Longest wait for a file that is not there yet; writing one takes milliseconds."""
_POLL_S = 0.05


def choice_name(rollout_id: str, choice: int) -> str:
    """What the engine calls the hints of one of several choices."""
    return f"{rollout_id}_0-{choice}"


async def find(directory: Path, name: str, *, wait_s: float = WAIT_S) -> Path:
    """The hint file of that name, once it is there.

    Args:
        directory: the engine's hint directory.
        name: a rollout id, or `choice_name`.
        wait_s: seconds to wait for it.

    Raises:
        ApiError: 410 where a mark says that the hints were dropped, failed or expired; 404 where there is nothing.
    """
    path = directory / (name + SUFFIX)
    for attempt in range(max(1, round(wait_s / _POLL_S))):
        if attempt:
            await asyncio.sleep(_POLL_S)
        if path.is_file() and not path.is_symlink():
            return path
        for kind in marks.KINDS:
            mark = directory / marks.file_name(name, kind)
            if mark.is_file() and not mark.is_symlink():
                reason = marks.reason_of(mark.read_bytes())
                message = f"the hints of {name} are gone ({kind}): {reason}"
                raise ApiError(410, message, kind="invalid_request_error", code=f"hints_{kind}")
    raise not_found(f"no hints of {name}: not finished, or not asked for with trace_hints")
