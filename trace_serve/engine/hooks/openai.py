"""What OpenAI-shaped answers say of hints: `metadata.trace_hints`, a list with one entry a choice.

SGLang's answer takes its metadata from the first choice alone, and its streams carry none: there it comes with a chunk
of its own before `[DONE]`.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from trace_serve.engine.hooks.base import Hook
from trace_serve.hints.options import FIELD

_DONE = "data: [DONE]"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_COMPLETIONS = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"


class _Tap:
    """SGLang's tokenizer manager, remembering what its answers say of hints.

    Args:
        manager: the tokenizer manager.
        seen: gets one entry a choice index.
    """

    def __init__(self, manager: Any, seen: dict[int, Any]) -> None:
        self._manager = manager
        self._seen = seen
        self.id = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[dict[str, Any]]:
        async for content in self._manager.generate_request(obj, request):
            self.id = content["meta_info"]["id"]
            if found := content["meta_info"].get(FIELD):
                self._seen[content.get("index", 0)] = found
            yield content


def _stream(object_name: str) -> Callable[..., AsyncIterator[str]]:
    async def stream(
        original: Callable[..., AsyncIterator[str]], self: Any, adapted_request: Any, request: Any, raw_request: Any
    ) -> AsyncIterator[str]:
        seen: dict[int, Any] = {}
        tapped = copy.copy(self)
        tapped.tokenizer_manager = tap = _Tap(self.tokenizer_manager, seen)
        async for event in original(tapped, adapted_request, request, raw_request):
            if seen and event.startswith(_DONE):
                chunk = {
                    "id": tap.id,
                    "object": object_name,
                    "created": int(time.time()),
                    "model": request.model,
                    "choices": [],
                    "metadata": {FIELD: [seen.get(i) for i in range(max(seen) + 1)]},
                }
                yield f"data: {json.dumps(chunk)}\n\n"
            yield event

    return stream


def _build(original: Callable[..., Any], self: Any, request: Any, ret: list[dict[str, Any]], created: int) -> Any:
    found = [choice["meta_info"].get(FIELD) for choice in ret]
    if any(found):
        first = {**ret[0], "meta_info": {**ret[0]["meta_info"], FIELD: found}}
        ret = [first, *ret[1:]]
    return original(self, request, ret, created)


def _metadata(result: dict[str, Any], meta_info: dict[str, Any]) -> dict[str, Any]:
    found = meta_info.get(FIELD)
    return {**result, FIELD: found} if found else result


_ARGUMENTS = ("self", "adapted_request", "request", "raw_request")
_WHY = "OpenAI routes say nothing of hints"

HOOKS: tuple[Hook, ...] = (
    Hook(
        "chat-stream",
        f"{_CHAT}._generate_chat_stream",
        HookType.AROUND,
        _stream("chat.completion.chunk"),
        _WHY,
        _ARGUMENTS,
    ),
    Hook(
        "completion-stream",
        f"{_COMPLETIONS}._generate_completion_stream",
        HookType.AROUND,
        _stream("text_completion"),
        _WHY,
        _ARGUMENTS,
    ),
    Hook(
        "chat-response",
        f"{_CHAT}._build_chat_response",
        HookType.AROUND,
        _build,
        _WHY,
        ("self", "request", "ret", "created"),
    ),
    Hook(
        "completion-response",
        f"{_COMPLETIONS}._build_completion_response",
        HookType.AROUND,
        _build,
        _WHY,
        ("self", "request", "ret", "created"),
    ),
    Hook(
        "openai-metadata",
        "sglang.srt.utils.weight_versions.build_endpoint_weight_version_metadata",
        HookType.AFTER,
        _metadata,
        _WHY,
        ("meta_info",),
    ),
)
