"""Requests for hints: checked on arrival, collected when the request finishes, attached to its answer."""

from __future__ import annotations

import re
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from trace_serve.engine import collect, state
from trace_serve.engine.hooks.base import Hook

_FILE_SAFE = re.compile(r"[A-Za-z0-9_-]{1,128}")
HINT_MODES = ("inline", "file")
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"


def _collect(result: object, self: Any, req: Any) -> None:
    collect.collect(self, req)


def _validate(self: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    """Refuses a bad hint request before the scheduler sees it; SGLang turns a ValueError into a 400."""
    params = getattr(obj, "sampling_params", None)
    custom = params.get("custom_params") if isinstance(params, dict) else None
    wanted = custom.get("trace_hints") if isinstance(custom, dict) else None
    if wanted is None:
        return
    engine_spec = state.get().spec
    if wanted not in HINT_MODES:
        raise ValueError(f"custom_params.trace_hints: got {wanted!r}, expected one of {', '.join(HINT_MODES)}")
    if not engine_spec.recipe.has_hints:
        raise ValueError(
            "custom_params.trace_hints: there are no hints to export, since this recipe rounds neither activations "
            "(experts w4a4) nor the KV cache (kv nvfp4)"
        )
    if wanted == "file" and engine_spec.hint_dir is None:
        raise ValueError("custom_params.trace_hints: 'file' needs an engine that was started with a hint directory")
    if wanted == "file" and not _FILE_SAFE.fullmatch(str(obj.rid)):
        raise ValueError("rid: a request for a hint file needs an id of 1 to 128 letters, digits, '-' or '_'")


def _meta_info(result: object, self: Any, meta_info: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    collect.condense(meta_info)


def _openai_metadata(result: dict[str, Any], meta_info: dict[str, Any]) -> dict[str, Any]:
    hints = meta_info.get(collect.META_KEY)
    return {**result, collect.META_KEY: hints} if hints else result


HOOKS: tuple[Hook, ...] = (
    Hook(
        "collect",
        f"{_RESULTS}._maybe_collect_routed_experts",
        HookType.AFTER,
        _collect,
        "no hints are returned",
        ("self", "req"),
    ),
    Hook(
        "validate",
        f"{_TOKENIZER}._validate_one_request",
        HookType.BEFORE,
        _validate,
        "bad requests reach the engine",
        ("self", "obj", "input_ids"),
    ),
    Hook("meta-info", f"{_TOKENIZER}.update_request_meta_info", HookType.AFTER, _meta_info, "no inline hints"),
    Hook(
        "openai-metadata",
        "sglang.srt.utils.weight_versions.build_endpoint_weight_version_metadata",
        HookType.AFTER,
        _openai_metadata,
        "no inline hints on OpenAI routes",
        ("meta_info",),
    ),
)
