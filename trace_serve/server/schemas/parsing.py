"""What a client may send: every field, its type and its range. Anything else is refused by name.

Types are strict: "4" is not a number and 1 is not a boolean. A null means the default. Ranges that depend on the policy
(vocabulary, context length) are checked by `limits.check_limits`. The models are in the other `schemas_` modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError

from trace_serve.server.errors import bad_request
from trace_serve.server.schemas.base import MAX_CHOICES, Strict
from trace_serve.server.schemas.errors import named, shown
from trace_serve.server.schemas.messages import conversation_fault
from trace_serve.server.schemas.requests import ChatRequest, CompletionRequest, GenerationRequest

__all__ = ["MAX_CHOICES", "ChatRequest", "CompletionRequest", "GenerationRequest", "parse_body", "parse_request"]

ModelT = TypeVar("ModelT", bound=Strict)
RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse_body(model: type[ModelT], raw: object) -> ModelT:
    """Validates a parsed JSON body, field by field.

    Raises:
        ApiError: 400 that names the field, what was got and what was expected.
    """
    if not isinstance(raw, Mapping):
        raise bad_request(f"body: got {shown(raw)}, expected a JSON object")
    try:
        return model.model_validate(raw)
    except ValidationError as exc:
        raise named(exc.errors(include_url=False, include_context=False)[0]) from None


def parse_request(model: type[RequestT], raw: object) -> RequestT:
    """`parse_body` for a request that samples, with the checks of fields against each other.

    Raises:
        ApiError: 400 that names the field.
    """
    request = parse_body(model, raw)
    if isinstance(raw, Mapping):
        request.keep_as_sent(raw)
    _check_lengths(request)
    if isinstance(request, ChatRequest):
        _check_chat(request)
        _check_tools(request)
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise bad_request("echo: not possible together with logprobs; send one of the two", param="echo")
    return request


def _check_lengths(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options: only allowed with stream: true", param="stream_options")
    if request.top_k == 0:
        raise bad_request("top_k: got 0, expected -1 (off) or 1 and more", param="top_k")
    limit = request.completion_limit
    if request.min_tokens is not None and limit is not None and request.min_tokens > limit:
        raise bad_request(
            f"min_tokens: got {request.min_tokens}, expected at most max_tokens ({limit})", param="min_tokens"
        )


def _check_chat(request: ChatRequest) -> None:
    both = request.max_tokens is not None and request.max_completion_tokens is not None
    if both and request.max_tokens != request.max_completion_tokens:
        raise bad_request(
            "max_completion_tokens: differs from max_tokens; send one of the two", param="max_completion_tokens"
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs: only allowed with logprobs: true", param="top_logprobs")
    if request.stream:
        for field in ("return_token_ids", "return_prompt_token_ids", "return_meta_info"):
            if getattr(request, field):
                raise bad_request(
                    f"{field}: not possible with stream: true; use return_rollout, which streams too", param=field
                )
    fault = conversation_fault(request.messages)
    if fault is not None:
        raise bad_request(fault, param="messages", code="invalid_value")


def _check_tools(request: ChatRequest) -> None:
    if request.tools is None:
        if request.tool_choice not in (None, "none"):
            raise bad_request("tool_choice: only allowed with tools", param="tool_choice")
        if request.parallel_tool_calls is not None:
            raise bad_request("parallel_tool_calls: only allowed with tools", param="parallel_tool_calls")
        return
    names = [tool.function.name for tool in request.tools]
    repeated = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if repeated is not None:
        raise bad_request(f"tools: two tools are called {repeated!r}, expected distinct names", param="tools")
    if request.tool_choice is not None and not isinstance(request.tool_choice, str):
        chosen = request.tool_choice.function.name
        if chosen not in names:
            raise bad_request(
                f"tool_choice.function.name: got {chosen!r}, expected the name of one of the tools", param="tool_choice"
            )
    if request.calls_tools and request.response_format is not None and request.response_format.type != "text":
        raise bad_request(
            "response_format: not possible together with tools; leave one out or send tool_choice: none",
            param="response_format",
        )
