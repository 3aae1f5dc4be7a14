"""Weight updates: `engine.refit` in place of SGLang's own handling, in the scheduler and in the HTTP process."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from trace_serve.engine import state
from trace_serve.engine.hooks.base import Hook
from trace_serve.engine.refit import front, staleness, transport
from trace_serve.engine.refit.core import Refit, require

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_HELD_SLEEP_S = 0.001
_ABANDON = "trace-refit-abandon"
_NO_IPC = (
    "update_weights_from_ipc is not supported: its worker loads and packs weights by itself, past the checks; use "
    "/update_weights_from_distributed, /update_weights_from_tensor or /update_weights_from_disk"
)


def _start(result: object, self: Any) -> None:
    from sglang.srt.runtime_context import get_serving

    from trace_serve.hints.slots import SlotPasses

    engine, runner = state.get(), self.tp_worker.model_runner
    engine.refit = Refit(self, Path(runner.model_config.model_path), str(get_serving().weight_version))
    if engine.passes is None:
        # A BF16 engine has no hints, but its answers say which versions computed them too.
        engine.passes = SlotPasses(runner.token_to_kv_pool.size + runner.token_to_kv_pool.page_size)


def _tick(result: object, self: Any, *args: Any, **kwargs: Any) -> None:
    refit = state.get().refit
    if refit is None:
        return
    refit.tick()
    if self._engine_paused:
        # SGLang polls without a break while it is paused, and takes the core that the sender needs.
        time.sleep(_HELD_SLEEP_S)


def _begin(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

    success, message = require(state.get().refit).begin(recv_req.selector)
    return BeginWeightUpdateReqOutput(success=success, message=message)


def _end(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    from sglang.srt.managers.io_struct import EndWeightUpdateReqOutput

    success, message = require(state.get().refit).end(self)
    return EndWeightUpdateReqOutput(success=success, message=message)


def _from_tensor(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput
    from sglang.srt.runtime_context import get_parallel

    def receive() -> transport.NamedTensors:
        rank = get_parallel().tp_rank
        return transport.from_request(recv_req.serialized_named_tensors, recv_req.load_format, rank)

    success, message = require(state.get().refit).bucket(
        self, recv_req.selector, recv_req.weight_version, receive, names=[]
    )
    return UpdateWeightsFromTensorReqOutput(success=success, message=message)


def _from_distributed(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput

    def receive() -> transport.NamedTensors:
        return transport.from_broadcast(self.tp_worker.model_runner.weight_updater, recv_req)

    success, message = require(state.get().refit).bucket(
        self, recv_req.selector, recv_req.weight_version, receive, names=list(recv_req.names)
    )
    return UpdateWeightsFromDistributedReqOutput(success=success, message=message)


def _from_disk(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    refit = require(state.get().refit)
    success, message = refit.disk(self, recv_req.model_path, recv_req.load_format, recv_req.weight_version)
    return UpdateWeightFromDiskReqOutput(success=success, message=message)


def _from_ipc(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqOutput

    return UpdateWeightsFromIPCReqOutput(success=False, message=_NO_IPC)


def _init_group(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Waits for the trainer as long as for a bucket, and refuses a backend that cannot carry this engine's tensors."""
    from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqOutput

    engine = state.get()
    if self.tp_worker.model_runner.device == "cpu" and recv_req.backend != "gloo":
        message = f"backend: got {recv_req.backend!r}, expected 'gloo' on a CPU engine"
        return InitWeightsUpdateGroupReqOutput(success=False, message=message)
    with transport.beating(engine.telemetry, engine.spec.refit_timeout_s):
        return original(self, recv_req)


def _group_timeout(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from datetime import timedelta

    return args, {**kwargs, "timeout": kwargs.get("timeout") or timedelta(seconds=state.get().spec.refit_timeout_s)}


def _checked(result: object, self: Any, recv_req: Any) -> None:
    if recv_req.action == "reset_tensors":
        require(state.get().refit).poison("check_weights reset its tensors")


def _poll(result: list[Any], self: Any) -> list[Any]:
    """Ends a session whose trainer is gone, on all ranks in one iteration, as SGLang does with its own time limits.

    The first rank decides by its clock; what it adds here is broadcast with the requests that it received.
    """
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    refit = state.get().refit
    if refit is None or not refit.is_overdue():
        return result
    return [*result, PauseGenerationReqInput(mode="in_place", rid=_ABANDON)]


def _pause(original: Callable[..., None], self: Any, recv_req: Any) -> None:
    refit = state.get().refit
    if recv_req.rid == _ABANDON:
        require(refit).abandon()
        return
    original(self, recv_req)
    if refit is not None:
        refit.trainer_paused(True)


def _continue(result: object, self: Any, recv_req: Any) -> None:
    if (refit := state.get().refit) is not None:
        refit.trainer_paused(False)


def _key_by_version(self: Any, *args: Any, **kwargs: Any) -> None:
    """KV of other weights is never found as a prefix, flushed or not.

    A request that holds KV keeps the key that this KV was written under.
    """
    version = state.get().weight_version
    if self.kv.holds_kv or not version:
        return
    base = self.__dict__.setdefault("_trace_extra_key", self.extra_key)
    self.extra_key = f"{base or ''}|weights {version}"


def _collect_versions(result: object, self: Any, req: Any) -> None:
    """Says which versions computed a finished request that weights changed under, before its slots are released."""
    engine = state.get()
    if not staleness.events_of(req) or engine.refit is None or engine.passes is None:
        return
    count = len(req.output_ids_through_stop)
    rows = len(req.origin_input_ids) + count - 1 if count else len(req.origin_input_ids)
    slots = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :rows].long()
    found = staleness.summarize(
        req, engine.passes.versions(slots).tolist(), engine.weight_version, engine.refit.versions.spans
    )
    engine.refit.count("mixed_requests", int(found["version_diff"] > 0))
    engine.refit.count("stale_requests", int(found["stale_tokens"] > 0))
    engine.refit.count("stale_tokens", found["stale_tokens"])
    staleness.keep(req, found)


def _streamer_class(result: Any, self: Any) -> type:
    """SGLang's streamer, with the versions of requests that weights changed under beside their tokens."""

    def additional(streamer: Any, reqs: list[Any]) -> dict[str, list[Any]]:
        others = (
            result.build_additional_customized_info(streamer, reqs) if result.has_additional_customized_info else {}
        )
        found = [staleness.take(req) for req in reqs]
        return {**others, staleness.CARRIER: [[f] if f else [] for f in found]} if any(found) else others

    body = {"has_additional_customized_info": True, "build_additional_customized_info": additional, "__slots__": ()}
    return type("VersionedOutputStreamer", (result,), body)


def _validate(self: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    front.validate(obj)


def _meta_info(
    self: Any, meta_info: dict[str, Any], state: Any, customized_info: dict[str, Any], index: int, finish_reason: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    rest = front.take_spans(meta_info, customized_info, index)
    return (self, meta_info, state, rest, index, finish_reason), {}


def _spans(result: object, meta_info: dict[str, Any], spans: Any, num_output_tokens: int) -> None:
    front.add_spans(meta_info, num_output_tokens)


def _front_generate(*args: Any, **kwargs: Any) -> None:
    front.refuse()


async def _front_openai(original: Callable[..., Awaitable[Any]], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses before the headers of a stream are sent, where SGLang's own handling would make it a 400."""
    reason = front.quarantine()
    if reason is not None:
        return self.create_error_response(
            reason, err_type="ServiceUnavailable", status_code=int(HTTPStatus.SERVICE_UNAVAILABLE)
        )
    return await original(self, *args, **kwargs)


def _front_begin(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    return front.begin(original, self, *args, *kwargs.values())


def _front_end(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    return front.end(original, self, *args, *kwargs.values())


def _front_continue(original: Callable[..., Any], self: Any, obj: Any) -> Any:
    return front.resume(original, self, obj)


def _front_pause(self: Any, obj: Any) -> None:
    front.paused(self)


def _front_label(original: Callable[..., Any], self: Any, weight_version: str | None) -> None:
    if front.takes_label(weight_version):
        original(self, weight_version)


def _front_path(original: Callable[..., Any], self: Any, model_path: str, load_format: str) -> None:
    """A policy keeps the name it is served under; SGLang would serve it under the new weights' path."""
    name = self.served_model_name
    original(self, model_path, load_format)
    self.served_model_name = name


_AROUND, _AFTER, _BEFORE = HookType.AROUND, HookType.AFTER, HookType.BEFORE
_ONE = ("self", "recv_req")

HOOKS: tuple[Hook, ...] = (
    Hook("refit-start", f"{_SCHEDULER}.get_init_info", _AFTER, _start, "weight updates are not checked"),
    Hook("refit-tick", f"{_SCHEDULER}.ingest_requests", _AFTER, _tick, "requests in quarantine wait for ever"),
    Hook("refit-poll", f"{_SCHEDULER}._poll_timeout_aborts", _AFTER, _poll, "a session of a dead trainer never ends"),
    Hook("refit-pause", f"{_SCHEDULER}.pause_generation", _AROUND, _pause, "a pause ends with a session", _ONE),
    Hook("refit-continue", f"{_SCHEDULER}.continue_generation", _AFTER, _continue, "mixed weights generate", _ONE),
    Hook("refit-begin", f"{_UPDATER}.begin_weight_update", _AROUND, _begin, "mixed weights generate", _ONE),
    Hook("refit-end", f"{_UPDATER}.end_weight_update", _AROUND, _end, "half an update serves", _ONE),
    Hook("refit-tensor", f"{_UPDATER}.update_weights_from_tensor", _AROUND, _from_tensor, "a bad bucket kills", _ONE),
    Hook(
        "refit-distributed",
        f"{_UPDATER}.update_weights_from_distributed",
        _AROUND,
        _from_distributed,
        "a bad bucket is loaded",
        _ONE,
    ),
    Hook("refit-disk", f"{_UPDATER}.update_weights_from_disk", _AROUND, _from_disk, "a cut shard is loaded", _ONE),
    Hook("refit-ipc", f"{_UPDATER}.update_weights_from_ipc", _AROUND, _from_ipc, "unchecked weights serve", _ONE),
    Hook("refit-group", f"{_UPDATER}.init_weights_update_group", _AROUND, _init_group, "a lost trainer freezes", _ONE),
    Hook(
        "refit-group-timeout",
        "sglang.srt.utils.common.init_custom_process_group",
        _BEFORE,
        _group_timeout,
        "a lost trainer freezes the scheduler for half an hour",
    ),
    Hook("refit-check", f"{_UPDATER}.check_weights", _AFTER, _checked, "reset weights serve", _ONE),
    Hook(
        "prefix-key",
        "sglang.srt.managers.schedule_batch.Req.init_next_round_input",
        _BEFORE,
        _key_by_version,
        "KV of old weights serves new ones",
    ),
    Hook("versions", f"{_RESULTS}._maybe_collect_routed_experts", _AFTER, _collect_versions, "no version spans"),
    Hook("refit-validate", f"{_TOKENIZER}._validate_one_request", _BEFORE, _validate, "quarantine is not told"),
    Hook("versions-streamer", f"{_SCHEDULER}.get_output_streamer_class", _AFTER, _streamer_class, "no version spans"),
    Hook(
        "versions-meta-info",
        f"{_TOKENIZER}.update_request_meta_info",
        _BEFORE,
        _meta_info,
        "no version spans",
        ("self", "meta_info", "state", "customized_info", "index", "finish_reason"),
    ),
    Hook(
        "versions-plain",
        "sglang.srt.utils.weight_versions.add_weight_versions_to_meta_info",
        _AFTER,
        _spans,
        "no version spans",
        ("meta_info", "spans", "num_output_tokens"),
    ),
    Hook(
        "front-generate",
        "sglang.srt.entrypoints.http_server.serve_generate_request",
        _BEFORE,
        _front_generate,
        "a stream in quarantine breaks off instead of a 503",
    ),
    Hook(
        "front-openai",
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
        _AROUND,
        _front_openai,
        "a stream in quarantine is a 400",
    ),
    Hook("front-begin", f"{_TOKENIZER}.begin_weight_update", _AROUND, _front_begin, "requests and session deadlock"),
    Hook("front-end", f"{_TOKENIZER}.end_weight_update", _AROUND, _front_end, "requests wait for ever"),
    Hook("front-continue", f"{_TOKENIZER}.continue_generation", _AROUND, _front_continue, "session deadlocks"),
    Hook("front-pause", f"{_TOKENIZER}.pause_generation", _BEFORE, _front_pause, "a pause ends with a session"),
    Hook(
        "front-label",
        f"{_TOKENIZER}._update_weight_version_if_provided",
        _AROUND,
        _front_label,
        "weights are called what they are not yet",
        ("self", "weight_version"),
    ),
    Hook(
        "front-path",
        f"{_TOKENIZER}._update_model_path_info",
        _AROUND,
        _front_path,
        "an update from disk renames the served model",
        ("self", "model_path", "load_format"),
    ),
)
