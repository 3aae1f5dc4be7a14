"""The KV pool's method and size, and the rotation of the queries that read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.plugins.hook_registry import HookType

from trace_serve import nvfp4
from trace_serve.engine import kv, state
from trace_serve.engine.hooks.base import Hook
from trace_serve.errors import EngineError

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_FORWARD = ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")


def _layer_ids(configurator: Any, num_layers: int) -> tuple[int, ...]:
    """The model's indices of the layers that have K and V in this process's pool."""
    first, end = configurator.layer_info.start_layer, configurator.layer_info.end_layer
    hybrid = mambaish_config(configurator.model_config)
    layers = range(first, first + num_layers) if hybrid is None else hybrid.full_attention_layer_ids
    found = tuple(layer for layer in layers if first <= layer < end)
    if len(found) != num_layers:
        raise EngineError(f"the KV pool has {num_layers} layers, but the model has K and V in layers {found}")
    return found


def _kv_method(original: Callable[..., Any], self: Any, *, num_layers: int) -> Any:
    if state.get().spec.recipe.kv == "bf16":
        return original(self, num_layers=num_layers)
    method = kv.TraceNvFp4KVMethod(_layer_ids(self, num_layers))
    method.configure_attention_backends_from_server_args(self.server_args)
    return method


def _kv_cell_size(original: Callable[..., int], self: Any, kvc: Any, num_layers: int) -> int:
    if state.get().spec.recipe.kv == "bf16" or kvc.use_mla_backend:
        return original(self, kvc, num_layers)
    from sglang.srt.runtime_context import get_parallel

    heads = kvc.model_config.get_num_kv_heads(get_parallel().attn_tp_size, get_parallel().attn_dcp_size)
    method = kv.TraceNvFp4KVMethod(_layer_ids(kvc, num_layers))
    return method.compute_cell_size(heads, kvc.model_config.head_dim, num_layers, 2)


def _rotate_query(
    original: Callable[..., Any], self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any
) -> Any:
    recipe = state.get().spec.recipe
    if recipe.k_rotation and recipe.quantizes_kv(layer.layer_id):
        heads = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        q = nvfp4.rotate(heads, recipe.k_rotation).to(q.dtype).view_as(q)
    return original(self, q, k, v, layer, *args, **kwargs)


HOOKS: tuple[Hook, ...] = (
    Hook(
        "kv-method",
        f"{_CONFIGURATOR}._build_mha_quant_method",
        HookType.AROUND,
        _kv_method,
        "KV stays BF16",
        ("self", "num_layers"),
    ),
    Hook(
        "kv-cell-size",
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        HookType.AROUND,
        _kv_cell_size,
        "the KV pool is sized as if it were BF16",
        ("self", "kvc", "num_layers"),
    ),
    Hook(
        "query-rotation-prefill",
        f"{_ATTENTION}.forward_extend",
        HookType.AROUND,
        _rotate_query,
        "wrong scores",
        _FORWARD,
    ),
    Hook(
        "query-rotation-decode",
        f"{_ATTENTION}.forward_decode",
        HookType.AROUND,
        _rotate_query,
        "wrong scores",
        _FORWARD,
    ),
)
