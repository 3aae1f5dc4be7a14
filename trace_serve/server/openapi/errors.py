"""The errors of the routes as the OpenAPI document describes them."""

from __future__ import annotations

from typing import Any

_RETRY = {"retry-after": {"description": "seconds until a retry makes sense", "schema": {"type": "integer"}}}


def _response(description: str, example: dict[str, Any], headers: dict[str, Any] | None = None) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/ErrorAnswer"}
    found: dict[str, Any] = {
        "description": description,
        "content": {"application/json": {"schema": schema, "example": {"error": example}}},
    }
    return found if headers is None else {**found, "headers": headers}


def _example(message: str, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": param, "code": code}


_BAD = "invalid_request_error"
RESPONSES: dict[str, Any] = {
    "400": _response(
        "A field is missing, unknown or out of its range; `param` names it.",
        _example("n: got 0, input should be greater than or equal to 1", _BAD, "invalid_value", "n"),
    ),
    "401": _response(
        "No key, or one that does not count.",
        _example(
            "missing or wrong API key; send 'Authorization: Bearer <key>'", "authentication_error", "invalid_api_key"
        ),
        {"www-authenticate": {"description": "how to send a key", "schema": {"type": "string"}}},
    ),
    "403": _response(
        "The key lacks the scope.",
        _example("the API key 'ci' lacks the scope 'hints' that this needs", "permission_error", "missing_scope"),
    ),
    "404": _response(
        "There is no such thing, or not for this key.",
        _example("model: got 'gpt', expected 'mine', the policy in service", _BAD, "model_not_found", "model"),
    ),
    "408": _response(
        "The request's body did not arrive in time.",
        _example("the request body did not arrive in 30 s", _BAD, "body_timeout"),
    ),
    "409": _response(
        "Other weights are loaded than the request asks for.",
        _example(
            "weight_version: got 'step-11', but weights 'step-12' are loaded; ask for those, or leave it out",
            _BAD,
            "weight_version_not_loaded",
            "weight_version",
        ),
    ),
    "410": _response(
        "It was there and is gone; the message says why.",
        _example("the rollout trace-... is gone: records are kept for 3600 s", _BAD, "rollout_expired", "rollout_id"),
    ),
    "413": _response(
        "The body is too large.",
        _example("request body is larger than 4194304 bytes; send a shorter prompt", _BAD, "body_too_large"),
    ),
    "429": _response(
        "The key's limits are used up.",
        _example("this key already has 8 requests running or waiting", "rate_limit_error", "rate_limit_exceeded"),
        _RETRY,
    ),
    "500": _response(
        "A fault of the server.",
        _example("internal error of the server; see its log", "server_error", "internal_error"),
    ),
    "502": _response(
        "The engine failed, or sent what cannot be relayed.",
        _example("the engine broke off its answer", "engine_error", "answer_cut"),
    ),
    "503": _response(
        "Nothing serves at the moment, or the queue is full.",
        _example("not ready: the engine is starting", "service_unavailable_error", "not_ready"),
        _RETRY,
    ),
    "504": _response(
        "The engine was silent for too long.",
        _example("the engine sent nothing for 600 s; the request was cut", "engine_error", "engine_silent"),
    ),
}


def errors(*statuses: int) -> dict[str, Any]:
    """References to the errors with these statuses, by status."""
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}
