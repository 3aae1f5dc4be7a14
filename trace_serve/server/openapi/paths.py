"""Every route as the OpenAPI document describes it."""

from __future__ import annotations

from typing import Any

from trace_serve.server.openapi.errors import errors
from trace_serve.server.openapi.examples import CHAT, CHAT_STREAM, COMPLETION, TOKENIZE
from trace_serve.server.schemas.base import MAX_CHOICES

_POLICY_HEADERS = {
    "x-trace-policy": "name@version of the policy that answered",
    "x-trace-policy-digest": "digest of its directory",
    "x-trace-verdict": "digest of the signed verdict that let it in; only in production mode",
}
_GENERATION_HEADERS = {
    "x-request-id": "the id of this request, minted by the server",
    **_POLICY_HEADERS,
    "x-trace-weight-version": "label of the weights: of a stream's first token, of a whole answer's last one",
    "x-trace-rollout": "where the rollout is, below /v1/rollouts; with trace_hints or return_rollout",
    "x-ratelimit-remaining-requests": "what the key's limit leaves, where it has one; likewise limit, reset and tokens",
}
_PUBLIC: list[dict[str, list[str]]] = [{}]


def paths() -> dict[str, Any]:
    """The `paths` object."""
    return {
        "/v1/chat/completions": {
            "post": _generation(
                "chat", "Answers a conversation", "ChatRequest", "ChatCompletion", "ChatChunk", CHAT, CHAT_STREAM
            )
        },
        "/v1/completions": {
            "post": _generation(
                "complete", "Continues a text", "CompletionRequest", "TextCompletion", "TextChunk", COMPLETION, None
            )
        },
        "/v1/embeddings": {
            "post": {
                "operationId": "embeddings",
                "summary": "Refused: this server samples text",
                "tags": ["generation"],
                "responses": errors(401, 404),
            }
        },
        "/v1/models": {"get": _get("models", "Lists the policies that answer", "ModelList", errors(401, 503))},
        "/v1/models/{model}": {
            "parameters": [_path("model", "a name that a request may give as its model")],
            "get": _get("model", "Describes one policy", "ModelEntry", errors(401, 404, 503)),
        },
        "/v1/rollouts/{rollout_id}": {
            "parameters": [_rollout_id()],
            "get": {
                **_get("rollout", "Tokens of a recent rollout", "Rollout", errors(401, 403, 404, 410)),
                "description": "Kept in memory, for the key that made it; bounded in number, bytes and age.",
            },
        },
        "/v1/rollouts/{rollout_id}/hints": {
            "parameters": [_rollout_id(), _choice()],
            "get": _hints(),
            "delete": {
                "operationId": "delete_hints",
                "summary": "Removes a hint file, and what marks that it was lost",
                "tags": ["rollouts"],
                "responses": {"204": {"description": "Removed."}, **errors(400, 401, 403, 404)},
            },
        },
        "/tokenize": {"post": _tokenize("tokenize")},
        "/v1/tokenize": {"post": _tokenize("tokenize_v1")},
        "/trace/report": {
            "get": _get("report", "What the engine loaded", "Report", errors(401, 403, 503), tag="server")
        },
        "/health": {"get": _ready("health")},
        "/health/ready": {"get": _ready("ready")},
        "/health/live": {
            "get": {**_get("live", "Liveness: the process runs", "Live", {}, tag="server"), "security": _PUBLIC}
        },
        "/metrics": {"get": _metrics()},
    }


def _generation(
    name: str, summary: str, body: str, answer: str, chunk: str, example: dict[str, Any], stream: str | None
) -> dict[str, Any]:
    content: dict[str, Any] = {
        "application/json": {"schema": _ref(answer)},
        "text/event-stream": {"schema": _event(chunk)},
    }
    if stream is not None:
        content["text/event-stream"]["example"] = stream
    return {
        "operationId": name,
        "summary": summary,
        "tags": ["generation"],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(body), "examples": example}},
        },
        "responses": {
            "200": {"description": "The answer, or a stream of it.", "content": content, "headers": _described()},
            **errors(400, 401, 403, 404, 408, 409, 413, 429, 500, 502, 503, 504),
        },
    }


def _event(chunk: str) -> dict[str, Any]:
    """One server-sent event of a stream, as OpenAPI describes events: its fields as an object."""
    content = {"anyOf": [_ref(chunk), _ref("ErrorAnswer")]}
    json_text = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    return {
        "type": "object",
        "description": "one event, with stream: true; the last one is [DONE], or an error where the answer was cut",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, json_text]}},
        "required": ["data"],
    }


def _tokenize(name: str) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": "Tokens of a prompt, as the engine will see them",
        "tags": ["generation"],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref("TokenizeRequest"), "examples": TOKENIZE}},
        },
        "responses": {**_ok("Tokens"), **errors(400, 401, 403, 404, 408, 413, 502, 503, 504)},
    }


def _hints() -> dict[str, Any]:
    acknowledge = {
        "name": "ack",
        "in": "query",
        "description": "1 removes the file once it has been sent whole",
        "schema": {"type": "string", "enum": ["0", "1"]},
    }
    return {
        "operationId": "hints",
        "summary": "The rounding hints of a rollout",
        "description": "A safetensors file (docs/hints.md). Waits up to a second for one that is being written.",
        "tags": ["rollouts"],
        "parameters": [acknowledge],
        "responses": {
            "200": {
                "description": "The hint file.",
                "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
            },
            **errors(400, 401, 403, 404, 410),
        },
    }


def _ready(name: str) -> dict[str, Any]:
    summary = "Readiness: an authorised policy serves, and its engine shows life"
    return {**_get(name, summary, "Ready", errors(503), tag="server"), "security": _PUBLIC}


def _metrics() -> dict[str, Any]:
    return {
        "operationId": "metrics",
        "summary": "Metrics for Prometheus",
        "tags": ["server"],
        "security": [{}, {"key": []}],
        "responses": {
            "200": {"description": "Text.", "content": {"text/plain": {"schema": {"type": "string"}}}},
            **errors(401, 403),
        },
    }


def _get(name: str, summary: str, answer: str, failures: dict[str, Any], *, tag: str | None = None) -> dict[str, Any]:
    tag = tag or ("rollouts" if name == "rollout" else "generation")
    return {"operationId": name, "summary": summary, "tags": [tag], "responses": {**_ok(answer), **failures}}


def _ok(answer: str) -> dict[str, Any]:
    return {"200": {"description": "OK", "content": {"application/json": {"schema": _ref(answer)}}}}


def _ref(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _described() -> dict[str, Any]:
    return {name: {"description": text, "schema": {"type": "string"}} for name, text in _GENERATION_HEADERS.items()}


def _path(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "description": description, "schema": {"type": "string"}}


def _rollout_id() -> dict[str, Any]:
    found = _path("rollout_id", "the x-trace-rollout header of an answer")
    return {**found, "example": "trace-0123456789abcdef0123456789abcdef"}


def _choice() -> dict[str, Any]:
    numbers = [str(index) for index in range(MAX_CHOICES)]
    text = "which of several choices; only, and always, when the request had n > 1"
    return {"name": "choice", "in": "query", "description": text, "schema": {"type": "string", "enum": numbers}}
