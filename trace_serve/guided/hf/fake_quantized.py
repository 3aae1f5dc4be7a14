"""A transformers model as a trainer under a recipe computes it: the recipe's training-time version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trace_serve.guided.hf.attention import quantize_kv
from trace_serve.guided.hf.experts import quantize_experts
from trace_serve.guided.hf.rounding import NearestRounding, Rounding
from trace_serve.recipe import Recipe


@dataclass(frozen=True)
class QuantizedLayers:
    """Layers whose experts, and whose K and V, are fake-quantized."""

    experts: int
    kv: int


def fake_quantize(model: Any, recipe: Recipe, rounding: Rounding | None = None) -> QuantizedLayers:
    """Makes a model round what the engine rounds under the recipe, in place: experts' weights and inputs, K and V.

    Products, sums and everything else stay as they are, so that the result differs from the engine's by the order of
    additions alone.

    Args:
        model: of transformers, in BF16.
        rounding: rounds activations, K and V; None is the recipe's own nearest rounding.

    Raises:
        ConfigError: the model has parts that cannot be rounded in transformers, or none that the recipe names.
    """
    applied = rounding or NearestRounding(recipe)
    experts = quantize_experts(model, recipe, applied) if recipe.experts != "bf16" else 0
    kv = quantize_kv(model, recipe, applied) if recipe.kv != "bf16" else []

    def begin(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens = next(x for x in (*arguments, named.get("input_ids"), named.get("inputs_embeds")) if x is not None)
        cache = named.get("past_key_values")
        first = 0 if cache is None else cache.get_seq_length()
        applied.begin(first, tokens.shape[1])
        for layer in kv:
            layer.begin(first, tokens.shape[1])

    model.get_decoder().register_forward_pre_hook(begin, with_kwargs=True)
    return QuantizedLayers(experts, len(kv))
