"""Errors as an OpenAI client expects them, as a JSON answer or as the last event of a stream."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.responses import Response


class ApiError(Exception):
    """A refusal or failure that the client is told about.

    Args:
        status: HTTP status when no header has been sent yet.
        message: one line: what was got, what was expected, what to change.
        kind: OpenAI's error type, for example `invalid_request_error`.
        param: the request field at fault.
        code: a stable word for programs.
        retry_after_s: seconds until a retry makes sense; sent as a whole number in Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}

    def response(self, headers: dict[str, str] | None = None) -> Response:
        return Response(
            orjson.dumps(self.body()),
            status_code=self.status,
            headers={**(headers or {}), **self.headers()},
            media_type="application/json",
        )

    def event(self) -> bytes:
        """The error as the last server-sent event of a stream; no `[DONE]` follows it."""
        return b"data: " + orjson.dumps(self.body()) + b"\n\n"


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, kind="invalid_request_error", param=param, code=code)


def unauthorized() -> ApiError:
    return ApiError(
        401,
        "missing or wrong API key; send 'Authorization: Bearer <key>'",
        kind="authentication_error",
        code="invalid_api_key",
    )


def not_found(message: str, *, param: str | None = None, code: str = "not_found") -> ApiError:
    return ApiError(404, message, kind="invalid_request_error", param=param, code=code)


def too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"request body is larger than {limit} bytes; send a shorter prompt",
        kind="invalid_request_error",
        code="body_too_large",
    )


def rate_limited(message: str, retry_after_s: float) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=retry_after_s)


def unavailable(message: str, *, code: str, retry_after_s: float) -> ApiError:
    return ApiError(503, message, kind="service_unavailable_error", code=code, retry_after_s=retry_after_s)


def engine_failed(message: str, *, code: str = "engine_failed") -> ApiError:
    return ApiError(502, message, kind="engine_error", code=code)


def engine_silent(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"the engine sent nothing for {seconds:g} s; the request was cut",
        kind="engine_error",
        code="engine_silent",
    )
