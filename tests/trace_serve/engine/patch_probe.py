"""What each patched function of SGLang does with its patch and without it.

The module without a patch is a second copy of the installed file with all patches of the series undone on it, loaded
beside the real one. Layers that would need a distributed group are stand-ins; the function that the patch changes is
SGLang's own.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import sglang
import torch
from torch import nn

from trace_serve import patching
from trace_serve.patching.status import load_source
from trace_serve.patching.target import find_target


def load(path: str, *, released: bool) -> Any:
    """A fresh copy of one of SGLang's modules, as installed or as released."""
    content = find_target().read(path) or b""
    if released:
        content = load_source(patching.patch_dir()).series.backward(path, content) or b""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    module: Any = types.ModuleType(name)
    module.__file__ = str(Path(sglang.__file__).parent.parent / path)
    module.__package__ = name if path.endswith("__init__.py") else name.rpartition(".")[0]
    exec(compile(content, path, "exec"), module.__dict__)
    return module


class Layer(nn.Module):
    """Stands for any layer of a model and remembers what it was built with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.args, self.kwargs = args, kwargs
        self.runner_backend = None

    def bind_runner_backend(self, backend: object) -> None:
        pass


def bootstrap(released: bool) -> Any:
    """Entry points that the package asks for when it is imported."""
    asked: list[str] = []

    def entry_points(*, group: str) -> list[Any]:
        return [SimpleNamespace(load=lambda: lambda: asked.append(group))]

    with patch.object(importlib.metadata, "entry_points", entry_points):
        load("sglang/__init__.py", released=released)
    return asked


def mixtral_architecture(released: bool) -> Any:
    """The class that a Mixtral checkpoint gets under a quantization method that says it supports its MoE."""
    from sglang.srt.configs.model_config import ModelImpl
    from sglang.srt.layers import quantization

    method = type("Method", (), {"supports_mixtral_moe": True})
    module = load("sglang/srt/model_loader/utils.py", released=released)
    config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["MixtralForCausalLM"]),
        quantization="out_of_tree",
        model_impl=ModelImpl.AUTO,
    )
    # The real registry imports every model of SGLang to find one.
    registry: Any = types.ModuleType("registry")
    registry.ModelRegistry = SimpleNamespace(
        is_arch_supported=lambda name: True, resolve_model_cls=lambda names: (object, names[0])
    )
    with (
        patch.object(quantization, "get_quantization_config", lambda name: method),
        patch.dict(sys.modules, {"sglang.srt.models.registry": registry}),
    ):
        return module.get_model_architecture(config)[1]


def flush_after_session(released: bool) -> Any:
    """How often the end of a weight-update session flushes the KV cache."""
    module = load("sglang/srt/managers/scheduler_components/weight_updater.py", released=released)
    flushes: list[bool] = []
    updater = SimpleNamespace(
        _session=SimpleNamespace(loaded_weights=True, selector=None),
        _select_runners=lambda selector: [],
        flush_cache=lambda: flushes.append(True) or True,
        tp_cpu_group=None,
    )
    with patch.object(torch.distributed, "barrier", lambda group: None):
        module.SchedulerWeightUpdaterManager.end_weight_update(updater, None)
    return len(flushes)


def _tied(path: str, model: str, causal: str, released: bool) -> Any:
    module = load(path, released=released)
    group = SimpleNamespace(pp_group=SimpleNamespace(world_size=1))
    setattr(module, model, lambda *args, **kwargs: SimpleNamespace(embed_tokens="the embedding"))
    module.ParallelLMHead = lambda *args, **kwargs: "a head of its own"
    module.LogitsProcessor = lambda config: None
    module.get_parallel = lambda: group
    return getattr(module, causal)(SimpleNamespace(tie_word_embeddings=True, vocab_size=8, hidden_size=4)).lm_head


def tied_embeddings(released: bool) -> Any:
    """What a checkpoint with tied embeddings gets as its head, Mixtral's and OLMoE's."""
    return [
        _tied("sglang/srt/models/mixtral.py", "MixtralModel", "MixtralForCausalLM", released),
        _tied("sglang/srt/models/olmoe.py", "OlmoeModel", "OlmoeForCausalLM", released),
    ]


def host_memory(released: bool) -> Any:
    """Whether pinned host memory is registered with CUDA on a machine that has none."""
    module = load("sglang/srt/mem_cache/pool_host/common.py", released=released)
    registered: list[bool] = []
    module._cuda_host_register = lambda *args: registered.append(True)
    module._uses_hip_owned_host_memory = lambda **kwargs: False
    allocator = SimpleNamespace(allocate=lambda dims, dtype, device: torch.zeros(dims, dtype=dtype, device=device))
    with patch.object(torch.cuda, "is_available", lambda: False):
        module.alloc_with_host_register((2, 3), torch.float32, "cpu", True, allocator)
    return bool(registered)


def stream_logprobs(released: bool) -> Any:
    """Chunks of a chat stream for a token that adds no text and has a log-probability."""
    module = load("sglang/srt/entrypoints/openai/serving_chat.py", released=released)
    module.get_serving = lambda: SimpleNamespace(incremental_streaming_output=False)
    server = SimpleNamespace(
        _encoding_output=lambda: None,
        reasoning_parser=None,
        tool_call_parser=None,
        _tool_call_parsing_active=lambda request: False,
    )
    logprobs = {"content": [{"token": "\ufffd", "logprob": -1.0, "bytes": [226], "top_logprobs": []}]}

    async def chunks() -> int:
        stream = module.OpenAIServingChat._generate_stream_content(
            server,
            content={"text": "", "meta_info": {"id": "r"}},
            index=0,
            request=SimpleNamespace(model="m", separate_reasoning=False),
            created=0,
            stream_offsets={},
            reasoning_parser_dict={},
            parser_dict={},
            has_tool_calls={},
            choice_logprobs=logprobs,
            finish_reason_type=None,
            continuous_usage_stats=False,
            prompt_tokens={},
            reasoning_tokens={},
            completion_tokens={},
        )
        return len([chunk async for chunk in stream])

    return asyncio.run(chunks())


def olmoe_config(released: bool) -> Any:
    """Width of OLMoE's K norm for 2 KV heads of 4, its epsilons, and whether the router renormalises."""
    module = load("sglang/srt/models/olmoe.py", released=released)
    module.get_parallel = lambda: SimpleNamespace(tp_size=1)
    module.get_rope = lambda *args, **kwargs: None
    for name in (
        "RMSNorm",
        "QKVParallelLinear",
        "RowParallelLinear",
        "ReplicatedLinear",
        "TopK",
        "FusedMoE",
        "RadixAttention",
    ):
        setattr(module, name, Layer)
    config = SimpleNamespace(
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_theta": 1e4},
        rms_norm_eps=1e-6,
        num_experts=4,
        num_experts_per_tok=2,
        intermediate_size=8,
        norm_topk_prob=True,
    )
    layer = module.OlmoeDecoderLayer(config)
    norms = (layer.self_attn.q_norm, layer.self_attn.k_norm, layer.input_layernorm, layer.post_attention_layernorm)
    return {
        "k_norm": layer.self_attn.k_norm.args[0],
        "eps": sorted({norm.kwargs["eps"] for norm in norms}),
        "renormalize": layer.mlp.topk.kwargs["renormalize"],
    }


def routed_experts_without_chunks(released: bool) -> Any:
    """Rows of the capture buffer of a pool of 100 tokens that runs 4 requests, without chunked prefill."""
    module = load("sglang/srt/state_capturer/routed_experts.py", released=released)
    module.get_schedule = lambda: SimpleNamespace(chunked_prefill_size=-1)
    module.get_parallel = lambda: SimpleNamespace(num_dp_ranks=1)
    module._is_scattered_a2a_backend = lambda: False
    text = SimpleNamespace(num_experts_per_tok=2, num_hidden_layers=3)
    capturer = module.RoutedExpertsCapturer(
        model_config=SimpleNamespace(hf_text_config=text),
        num_tokens=100,
        max_running_requests=4,
        num_fused_shared_experts=0,
        device="cpu",
    )
    return capturer.device_cache.buffer.shape[0]


PROBES: dict[str, Callable[[bool], Any]] = {
    "0001-bootstrap-entry-points": bootstrap,
    "0002-mixtral-moe-quantization": mixtral_architecture,
    "0003-flush-after-weight-update": flush_after_session,
    "0004-tied-embeddings": tied_embeddings,
    "0005-host-memory-without-cuda": host_memory,
    "0006-stream-logprobs": stream_logprobs,
    "0007-olmoe-config": olmoe_config,
    "0008-routed-experts-without-chunks": routed_experts_without_chunks,
}


def outcomes() -> dict[str, dict[str, Any]]:
    return {name: {"with": probe(False), "without": probe(True)} for name, probe in PROBES.items()}
