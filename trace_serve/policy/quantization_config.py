"""What `config.json` and `hf_quant_config.json` of a packed checkpoint say, for the engines that read them."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trace_serve.policy import expert_names
from trace_serve.policy.layouts import CONFIG_FILE, MODELOPT, MODELOPT_FILE, Layout
from trace_serve.policy.storable import stores_kv_entry
from trace_serve.policy.weights import TensorInfo
from trace_serve.recipe import BLOCK, Recipe

_BLOCKS = re.compile(r"(.*\.(?:self_attn|linear_attn|shared_expert))\..*")
"""Blocks whose projections engines fuse under other names."""
_EMBEDDING = "embed_tokens"


def unquantized_modules(tensors: Mapping[str, TensorInfo], recipe: Recipe) -> list[str]:
    """Every linear module that stays as it is: those with a matrix that the recipe does not quantize.

    Args:
        tensors: of the BF16 model.
        recipe: says which experts are quantized.
    """
    out = []
    for name, info in tensors.items():
        fused = expert_names.parse_fused(name)
        module = name.removesuffix(".weight")
        if fused is None and (module == name or len(info.shape) != 2 or module.endswith(_EMBEDDING)):
            continue
        expert = fused.matrix(0, "gate") if fused else expert_names.parse(module)
        if expert is None or not recipe.quantizes_experts(expert.layer):
            out.append(module if fused is None or expert is None else expert.module)
    # A tied head has no tensor of its own, and is a linear layer to an engine all the same.
    return sorted({*out, "lm_head"})


def modelopt_files(
    excluded: Iterable[str], recipe: Recipe, layers: Sequence[int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Contents of hf_quant_config.json, and of `quantization_config` in config.json.

    Args:
        excluded: modules that stay unquantized.
        recipe: of the policy.
        layers: the model's layers with a KV cache.
    """
    algorithm = "NVFP4" if recipe.experts == "w4a4" else "W4A16_NVFP4"
    kv = "NVFP4" if stores_kv_entry(recipe, layers) else None
    patterns = sorted({_wildcard(module) for module in excluded})
    # Engines recognise the layout by this name; the version says who wrote it.
    producer = {"name": "modelopt", "version": f"trace-serve {importlib.metadata.version('trace-serve')}"}
    nested = {
        "producer": producer,
        "quantization": {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": kv,
            "group_size": BLOCK,
            "exclude_modules": patterns,
        },
    }
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    group: dict[str, Any] = {"weights": numbers, "targets": ["Linear"]}
    if algorithm == "NVFP4":
        group["input_activations"] = dict(numbers)
    flat = {
        "config_groups": {"group_0": group},
        "ignore": patterns,
        "quant_algo": algorithm,
        "producer": producer,
        "quant_method": "modelopt",
    }
    if kv is not None:
        flat["kv_cache_scheme"] = kv
    return nested, flat


def _wildcard(module: str) -> str:
    """Engines ask for a fused name, which only a wildcard over the block matches."""
    block = _block_of(module)
    return module if block is None else f"{block}*"


def _block_of(module: str) -> str | None:
    """`model.layers.3.mlp.experts` for any matrix of these experts, `…self_attn` for its projections; else None."""
    matrix = expert_names.parse(module)
    if matrix is not None:
        return module.removesuffix(f".{matrix.expert}.{matrix.own_name}")
    found = _BLOCKS.fullmatch(module)
    return None if found is None else found.group(1)


def compressed_tensors_section(ignored: Iterable[str], recipe: Recipe) -> dict[str, Any]:
    """Contents of `quantization_config` in config.json."""
    numbers = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": "torch.float8_e4m3fn",
    }
    inputs = {**numbers, "dynamic": "local", "observer": "static_minmax"} if recipe.experts == "w4a4" else None
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "dynamic": False},
        "input_activations": inputs,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted({_expression(module) for module in ignored}),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _expression(module: str) -> str:
    """As `_wildcard`; attention stays spelled out, since engines look up the parts of their fused q, k and v."""
    block = _block_of(module)
    return module if block is None or block.endswith("self_attn") else f"re:{re.escape(block)}.*"


def config_files(
    config: Mapping[str, Any], layout: Layout, tensors: Mapping[str, TensorInfo], recipe: Recipe, layers: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """The JSON files of a packed checkpoint, by name.

    Args:
        config: parsed config.json of the BF16 model.
        layout: of the packed checkpoint.
        tensors: of the BF16 model.
        recipe: of the policy.
        layers: the model's layers with a KV cache.
    """
    plain = unquantized_modules(tensors, recipe)
    if layout is MODELOPT:
        nested, flat = modelopt_files(plain, recipe, layers)
        return {CONFIG_FILE: {**config, "quantization_config": flat}, MODELOPT_FILE: nested}
    return {CONFIG_FILE: {**config, "quantization_config": compressed_tensors_section(plain, recipe)}}
