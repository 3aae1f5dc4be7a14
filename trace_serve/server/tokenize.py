"""`POST /tokenize`, in the shape that SGLang and vLLM have: the tokens of a prompt as the engine will see them.

The engine answers, so that what it says is what it does. It tokenizes for this route on its own event loop, so
texts that could not be a prompt anyway are refused here.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import aiohttp
import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, StringConstraints

from trace_serve.server.bodies import parse_json, read_body
from trace_serve.server.engines.client import EngineView
from trace_serve.server.errors import bad_request, engine_failed, engine_silent, unavailable
from trace_serve.server.front_end import FrontEnd
from trace_serve.server.model_names import check_model
from trace_serve.server.relay.sse import failure_of
from trace_serve.server.schemas.base import Label, Strict
from trace_serve.server.schemas.messages import MAX_MESSAGES, Message, conversation_fault
from trace_serve.server.schemas.parsing import parse_body
from trace_serve.server.schemas.tools import MAX_TOOLS, Tool

PATHS = ("/tokenize", "/v1/tokenize")
CONCURRENT = 8
"""Requests that the engine tokenizes at once on behalf of this route; more wait their turn."""
MAX_WAITING = 64
"""Requests that may wait for that; they hold their bodies."""
TIMEOUT_S = 60.0
MAX_ANSWER_BYTES = 64 << 20
MAX_BYTES_PER_TOKEN = 16
"""A longer text, for the context there is, is not tokenized."""


class TokenizeRequest(Strict):
    """Body of POST /tokenize: a prompt, or a conversation as /v1/chat/completions would render it."""

    model: Label | None = Field(None, description="name of the policy in service")
    prompt: Annotated[str, StringConstraints(min_length=1)] | None = Field(None, description="text; or messages")
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, min_length=1, max_length=MAX_TOOLS, description="only with messages")
    add_special_tokens: bool | None = Field(None, description="only with prompt; true is the default")


def tokenize_router(front: FrontEnd) -> APIRouter:
    """The route under both names that clients know."""
    router = APIRouter()
    turns = asyncio.Semaphore(CONCURRENT)
    waiting = 0

    async def tokenize(request: Request) -> Response:
        nonlocal waiting
        front.authenticate(request, "generate")
        raw = parse_json(await read_body(request, front.settings.max_body_bytes, front.settings.body_timeout_s))
        wanted = parse_body(TokenizeRequest, raw)
        _check(wanted)
        service = front.choose("", wanted.model)
        check_model(wanted.model, front.services.answering())
        engine = service.engine_in_service()
        _check_length(wanted, engine.limits.context_length)
        payload = wanted.model_dump(exclude_none=True, exclude={"model", "tools"}) | {"model": engine.served_name}
        if wanted.tools is not None:
            payload["tools"] = raw["tools"]
        if waiting >= MAX_WAITING:
            raise unavailable(f"{waiting} prompts wait to be tokenized", code="queue_full", retry_after_s=1.0)
        waiting += 1
        try:
            async with turns:
                answer = await _ask(front, engine, payload)
        finally:
            waiting -= 1
        answer["max_model_len"] = engine.limits.context_length
        return Response(orjson.dumps(answer), media_type="application/json", headers=dict(service.headers()))

    for path in PATHS:
        router.post(path)(tokenize)
    return router


def _check(wanted: TokenizeRequest) -> None:
    if (wanted.prompt is None) == (wanted.messages is None):
        raise bad_request("prompt: expected either prompt or messages", param="prompt")
    if wanted.messages is not None:
        fault = conversation_fault(wanted.messages)
        if fault is not None:
            raise bad_request(fault, param="messages", code="invalid_value")
        if wanted.add_special_tokens is not None:
            raise bad_request("add_special_tokens: only allowed with prompt", param="add_special_tokens")
    elif wanted.tools is not None:
        raise bad_request("tools: only allowed with messages", param="tools")


def _check_length(wanted: TokenizeRequest, context_length: int) -> None:
    texts = [wanted.prompt or ""] if wanted.messages is None else [m.content or "" for m in wanted.messages]
    size, limit = sum(len(text.encode()) for text in texts), MAX_BYTES_PER_TOKEN * context_length
    if size > limit:
        field = "messages" if wanted.prompt is None else "prompt"
        raise bad_request(
            f"{field}: got {size} bytes, expected at most {limit} in a context of {context_length} tokens",
            param=field,
            code="context_length_exceeded",
        )


async def _ask(front: FrontEnd, engine: EngineView, payload: dict[str, Any]) -> dict[str, Any]:
    try:
        async with asyncio.timeout(TIMEOUT_S), await front.client.post(engine, "/tokenize", payload) as upstream:
            body = await upstream.content.read(MAX_ANSWER_BYTES)
            while not upstream.content.at_eof() and len(body) < MAX_ANSWER_BYTES:
                body += await upstream.content.read(MAX_ANSWER_BYTES - len(body))
            status = upstream.status
    except TimeoutError as exc:
        raise engine_silent(TIMEOUT_S) from exc
    except aiohttp.ClientError as exc:
        raise engine_failed("the engine cannot be reached", code="engine_unreachable") from exc
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise engine_failed(f"the engine answered {status} without JSON") from exc
    if status in (400, 422):
        raise bad_request(str(failure_of(answer))[:500], param="messages" if "messages" in payload else "prompt")
    if status != 200 or not isinstance(answer, dict) or not isinstance(answer.get("tokens"), list):
        raise engine_failed(f"the engine answered {status}: {str(failure_of(answer))[:500]}")
    return answer
