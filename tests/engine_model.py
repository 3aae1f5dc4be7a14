"""A random Mixtral of 2 MB with a byte-level tokenizer: small enough for an engine test, built without a download."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LAYERS, HIDDEN, INTERMEDIATE, EXPERTS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 64, 96, 4, 4, 2, 16, 320
RMS_NORM_EPS = 1e-5
SPECIAL = ("<unk>", "<s>", "</s>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": RMS_NORM_EPS,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def weights(seed: int) -> dict[str, torch.Tensor]:
    """All tensors in BF16 under Mixtral's checkpoint names."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.08) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)

    out = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, std=1.0),
        "lm_head.weight": normal(VOCABULARY, HIDDEN),
    }
    out["model.norm.weight"] = 1 + normal(HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{prefix}{norm}.weight"] = 1 + normal(HIDDEN)
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            out[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows * HEAD_DIM, HIDDEN)
        out[f"{prefix}self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * HEAD_DIM)
        out[f"{prefix}block_sparse_moe.gate.weight"] = normal(EXPERTS, HIDDEN, std=0.3)
        for expert in range(EXPERTS):
            for name, shape in (
                ("w1", (INTERMEDIATE, HIDDEN)),
                ("w2", (HIDDEN, INTERMEDIATE)),
                ("w3", (INTERMEDIATE, HIDDEN)),
            ):
                out[f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight"] = normal(*shape)
    return out


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """Writes the tokenizer, its chat template and the generation defaults, for any model of at least 259 tokens."""
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    _tokenizer().save(str(directory / "tokenizer.json"))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def write_engine_model(directory: Path, *, seed: int = 0) -> Path:
    """Writes the model as a Hugging Face directory; the same seed gives the same weights."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1))
    write_tokenizer(directory)
    save_file(weights(seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def token_ids(seed: int, count: int) -> list[int]:
    """Random ordinary token ids."""
    return [int(i) for i in np.random.default_rng(seed).integers(len(SPECIAL), 250, size=count)]
