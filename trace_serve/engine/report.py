"""What the engine says it loaded: built in the scheduler from the live objects, not from the configuration."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from trace_serve.engine import expert_images, memory, startup, state
from trace_serve.errors import SeamError
from trace_serve.hints.options import layers_of

KEY = "trace_serve"
SCHEMA_VERSION = 1


def from_scheduler(scheduler: Any) -> dict[str, Any]:
    """Inspects the loaded model and KV pool, and readies hint capture.

    Raises:
        SeamError: a layer or the pool is not what the recipe asks for; the start stops with this message.
    """
    engine = state.get()
    runner = scheduler.tp_worker.model_runner
    experts = _experts(runner.model)
    kv = _kv(runner.token_to_kv_pool)
    _check(runner.model, runner.token_to_kv_pool, experts, kv)
    _prepare_capture(runner, experts["quantized"])
    recipe = engine.spec.recipe
    return {
        "schema_version": SCHEMA_VERSION,
        "mode": "bf16" if recipe.is_bf16 else "fp4",
        "recipe": recipe.to_dict(),
        "recipe_id": recipe.recipe_id,
        "policy_digest": engine.spec.policy_digest,
        "tokenizer_digest": engine.spec.tokenizer_digest,
        "chat_template_digest": engine.spec.chat_template_digest,
        "experts": {key: value for key, value in experts.items() if key != "quantized"},
        "kv": kv,
        "hints": _hints(kv),
        "tensor_parallel": engine.ranks.size,
        "memory": _memory(runner, experts["quantized"]),
        "startup": startup.of_scheduler(scheduler),
        "context_length": runner.model_config.context_len,
        "vocab_size": runner.model_config.vocab_size,
        "max_total_num_tokens": scheduler.max_total_num_tokens,
        "sglang": importlib.metadata.version("sglang"),
        "torch": importlib.metadata.version("torch"),
        "seams": engine.check_seams(),
    }


def _experts(model: Any) -> dict[str, Any]:
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    from trace_serve.engine.moe import TraceNvFp4MoEMethod

    layers = {module.layer_id: module for module in model.modules() if isinstance(module, FusedMoE)}
    quantized = {i: layer for i, layer in layers.items() if isinstance(layer.quant_method, TraceNvFp4MoEMethod)}
    activations = {layer.quant_method.recipe.experts for layer in quantized.values()}
    return {
        "format": "nvfp4" if quantized else "bf16",
        "activations": "nvfp4" if activations == {"w4a4"} else "bf16",
        "layers_quantized": len(quantized),
        "layers_total": len(layers),
        "backend": state.get().kernels.name if quantized else "sglang",
        "checkpoint": expert_images.checkpoint_format(),
        "quantized": quantized,
    }


def _kv(pool: Any) -> dict[str, Any]:
    from trace_serve.engine.kv import attention_pool, method_of

    method = method_of(pool)
    if method is None:
        inner = attention_pool(pool)
        return {
            "format": "bf16",
            "layers_quantized": 0,
            "layers_total": len(inner.k_buffer),
            "bytes_per_token": sum(t.nbytes // t.shape[0] for t in (*inner.k_buffer, *inner.v_buffer)),
            "backend": "sglang",
        }
    return {
        "format": "nvfp4",
        "layers_quantized": sum(layer.k_scales is not None for layer in method.layers),
        "layers_total": len(method.layer_ids),
        "bytes_per_token": method.bytes_per_token(),
        "backend": state.get().kernels.name,
    }


def _memory(runner: Any, quantized: dict[int, Any]) -> dict[str, int]:
    from trace_serve.engine.kv import attention_pool, method_of

    pool = runner.token_to_kv_pool
    method = method_of(pool)
    inner = attention_pool(pool)
    stored = (*inner.k_buffer, *inner.v_buffer) if method is None else method.tensors()
    kept = state.get().expert_slots.values()
    return memory.of_engine(runner.model, quantized, sum(t.nbytes for t in stored), sum(slots.nbytes for slots in kept))


def _check(model: Any, pool: Any, experts: dict[str, Any], kv: dict[str, Any]) -> None:
    """Compares what was loaded with the recipe, layer by layer, going by the layers that the model itself has."""
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.radix_attention import RadixAttention

    from trace_serve.engine.kv import method_of

    recipe = state.get().spec.recipe
    wanted = [i for i in _layer_ids(model, FusedMoE) if recipe.quantizes_experts(i)]
    if sorted(experts["quantized"]) != wanted or (recipe.experts != "bf16" and not wanted):
        raise SeamError(
            f"seam quantization-method: the expert layers {sorted(experts['quantized'])} carry the NVFP4 method, the "
            f"recipe asks for {wanted or 'some'} of {_layer_ids(model, FusedMoE)}"
        )
    attention = _layer_ids(model, RadixAttention)
    wanted_kv = sum(recipe.quantizes_kv(i) for i in attention)
    if kv["layers_quantized"] != wanted_kv:
        raise SeamError(
            f"seam kv-method: {kv['layers_quantized']} of {kv['layers_total']} KV layers are NVFP4, "
            f"the recipe asks for {wanted_kv}"
        )
    method = method_of(pool)
    if method is not None and list(method.layer_ids) != attention:
        raise SeamError(
            f"seam kv-method: the KV pool is taken for that of layers {list(method.layer_ids)}, but attention is in "
            f"{attention}"
        )


def _layer_ids(model: Any, kind: Any) -> list[int]:
    return sorted({int(module.layer_id) for module in model.modules() if isinstance(module, kind)})


def _hints(kv: dict[str, Any]) -> dict[str, Any]:
    engine = state.get()
    options = engine.spec.hints
    stored = ("k", "v") if kv["format"] == "nvfp4" else ()
    return {
        "sites": [*engine.expert_slots, *(site for site in stored if site in options.sites)],
        "layers": list(layers_of(options.layers, engine.layers)),
        "layers_total": engine.layers,
        "codes": options.codes,
        "scale": options.scale,
    }


def _prepare_capture(runner: Any, experts: dict[int, Any]) -> None:
    """Memory for the outcomes of the sites and layers that the engine keeps."""
    from trace_serve.hints.slots import ExpertSlots, SlotPasses

    engine = state.get()
    engine.layers = runner.model_config.num_hidden_layers
    if engine.spec.recipe.is_bf16:
        return
    slots = runner.token_to_kv_pool.size + runner.token_to_kv_pool.page_size
    engine.passes = SlotPasses(slots)
    options = engine.spec.hints
    chosen = set(layers_of(options.layers, engine.layers))
    layers = tuple(i for i in sorted(experts) if i in chosen)
    if engine.spec.recipe.experts != "w4a4" or not layers:
        return
    one, codes = experts[layers[0]], options.codes == "full"
    if "experts_in" in options.sites:
        engine.expert_slots["experts_in"] = ExpertSlots(slots, layers, one.w13_weight.shape[-1], codes=codes)
    if "experts_mid" in options.sites:
        width = one.w2_weight.shape[-1]
        engine.expert_slots["experts_mid"] = ExpertSlots(slots, layers, width, one.top_k, codes=codes)
