"""Every SGLang function that the patch layer wraps, and what the wrapper does.

`HOOKS` is the one list: the plugin registers it, `seams` checks it. A wrapper keeps SGLang's own behaviour for requests
and layers that are not ours.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from trace_serve.engine import collect, kv, report, state

_FILE_SAFE = re.compile(r"[A-Za-z0-9_-]{1,128}")
HINT_MODES = ("inline", "file")


@dataclass(frozen=True)
class Hook:
    """Attributes:
    name: how `doctor` and errors call the seam.
    target: dotted path in SGLang.
    type: how SGLang's registry combines the wrapper with the original.
    function: the wrapper.
    why: what is lost without it.
    """

    name: str
    target: str
    type: HookType
    function: Callable[..., Any]
    why: str


def _start_method(result: object, *args: object) -> None:
    # Each spawned child would import SGLang again, which is most of the start-up time on a CPU. Forking is unsafe once
    # CUDA is initialised, so a card keeps SGLang's own choice.
    if not torch.cuda.is_available():
        multiprocessing.set_start_method("fork", force=True)


def _kv_method(original: Callable[..., Any], self: Any, *, num_layers: int) -> Any:
    if state.get().spec.recipe.kv == "bf16":
        return original(self, num_layers=num_layers)
    method = kv.TraceNvFp4KVMethod(num_layers=num_layers, device=self.device, page_size=self.page_size)
    method.configure_attention_backends_from_server_args(self.server_args)
    return method


def _kv_cell_size(original: Callable[..., int], self: Any, kvc: Any, num_layers: int) -> int:
    if state.get().spec.recipe.kv == "bf16" or kvc.use_mla_backend:
        return original(self, kvc, num_layers)
    from sglang.srt.runtime_context import get_parallel

    heads = kvc.model_config.get_num_kv_heads(get_parallel().attn_tp_size, get_parallel().attn_dcp_size)
    return kv.TraceNvFp4KVMethod().compute_cell_size(heads, kvc.model_config.head_dim, num_layers, 2)


def _rotate_query(
    original: Callable[..., Any], self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any
) -> Any:
    recipe = state.get().spec.recipe
    if recipe.k_rotation and recipe.quantizes_kv(layer.layer_id):
        from trace_serve import nvfp4

        heads = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        q = nvfp4.rotate(heads, recipe.k_rotation).to(q.dtype).view_as(q)
    return original(self, q, k, v, layer, *args, **kwargs)


def _announce_forward(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    engine = state.get()
    engine.telemetry.beat()
    engine.begin_forward(forward_batch.out_cache_loc)


def _beat(self: Any, *args: Any, **kwargs: Any) -> None:
    state.get().telemetry.beat()


def _collect(result: object, self: Any, req: Any) -> None:
    collect.collect(self, req)


def _weights_changed(result: object, self: Any, *args: Any, **kwargs: Any) -> None:
    state.get().weight_version += 1


def _init_info(result: dict[str, Any], self: Any) -> dict[str, Any]:
    return {**result, report.KEY: report.from_scheduler(self)}


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


_ENGINE = "sglang.srt.entrypoints.engine"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)

HOOKS: tuple[Hook, ...] = (
    Hook("start-method", f"{_ENGINE}._set_envs_and_config", HookType.AFTER, _start_method, "slow start on a CPU"),
    Hook("kv-method", f"{_CONFIGURATOR}._build_mha_quant_method", HookType.AROUND, _kv_method, "KV stays BF16"),
    Hook(
        "kv-cell-size",
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        HookType.AROUND,
        _kv_cell_size,
        "the KV pool is sized as if it were BF16",
    ),
    Hook("query-rotation-prefill", f"{_ATTENTION}.forward_extend", HookType.AROUND, _rotate_query, "wrong scores"),
    Hook("query-rotation-decode", f"{_ATTENTION}.forward_decode", HookType.AROUND, _rotate_query, "wrong scores"),
    Hook(
        "forward",
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        HookType.BEFORE,
        _announce_forward,
        "captured rows have no slots",
    ),
    Hook("heartbeat", f"{_SCHEDULER}.ingest_requests", HookType.BEFORE, _beat, "a frozen scheduler looks alive"),
    Hook("init-info", f"{_SCHEDULER}.get_init_info", HookType.AFTER, _init_info, "the scheduler cannot report"),
    Hook("collect", f"{_RESULTS}._maybe_collect_routed_experts", HookType.AFTER, _collect, "no hints are returned"),
    *(
        Hook(f"refit-{name}", f"{_UPDATER}.{name}", HookType.AFTER, _weights_changed, "old rows pass for new ones")
        for name in _UPDATES
    ),
    Hook(
        "validate", f"{_TOKENIZER}._validate_one_request", HookType.BEFORE, _validate, "bad requests reach the engine"
    ),
    Hook("meta-info", f"{_TOKENIZER}.update_request_meta_info", HookType.AFTER, _meta_info, "no inline hints"),
    Hook(
        "openai-metadata",
        "sglang.srt.utils.weight_versions.build_endpoint_weight_version_metadata",
        HookType.AFTER,
        _openai_metadata,
        "no inline hints on OpenAI routes",
    ),
)
