"""One line of the request log: what was asked and answered, redacted, in the format that `eval-gate convert` reads.

`eval_gate.importers.request_log` defines the format (`schema_version` 1) and ignores the keys that are ours alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from trace_serve.server.relay.sse import DONE, frame_data

SCHEMA_VERSION = 1
MAX_LINE_BYTES = 1 << 20
"""`eval_gate.queries.MAX_RECORD_BYTES`: one longer line would make a whole file unreadable to the gate."""

_DROPPED_WHEN_REDACTED = ("user", "rid", "metadata")
_KEPT_OF_MESSAGES = ("role", "content", "reasoning_content", "tool_calls")


class RecordError(Exception):
    """A record cannot be written; the reason holds nothing of the texts."""


class TooLargeError(RecordError):
    """The line would be longer than a reader takes."""


@dataclass(frozen=True)
class Exchange:
    """A request and what became of it.

    Attributes:
        id: the minted request id.
        route: path of the route.
        status: HTTP status that was sent, 499 when the client had gone.
        outcome: `ok`, `client_gone` or an error code.
        conversation: see `conversation_of`.
        at: Unix time of the end.
        policy, digest: what answered, as `name@version` and digest; None when it got no further.
        request: the body as it came; it has been validated.
        response: the engine's answer, whole or as the bytes of its stream; None when there is none.
        streamed: whether `response` is a stream.
    """

    id: str
    route: str
    status: int
    outcome: str
    conversation: str | None
    at: float
    policy: str | None
    digest: str | None
    request: bytes
    response: bytes | None
    streamed: bool

    @property
    def size(self) -> int:
        """Bytes that it holds on to, about."""
        return len(self.request) + len(self.response or b"") + 512


def conversation_of(given: str | None) -> str | None:
    """A name for all requests of one conversation or user, that tells nothing about either; None without one.

    Args:
        given: header `x-trace-conversation`, or else the request's `user`.
    """
    return None if not given else "c-" + hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:24]


def encode(exchange: Exchange, redactor: str | None, apply: Callable[[str], str] | None) -> bytes:
    """The line with its line break.

    Args:
        redactor: name and version of `apply`, as the gate records it.
        apply: text to redacted text; None writes texts as they are.

    Raises:
        TooLargeError: longer than MAX_LINE_BYTES.
        RecordError: redaction failed, or a part is not what was expected.
    """
    try:
        request = orjson.loads(exchange.request)
        response = _response(exchange)
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as exc:
        raise RecordError(f"the exchange cannot be read: {type(exc).__name__}") from None
    if apply is not None:
        request = _redact_request(request, apply)
        response = _redact(response, apply, keep=("role", "finish_reason"))
    line = {
        "schema_version": SCHEMA_VERSION,
        "id": exchange.id,
        "time": datetime.fromtimestamp(exchange.at, UTC).isoformat(timespec="milliseconds"),
        "route": exchange.route,
        "status": exchange.status,
        "outcome": exchange.outcome,
        "conversation": exchange.conversation,
        "policy": exchange.policy,
        "policy_digest": exchange.digest,
        "redactor": redactor,
        "request": request,
        "response": response,
    }
    try:
        encoded = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError as exc:
        raise RecordError(f"the record is not JSON: {type(exc).__name__}") from None
    if len(encoded) > MAX_LINE_BYTES:
        raise TooLargeError(f"{len(encoded)} bytes, expected at most {MAX_LINE_BYTES}")
    return encoded


def _response(exchange: Exchange) -> dict[str, Any] | None:
    if exchange.response is None or exchange.outcome != "ok":
        return None
    if exchange.streamed:
        return assemble(exchange.response)
    answer = orjson.loads(exchange.response)
    return {"choices": [_choice(each) for each in answer["choices"]], "usage": answer.get("usage")}


def _choice(raw: dict[str, Any]) -> dict[str, Any]:
    """Text and finish reason of a choice; log-probabilities repeat the text token by token, so they are left out."""
    kept: dict[str, Any] = {"index": raw.get("index", 0), "finish_reason": raw.get("finish_reason")}
    if "message" in raw:
        message = raw["message"]
        kept["message"] = {name: message[name] for name in _KEPT_OF_MESSAGES if message.get(name) is not None}
    else:
        kept["text"] = raw.get("text")
    return kept


def assemble(stream: bytes) -> dict[str, Any]:
    """The answer that a stream of server-sent events adds up to, as if it had come whole.

    Raises:
        ValueError, KeyError, TypeError: the stream is not chunks of an OpenAI route. Tool calls are such a stream's
            one part that is not put together; a choice that has some keeps `tool_calls` as the list of fragments.
    """
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for frame in stream.replace(b"\r\n", b"\n").split(b"\n\n"):
        data = frame_data(frame)
        if data is None or data == DONE:
            continue
        chunk = orjson.loads(data)
        usage = chunk.get("usage") or usage
        for part in chunk.get("choices") or ():
            _extend(choices.setdefault(part.get("index", 0), {"index": part.get("index", 0)}), part)
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def _extend(choice: dict[str, Any], part: dict[str, Any]) -> None:
    if part.get("finish_reason") is not None:
        choice["finish_reason"] = part["finish_reason"]
    if "delta" not in part:
        choice["text"] = choice.get("text", "") + (part.get("text") or "")
        return
    message = choice.setdefault("message", {"role": "assistant", "content": ""})
    for name in ("content", "reasoning_content"):
        piece = part["delta"].get(name)
        if piece:
            message[name] = message.get(name, "") + piece
    if part["delta"].get("tool_calls"):
        message.setdefault("tool_calls", []).extend(part["delta"]["tool_calls"])


def _redact_request(request: dict[str, Any], apply: Callable[[str], str]) -> dict[str, Any]:
    """Every text of a request redacted, but the model's name and roles; labels and token ids are left out."""
    redacted: dict[str, Any] = {}
    for name, value in request.items():
        if name in _DROPPED_WHEN_REDACTED:
            continue
        if name == "model":
            redacted[name] = value
        elif name == "prompt" and not isinstance(value, str):
            redacted[name] = None  # token ids are a text that the function cannot read
        else:
            redacted[name] = _redact(value, apply, keep=("role",) if name == "messages" else ())
    return redacted


def _redact(value: Any, apply: Callable[[str], str], *, keep: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        try:
            text = apply(value)
        except Exception as exc:
            raise RecordError(f"the redactor raised {type(exc).__name__}") from None
        if not isinstance(text, str):
            raise RecordError(f"the redactor returned {type(text).__name__}, expected a text")
        return text
    if isinstance(value, list):
        return [_redact(each, apply, keep=keep) for each in value]
    if isinstance(value, dict):
        return {name: each if name in keep else _redact(each, apply, keep=keep) for name, each in value.items()}
    return value
