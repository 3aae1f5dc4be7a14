"""The HTTP process's side of weight updates: requests wait while a session is open, and are refused in quarantine.

A request that SGLang has let in holds a lock that weight updates wait for. So it has to wait before it takes it, or a
session and a request wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException

from trace_serve.engine import state
from trace_serve.engine.refit import status
from trace_serve.engine.refit.staleness import CARRIER, META_KEY
from trace_serve.engine.refit.versions import LIMIT_FIELD, check_limit

_POLL_S = 0.05
_HELD = "_trace_refit_held"
_WATCHER = "_trace_refit_watcher"


class Quarantined(HTTPException, ValueError):
    """HTTP 503; a ValueError too, which is what SGLang turns into the error event of a stream that has begun."""


def refuse() -> None:
    """Raises:
    Quarantined: the engine does not generate.
    """
    if (reason := quarantine()) is not None:
        raise Quarantined(status_code=HTTPStatus.SERVICE_UNAVAILABLE, detail=reason)


def quarantine() -> str | None:
    """Why the engine refuses to generate; None while it serves."""
    engine = state.get()
    if not engine.telemetry.get("quarantined"):
        return None
    return f"engine is quarantined: {status.read(engine.spec.run_dir).quarantined}; send a full weight update"


def validate(obj: Any) -> None:
    """Refuses a request before it is sent to the scheduler.

    Raises:
        Quarantined: the engine does not generate.
        ValueError: a bad `max_version_diff`; SGLang turns it into a 400.
    """
    refuse()
    params = getattr(obj, "sampling_params", None)
    custom = params.get("custom_params") if isinstance(params, dict) else None
    if isinstance(custom, dict) and custom.get(LIMIT_FIELD) is not None:
        check_limit(custom[LIMIT_FIELD])


async def begin(original: Callable[..., Awaitable[tuple[bool, str]]], manager: Any, *args: Any) -> tuple[bool, str]:
    """Opens the session, then holds requests back until it is closed, by whichever side."""
    success, message = await original(manager, *args)
    if success:
        async with manager.is_pause_cond:
            if not manager.is_pause:
                manager.is_pause = True
                setattr(manager, _HELD, True)
        setattr(manager, _WATCHER, asyncio.create_task(_release_when_closed(manager)))
    return success, message


async def end(original: Callable[..., Awaitable[tuple[bool, str]]], manager: Any, *args: Any) -> tuple[bool, str]:
    """Closes the session, lets requests in again, and takes over the label of the weights that serve."""
    try:
        success, message = await original(manager, *args)
    finally:
        await _release(manager)
    if success:
        manager._update_weight_version_if_provided(status.read(state.get().spec.run_dir).label)
    return success, message


async def resume(original: Callable[..., Awaitable[None]], manager: Any, obj: Any) -> None:
    """A trainer's continue inside a session takes effect when the session ends."""
    if not _session_open():
        await original(manager, obj)
        return
    async with manager.is_pause_cond:
        setattr(manager, _HELD, True)
        await manager._async_dispatch_to_scheduler(obj)


def paused(manager: Any) -> None:
    """A trainer's own pause outlives the session."""
    setattr(manager, _HELD, False)


def takes_label(label: str | None) -> bool:
    """Whether the process may take over a label: not inside a session, whose weights do not serve yet."""
    return label is not None and not _session_open()


def _session_open() -> bool:
    return bool(state.get().telemetry.get("refit_session"))


async def _release_when_closed(manager: Any) -> None:
    while _session_open():
        await asyncio.sleep(_POLL_S)
    await _release(manager)


async def _release(manager: Any) -> None:
    async with manager.is_pause_cond:
        if getattr(manager, _HELD, False) and not _session_open():
            setattr(manager, _HELD, False)
            manager.is_pause = False
            manager.is_pause_cond.notify_all()


def add_spans(meta_info: dict[str, Any], output: int) -> None:
    """`weight_version_spans` of a request that weights did not change under; others bring their own."""
    rows = meta_info.get("prompt_tokens", 0) + max(output - 1, 0)
    label = meta_info["weight_version"]
    meta_info[META_KEY] = {
        "rows": [[0, rows, label]] if rows else [],
        "sampled": [[0, output, label]] if output else [],
        "version_diff": 0,
        "stale_tokens": 0,
    }


def take_spans(meta_info: dict[str, Any], customized_info: dict[str, Any], index: int) -> dict[str, Any]:
    """Puts what the scheduler said about a request's versions into its answer; returns what is left."""
    found = customized_info.get(CARRIER)
    if found and found[index]:
        meta_info[META_KEY] = found[index][0]
    return {key: value for key, value in customized_info.items() if key != CARRIER}
