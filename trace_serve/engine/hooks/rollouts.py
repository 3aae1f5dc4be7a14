"""OpenAI routes that can record rollouts: tokens are kept as numbers, and a stream says which weights began it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from sglang.srt.plugins.hook_registry import HookType

from trace_serve.engine import rollout_records, state
from trace_serve.engine.hooks.base import Hook
from trace_serve.engine.refit import status

_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_COMPLETIONS = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"


def _convert(result: tuple[Any, Any], self: Any, request: Any, raw_request: Any = None) -> tuple[Any, Any]:
    rollout_records.ask(result[0])
    return result


async def _stream(
    original: Callable[..., Awaitable[Any]], self: Any, adapted_request: Any, request: Any, raw_request: Any
) -> Any:
    """SGLang makes the response once the first token is there, so its headers can tell what computed it."""
    response = await original(self, adapted_request, request, raw_request)
    if response.status_code == 200:
        # A trainer's label may be any text, and a header is ASCII.
        label = status.read(state.get().spec.run_dir).label
        response.headers[rollout_records.VERSION_HEADER] = quote(label)
    return response


HOOKS: tuple[Hook, ...] = tuple(
    Hook(f"{name}-{seam}", f"{target}.{method}", type_, function, why, parameters)
    for name, target in (("chat", _CHAT), ("completion", _COMPLETIONS))
    for seam, method, type_, function, why, parameters in (
        (
            "convert",
            "_convert_to_internal_request",
            HookType.AFTER,
            _convert,
            "OpenAI routes cannot record rollouts",
            ("self", "request", "raw_request"),
        ),
        (
            "stream-version",
            "_handle_streaming_request",
            HookType.AROUND,
            _stream,
            "streams do not say which weights answer",
            ("self", "adapted_request", "request", "raw_request"),
        ),
    )
)
