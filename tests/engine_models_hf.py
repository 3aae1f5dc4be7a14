"""Random models of every served family, written by Hugging Face's own classes, so that they are its oracle too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from engine_model import write_tokenizer

LAYERS, HIDDEN, EXPERTS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 64, 4, 4, 2, 16, 320

_COMMON: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"intermediate_size": 96, "num_local_experts": EXPERTS, "head_dim": HEAD_DIM, "sliding_window": None},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "intermediate_size": 96,
            "moe_intermediate_size": 96,
            "num_experts": EXPERTS,
            "head_dim": HEAD_DIM,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {"intermediate_size": 96, "num_experts": EXPERTS, "norm_topk_prob": False},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {
            "moe_intermediate_size": 96,
            "shared_expert_intermediate_size": 64,
            "num_experts": EXPERTS,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    ),
}
"""Family to its config class, its model class, and what the config sets beside the common sizes."""


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights wide enough that layers, experts and positions all matter; defaults of 0.02 leave logits nearly flat."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            value = torch.rand(parameter.shape, generator=generator).mul(4.0).add(0.05).log()
        elif parameter.dim() == 1:
            # Norms stay near their neutral weight, whichever it is: ones, or zeros where one is added to it.
            value = parameter.detach() + 0.08 * noise
        else:
            std = 1.0 if "embed_tokens" in name else 0.3 if name.endswith("gate.weight") else 0.08
            value = std * noise
        parameter.data.copy_(value)


def build(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A BF16 Hugging Face model of the family with seeded weights."""
    config_name, model_name, sizes = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**_COMMON, **sizes, **overrides})
    model = getattr(transformers, model_name)(config)
    _randomize(model, seed)
    return model.to(torch.bfloat16).eval()


def write_model(family: str, directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes the model as a Hugging Face directory; the same seed gives the same weights."""
    build(family, seed=seed, **overrides).save_pretrained(directory)
    interval = {**FAMILIES[family][2], **overrides}.get("full_attention_interval")
    if interval is not None:
        # Published checkpoints carry it and SGLang reads it; Hugging Face keeps only the layer types it stands for.
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "full_attention_interval": interval}, indent=1))
    write_tokenizer(directory)
    return directory
