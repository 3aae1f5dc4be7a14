"""A model directory of a few kilobytes with everything that a policy is checked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def write_tiny_model(directory: Path, **changes: Any) -> Path:
    """Two shards, an index, a tokenizer and a chat template; `changes` override keys of config.json."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (directory / "tokenizer.json").write_text('{"model": {}}')
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    shards = {
        "model-00001-of-00002.safetensors": {"a.weight": np.arange(8, dtype=np.float32)},
        "model-00002-of-00002.safetensors": {"b.weight": np.ones((2, 3), dtype=np.float16)},
    }
    weight_map = {}
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
