"""What OpenAI-shaped answers say of hints (`metadata.trace_hints`) and of tokens (`metadata.trace_rollout`).

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

from trace_serve.engine import rollout_records
from trace_serve.engine.hooks.base import Hook
from trace_serve.hints.options import FIELD

_DONE = "data: [DONE]"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_COMPLETIONS = "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion"


class _Tap:
    """SGLang's tokenizer manager, remembering what its answers say of hints and, where wanted, of tokens.

    Args:
        manager: the tokenizer manager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._hints: dict[int, Any] = {}
        self._last: dict[int, dict[str, Any]] = {}
        self.id = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[dict[str, Any]]:
        recorded = rollout_records.is_wanted(obj)
        async for content in self._manager.generate_request(obj, request):
            self.id = content["meta_info"]["id"]
            if found := content["meta_info"].get(FIELD):
                self._hints[content.get("index", 0)] = found
            if recorded:
                self._last[content.get("index", 0)] = content
            yield content

    def metadata(self) -> dict[str, Any]:
        """What the answer says beside its tokens; empty when nothing was asked for."""
        found: dict[str, Any] = {}
        if self._hints:
            found[FIELD] = [self._hints.get(i) for i in range(max(self._hints) + 1)]
        if self._last:
            found["weight_version"] = rollout_records.version_of(self._last[min(self._last)]["meta_info"])
            found[rollout_records.FIELD] = [rollout_records.record(self._last[i]) for i in sorted(self._last)]
        return found


def _stream(object_name: str) -> Callable[..., AsyncIterator[str]]:
    async def stream(
        original: Callable[..., AsyncIterator[str]], self: Any, adapted_request: Any, request: Any, raw_request: Any
    ) -> AsyncIterator[str]:
        tapped = copy.copy(self)
        tapped.tokenizer_manager = tap = _Tap(self.tokenizer_manager)
        async for event in original(tapped, adapted_request, request, raw_request):
            if event.startswith(_DONE) and (metadata := tap.metadata()):
                chunk = {
                    "id": tap.id,
                    "object": object_name,
                    "created": int(time.time()),
                    "model": request.model,
                    "choices": [],
                    "metadata": metadata,
                }
                yield f"data: {json.dumps(chunk)}\n\n"
            yield event

    return stream


def _build(original: Callable[..., Any], self: Any, request: Any, ret: list[dict[str, Any]], created: int) -> Any:
    extra: dict[str, Any] = {}
    found = [choice["meta_info"].get(FIELD) for choice in ret]
    if any(found):
        extra[FIELD] = found
    if (request.custom_params or {}).get(rollout_records.FIELD) is True:
        extra[rollout_records.FIELD] = [rollout_records.record(choice) for choice in ret]
    if extra:
        ret = [{**ret[0], "meta_info": {**ret[0]["meta_info"], **extra}}, *ret[1:]]
    return original(self, request, ret, created)


def _metadata(result: dict[str, Any], meta_info: dict[str, Any]) -> dict[str, Any]:
    extra = {name: meta_info[name] for name in (FIELD, rollout_records.FIELD) if meta_info.get(name)}
    return {**result, **extra}


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
