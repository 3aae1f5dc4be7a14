"""Dimensions of a model as far as memory and traffic depend on them, for planning (any architecture, no weights)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_serve.errors import PolicyError
from trace_serve.policy.tokenizer import read_json_object


@dataclass(frozen=True)
class ModelDims:
    """A mixture-of-experts model.

    Attributes:
        name: for display.
        layers: decoder layers, each with routed experts.
        hidden: width of the residual stream.
        intermediate: width inside one routed expert.
        experts: routed experts a layer.
        attention_layers: indices of the layers with full attention (a KV cache).
        kv_heads: KV heads of such a layer.
        head_dim: width of one head.
        other_parameters: parameters outside the routed experts, which stay in BF16.
        state_values: values of recurrent and convolution state a sequence, over all linear-attention layers.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    experts: int
    attention_layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    other_parameters: int
    state_values: int

    @property
    def expert_parameters(self) -> int:
        return self.layers * self.experts * 3 * self.hidden * self.intermediate

    @property
    def kv_values(self) -> int:
        """K and V values a token and attention layer."""
        return 2 * self.kv_heads * self.head_dim

    def hinted_values(self, first_layer: int = 0) -> int:
        """Expert inputs, K and V a token, in layers from `first_layer` on."""
        attention = sum(layer >= first_layer for layer in self.attention_layers)
        return (self.layers - first_layer) * self.hidden + attention * self.kv_values


QWEN35_35B_A3B: dict[str, Any] = {
    "num_hidden_layers": 40,
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "tie_word_embeddings": False,
}
BUILT_IN: dict[str, dict[str, Any]] = {"qwen3.5-35b-a3b": QWEN35_35B_A3B}


def load_dims(model: str) -> ModelDims:
    """A built-in name, the path of a config.json, or a directory that has one.

    Raises:
        PolicyError: neither, or a config without the dimensions of a mixture of experts.
    """
    if model.lower() in BUILT_IN:
        return dims_from_config(BUILT_IN[model.lower()], model)
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise PolicyError(
            f"model {model!r}: got neither a built-in name ({', '.join(BUILT_IN)}) nor a config.json", field="model"
        )
    return dims_from_config(read_json_object(path), str(path.parent))


def dims_from_config(config: Mapping[str, Any], name: str) -> ModelDims:
    """Reads the dimensions of a parsed config.json (of its text part, where it has several).

    Raises:
        PolicyError: a dimension is missing or not a positive whole number.
    """
    text = config.get("text_config", config)
    reader = _Reader(text if isinstance(text, Mapping) else {}, name)
    layers, hidden = reader("num_hidden_layers"), reader("hidden_size")
    experts, intermediate = (
        reader("num_local_experts", "num_experts", "n_routed_experts"),
        reader("moe_intermediate_size", "intermediate_size"),
    )
    heads = reader("num_attention_heads")
    kv_heads = reader("num_key_value_heads", default=heads)
    head_dim = reader("head_dim", default=hidden // heads)
    attention = _attention_layers(reader, layers)
    linear, state = _linear_layer(reader, hidden) if len(attention) < layers else (0, 0)
    query = heads * head_dim * (2 if reader.values.get("attn_output_gate") else 1)
    full = hidden * (query + 2 * kv_heads * head_dim + heads * head_dim)
    shared = 3 * hidden * reader("shared_expert_intermediate_size", default=0)
    tables = 1 if reader.values.get("tie_word_embeddings") else 2
    return ModelDims(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        attention_layers=attention,
        kv_heads=kv_heads,
        head_dim=head_dim,
        other_parameters=tables * reader("vocab_size") * hidden
        + len(attention) * full
        + (layers - len(attention)) * linear
        + layers * (shared + experts * hidden),
        state_values=(layers - len(attention)) * state,
    )


@dataclass(frozen=True)
class _Reader:
    values: Mapping[str, Any]
    where: str

    def __call__(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value: object = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise PolicyError(f"{self.where} {name}: got {value!r}, expected a positive whole number", field=name)
            return value
        if default is None:
            raise PolicyError(f"{self.where} {' or '.join(names)}: missing from config.json", field=names[0])
        return default


def _attention_layers(reader: _Reader, layers: int) -> tuple[int, ...]:
    kinds = reader.values.get("layer_types")
    if isinstance(kinds, list):
        return tuple(i for i, kind in enumerate(kinds) if kind != "linear_attention")
    interval = reader("full_attention_interval", default=1)
    return tuple(range(interval - 1, layers, interval))


def _linear_layer(reader: _Reader, hidden: int) -> tuple[int, int]:
    """Parameters and state values a sequence of one gated-delta-net layer."""
    keys = reader("linear_num_key_heads") * reader("linear_key_head_dim")
    value_heads = reader("linear_num_value_heads")
    values = value_heads * reader("linear_value_head_dim")
    channels = 2 * keys + values
    kernel = reader("linear_conv_kernel_dim")
    parameters = hidden * (channels + values + 2 * value_heads) + values * hidden + channels * kernel
    state = values * reader("linear_key_head_dim") + channels * (kernel - 1)
    return parameters, state
