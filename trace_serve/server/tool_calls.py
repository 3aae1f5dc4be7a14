"""Refuses tools where no call could come of them."""

from __future__ import annotations

from trace_serve.server.errors import bad_request
from trace_serve.server.schemas.parsing import ChatRequest, GenerationRequest
from trace_serve.server.service import Service
from trace_serve.settings import Settings


async def check_tools(wanted: GenerationRequest, service: Service, settings: Settings) -> None:
    """Checks that the engine can read a tool call, and that the model is shown the tools.

    Without a parser SGLang 0.5.23 returns a call as text, with a finish reason that says nothing of it; a chat template
    that leaves tools out makes `auto` a promise that no model can keep.

    Raises:
        ApiError: 400.
    """
    if not isinstance(wanted, ChatRequest) or not wanted.calls_tools:
        return
    if settings.tool_call_parser is None:
        raise bad_request(
            "tools: this server reads no tool calls; start it with TRACE_SERVE_TOOL_CALL_PARSER, or send tool_choice: "
            "none",
            param="tools",
            code="tools_unsupported",
        )
    if wanted.tool_choice in (None, "auto") and await service.counter.shows_tools() is False:
        raise bad_request(
            "tools: this policy's chat template does not show tools to the model; ask for a call with tool_choice: "
            "required or a named tool",
            param="tools",
            code="tools_unsupported",
        )
