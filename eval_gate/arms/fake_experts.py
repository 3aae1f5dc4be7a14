"""Experts of a transformers model with fake-quantized weights and inputs, as a trainer under a recipe computes them.

Guided rounding has its place in `Rounding`: it decides what becomes of the inputs of one layer's experts.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from trace_serve import nvfp4
from trace_serve.errors import ConfigError
from trace_serve.recipe import Recipe

_IMPLEMENTATION = "trace_serve_fake_quantized"


class Rounding(Protocol):
    """Rounds the inputs of experts."""

    def experts_in(self, layer: int, x: Tensor) -> Tensor:
        """Inputs of w13 [T, H], once a token; same shape and dtype."""

    def experts_mid(self, layer: int, expert: int, x: Tensor) -> Tensor:
        """Inputs of w2 [N, I] of the tokens routed to one expert; same shape and dtype."""


class NearestRounding:
    """What the engine does by itself under the recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def experts_in(self, layer: int, x: Tensor) -> Tensor:
        return nvfp4.fake_quantize_tokens(x, self._recipe, static_scale=self._recipe.experts_in_scale(layer))

    def experts_mid(self, layer: int, expert: int, x: Tensor) -> Tensor:
        return nvfp4.fake_quantize_tokens(x, self._recipe, static_scale=self._recipe.experts_mid_scale(layer))


def quantize_experts(model: Any, recipe: Recipe, rounding: Rounding | None = None) -> int:
    """Fake-quantizes the experts of the recipe's layers in place, and makes the model compute with them.

    Args:
        model: a transformers model whose experts are one module a layer with `gate_up_proj` [E, 2I, H] and `down_proj`
            [E, H, I].
        rounding: rounds activations; None is the recipe's own nearest rounding.

    Returns:
        Layers that are quantized.

    Raises:
        ConfigError: the model's experts are of another kind, or the recipe rotates.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if recipe.expert_rotation:
        raise ConfigError(
            f"recipe expert_rotation {recipe.expert_rotation}: is not computed in transformers; use 0", field="recipe"
        )
    ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _forward)
    applied = rounding or NearestRounding(recipe)
    count = 0
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        layer = _layer_of(name)
        if not recipe.quantizes_experts(layer):
            continue
        _check(name, module)
        with torch.no_grad():
            for weights, parts in ((module.gate_up_proj, 2), (module.down_proj, 1)):
                for expert in range(weights.shape[0]):
                    weights[expert].copy_(nvfp4.fake_quantize_weight(weights[expert], recipe, parts=parts))
        module.trace_serve = (layer, recipe, applied)
        count += 1
    if not count:
        raise ConfigError(f"{type(model).__name__}: has no experts that the recipe quantizes", field="recipe")
    model.set_experts_implementation(_IMPLEMENTATION)
    return count


def _layer_of(name: str) -> int:
    return next(int(part) for part in reversed(name.split(".")) if part.isdecimal())


def _check(name: str, module: Any) -> None:
    weights = [getattr(module, attribute, None) for attribute in ("gate_up_proj", "down_proj")]
    usual = all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights)
    if not usual or getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        raise ConfigError(f"{name}: experts of this layout are not computed with fake quantization", field="training")
    activation = type(module.act_fn).__name__
    if getattr(module, "has_bias", False) or activation not in ("SiLU", "SiLUActivation"):
        raise ConfigError(f"{name}: activation {activation} or biases, expected SiLU without biases", field="training")


def _rounding_of(module: Any) -> tuple[int, Rounding | None]:
    """Layer and rounding of activations; None where the recipe keeps them."""
    layer, recipe, rounding = getattr(module, "trace_serve", (0, None, None))
    return layer, rounding if recipe is not None and recipe.experts == "w4a4" else None


def _forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """hidden [T, H], chosen [T, K] expert indices, weights [T, K] to [T, H].

    Products are BF16, SiLU and its product with the up projection are FP32 and rounded once, experts are summed in FP32
    in the order of their index: as in the engine. A layer that the recipe leaves alone differs in no more than that.
    """
    layer, rounding = _rounding_of(module)
    x = hidden if rounding is None else rounding.experts_in(layer, hidden)
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for expert in sorted(set(chosen.flatten().tolist())):
        if expert >= module.gate_up_proj.shape[0]:
            continue
        tokens, places = torch.where(chosen == expert)
        gate, up = linear(x[tokens], module.gate_up_proj[expert]).float().chunk(2, dim=-1)
        middle = (silu(gate) * up).to(hidden.dtype)
        if rounding is not None:
            middle = rounding.experts_mid(layer, expert, middle)
        product = linear(middle, module.down_proj[expert]).float()
        out.index_add_(0, tokens, product * weights[tokens, places].float().unsqueeze(-1))
    return out.to(hidden.dtype)
