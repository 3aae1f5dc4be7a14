"""Which models can become a policy, and whether a recipe fits one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trace_serve.errors import PolicyError
from trace_serve.recipe import BLOCK, Recipe

SUPPORTED_MODEL_TYPES = ("mixtral", "qwen3_moe", "olmoe", "qwen3_5_moe", "qwen3_5_moe_text")


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a mixture-of-experts model that the numerics depend on.

    Attributes:
        model_type: the `model_type` of config.json.
        layers: decoder layers.
        hidden: width of the residual stream (input of an expert's first product).
        intermediate: width inside one expert (input of its second product).
        experts: routed experts a layer.
        top_k: experts a token uses.
        kv_heads: key/value heads.
        head_dim: width of one head.
        vocab: size of the vocabulary.
        context: longest sequence.
        expert_layers: decoder layers with routed experts; the others are dense.
        attention_layers: decoder layers with a KV cache; the others have linear attention.
    """

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    expert_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Reads the dimensions of a parsed config.json, of its text part where it has several.

        Raises:
            PolicyError: an architecture that is not supported, or a dimension that is missing or not positive.
        """
        model_type = config.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise PolicyError(
                f"config.json model_type: got {model_type!r}, expected one of {', '.join(SUPPORTED_MODEL_TYPES)}",
                field="model_type",
            )
        text = config.get("text_config")
        config = text if isinstance(text, Mapping) else config
        heads = _dimension(config, "num_attention_heads")
        hidden = _dimension(config, "hidden_size")
        layers = _dimension(config, "num_hidden_layers")
        return cls(
            model_type=str(model_type),
            layers=layers,
            hidden=hidden,
            intermediate=_dimension(config, "moe_intermediate_size", "intermediate_size"),
            experts=_dimension(config, "num_local_experts", "num_experts"),
            top_k=_dimension(config, "num_experts_per_tok"),
            kv_heads=_dimension(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads,
            head_dim=_dimension(config, "head_dim") if config.get("head_dim") else hidden // heads,
            vocab=_dimension(config, "vocab_size"),
            context=_dimension(config, "max_position_embeddings"),
            expert_layers=_expert_layers(config, layers),
            attention_layers=_attention_layers(config, layers),
        )


def _expert_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Qwen's configs may keep some layers dense."""
    dense = config.get("mlp_only_layers") or ()
    step = _dimension(config, "decoder_sparse_step") if config.get("decoder_sparse_step") else 1
    return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def _attention_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Of a hybrid model the layers that SGLang builds with full attention: it goes by the interval."""
    if "linear_num_value_heads" not in config:
        return tuple(range(layers))
    interval = _dimension(config, "full_attention_interval") if config.get("full_attention_interval") else 4
    return tuple(i for i in range(layers) if (i + 1) % interval == 0)


def _dimension(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value: object = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise PolicyError(f"config.json {name}: got {value!r}, expected a positive whole number", field=name)
        return value
    raise PolicyError(f"config.json {' or '.join(names)}: missing", field=names[0])


def check_recipe_fits(recipe: Recipe, model: ModelShape) -> None:
    """Refuses a recipe that the model's dimensions cannot carry.

    Raises:
        PolicyError: a quantized dimension that is not a multiple of 16 or of its rotation width, or a layer index that
            is outside the model or has nothing to quantize.
    """
    for name, chosen, there, without in (
        ("expert_layers", recipe.expert_layers, model.expert_layers, "has no routed experts"),
        ("kv_layers", recipe.kv_layers, model.attention_layers, "has no KV cache"),
    ):
        for layer in chosen or ():
            if layer >= model.layers:
                raise PolicyError(
                    f"recipe {name}: layer {layer} does not exist, the model has layers 0 to {model.layers - 1}",
                    field=name,
                )
            if layer not in there:
                raise PolicyError(f"recipe {name}: layer {layer} {without}; choose among {list(there)}", field=name)
    if recipe.experts != "bf16":
        for what, width in (("hidden_size", model.hidden), ("intermediate_size", model.intermediate)):
            _check_divides(what, width, BLOCK, "the NVFP4 block", "experts")
            _check_divides(what, width, recipe.expert_rotation, "expert_rotation", "expert_rotation")
    if recipe.kv != "bf16":
        _check_divides("head_dim", model.head_dim, BLOCK, "the NVFP4 block", "kv")
        _check_divides("head_dim", model.head_dim, recipe.k_rotation, "k_rotation", "k_rotation")


def _check_divides(what: str, width: int, divisor: int, why: str, field: str) -> None:
    if divisor and width % divisor:
        raise PolicyError(
            f"recipe {field}: the model's {what} {width} is not a multiple of {divisor} ({why}); "
            f"change the recipe or keep this part in BF16",
            field=field,
        )
