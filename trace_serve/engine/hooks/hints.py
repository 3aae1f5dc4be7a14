"""Requests for hints: checked on arrival, collected while their slots are theirs, attached to their answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from trace_serve.engine import admission, collect
from trace_serve.engine.hooks.base import Hook
from trace_serve.hints.options import FIELD

_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"


def _admit(self: Any, obj: Any, input_ids: Any) -> None:
    admission.admit(obj, None if input_ids is None else len(input_ids))


def _send(self: Any, tokenized_obj: Any) -> None:
    admission.send(tokenized_obj)


def _send_batch(self: Any, tokenized_objs: Any) -> None:
    for tokenized in tokenized_objs:
        admission.send(tokenized)


def _collect(result: object, self: Any, req: Any) -> None:
    collect.collect(self, req)


def _retract(*, req: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any, **kwargs: Any) -> None:
    collect.keep_before_retraction(req, req_to_token_pool, token_to_kv_pool_allocator.get_kvcache())


def _streamer_class(result: type, self: Any) -> type:
    """SGLang's streamer, with what our answers say of hints beside the tokens."""

    def additional(streamer: Any, reqs: list[Any]) -> dict[str, list[Any]]:
        answers = [collect.answer(req) for req in reqs]
        return {FIELD: [[a] if a else [] for a in answers]} if any(answers) else {}

    body = {"has_additional_customized_info": True, "build_additional_customized_info": additional, "__slots__": ()}
    return type("TraceOutputStreamer", (result,), body)


def _meta_info(
    original: Callable[..., None],
    self: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, Any],
    index: int,
    finish_reason: Any,
) -> None:
    # Taken out before SGLang accumulates it, which would repeat an empty list in every later chunk of a stream.
    ours = customized_info.get(FIELD)
    rest = {key: value for key, value in customized_info.items() if key != FIELD}
    original(self, meta_info, state, rest, index, finish_reason)
    if ours and ours[index]:
        meta_info[FIELD] = ours[index][0]


HOOKS: tuple[Hook, ...] = (
    Hook(
        "admit",
        f"{_TOKENIZER}._validate_one_request",
        HookType.BEFORE,
        _admit,
        "bad requests reach the engine",
        ("self", "obj", "input_ids"),
    ),
    Hook(
        "send",
        f"{_TOKENIZER}._send_one_request",
        HookType.BEFORE,
        _send,
        "parallel samples overwrite each other's hints",
        ("self", "tokenized_obj"),
    ),
    Hook(
        "send-batch",
        f"{_TOKENIZER}._send_batch_request",
        HookType.BEFORE,
        _send_batch,
        "hints of a batch lack log-probabilities",
        ("self", "tokenized_objs"),
    ),
    Hook(
        "collect",
        f"{_RESULTS}._maybe_collect_routed_experts",
        HookType.AFTER,
        _collect,
        "no hints are returned",
        ("self", "req"),
    ),
    Hook(
        "retract",
        "sglang.srt.managers.schedule_batch.release_req",
        HookType.BEFORE,
        _retract,
        "rows of a retracted request are not those of its tokens",
        (
            "req",
            "remaing_req_count",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
            "tree_cache",
            "hisparse_coordinator",
            "offload_kv",
        ),
    ),
    Hook(
        "streamer",
        "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class",
        HookType.AFTER,
        _streamer_class,
        "answers say nothing of their hints",
        ("self",),
    ),
    Hook(
        "meta-info",
        f"{_TOKENIZER}.update_request_meta_info",
        HookType.AROUND,
        _meta_info,
        "answers say nothing of their hints",
        ("self", "meta_info", "state", "customized_info", "index", "finish_reason"),
    ),
)
