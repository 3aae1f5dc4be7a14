"""A model directory of random experts: small, sharded, under the names of each supported family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

LAYERS, HIDDEN, INTERMEDIATE, EXPERTS = 2, 64, 96, 3
CONFIG: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, tuple[dict[str, Any], str, tuple[str, str, str]]] = {
    "mixtral": (
        {"model_type": "mixtral", "num_local_experts": EXPERTS, "intermediate_size": INTERMEDIATE},
        "block_sparse_moe",
        ("w1", "w3", "w2"),
    ),
    "qwen3_moe": (
        {"model_type": "qwen3_moe", "num_experts": EXPERTS, "moe_intermediate_size": INTERMEDIATE},
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
    ),
    "olmoe": (
        {"model_type": "olmoe", "num_experts": EXPERTS, "intermediate_size": INTERMEDIATE},
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
    ),
}


def expert_module(family: str, layer: int, expert: int, projection: str) -> str:
    """The checkpoint's name of one matrix; `projection` is gate, up or down."""
    _, block, names = FAMILIES[family]
    own = dict(zip(("gate", "up", "down"), names, strict=True))[projection]
    return f"model.layers.{layer}.{block}.experts.{expert}.{own}"


def expert_weights(family: str, seed: int = 0) -> dict[str, Tensor]:
    """BF16 matrices by module, with a block of zeros, a large value and a small row among them."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for projection in ("gate", "up", "down"):
                shape = (HIDDEN, INTERMEDIATE) if projection == "down" else (INTERMEDIATE, HIDDEN)
                weight = torch.randn(*shape, generator=generator) * 0.05 * (1 + layer + expert)
                weight[3, 16:32] = 0
                weight[5] *= 1e-3
                weight[7, 1] = 3.0 if projection == "up" else -0.7
                out[expert_module(family, layer, expert, projection)] = weight.to(torch.bfloat16)
    return out


def write_expert_model(directory: Path, family: str = "mixtral", *, seed: int = 0, shards: int = 2) -> Path:
    """Writes the model; with two shards gate and up of some experts lie in different files."""
    config, block, _ = FAMILIES[family]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (directory / "tokenizer.json").write_text('{"model": {}}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    tensors = {f"{module}.weight": weight for module, weight in expert_weights(family, seed).items()}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q", "k", "v", "o"):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = torch.ones(64, HIDDEN, dtype=torch.bfloat16)
        tensors[f"{prefix}.{block}.gate.weight"] = torch.ones(EXPERTS, HIDDEN, dtype=torch.bfloat16)
        tensors[f"{prefix}.input_layernorm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors["model.embed_tokens.weight"] = torch.ones(100, HIDDEN, dtype=torch.float32)
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        held = {name: tensors[name] for name in names[i::shards]}
        save_file(held, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a directory, through the safetensors library."""
    out = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as handle:
            out |= {name: handle.get_tensor(name) for name in sorted(handle.keys())}
    return out


def rewrite(directory: Path, name: str, tensor: Tensor | None, *, as_name: str | None = None) -> str:
    """Replaces a tensor in its shard, or removes it; returns the shard's name."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as handle:
            held = {key: handle.get_tensor(key) for key in sorted(handle.keys())}
        if name not in held:
            continue
        del held[name]
        if tensor is not None:
            held[as_name or name] = tensor
        save_file(held, path, metadata={"format": "pt"})
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            weight_map = {k: v for k, v in json.loads(index.read_text())["weight_map"].items() if v != path.name}
            index.write_text(json.dumps({"weight_map": weight_map | dict.fromkeys(held, path.name)}))
        return path.name
    raise KeyError(name)
