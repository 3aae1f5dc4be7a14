"""Reads a request's body within its bounds and parses it as strict JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import Request

from trace_serve.server.errors import ApiError, bad_request, too_large
from trace_serve.server.schemas.nesting import check_depth


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The whole body.

    Args:
        request: whose body has not been read.
        limit: bytes.
        timeout_s: from now until the last byte.

    Raises:
        ApiError: 413 or 408.
    """
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large(limit)
    except TimeoutError:
        raise ApiError(
            408,
            f"the request body did not arrive in {timeout_s:g} s",
            kind="invalid_request_error",
            code="body_timeout",
        ) from None
    return bytes(body)


def parse_json(body: bytes) -> Any:
    """Parses strict JSON in UTF-8: no NaN, no unpaired surrogates, bounded nesting.

    Raises:
        ApiError: 400.
    """
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise bad_request(f"body: not strict JSON in UTF-8: {exc}", code="invalid_json") from None
    check_depth(body, parsed)
    return parsed
