"""Experts of a transformers model with fake-quantized weights and inputs, as a trainer under a recipe computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from trace_serve import nvfp4
from trace_serve.errors import ConfigError
from trace_serve.guided.hf.rounding import Rounding, rotated
from trace_serve.recipe import Recipe

_IMPLEMENTATION = "trace_serve_fake_quantized"


def quantize_experts(model: Any, recipe: Recipe, rounding: Rounding) -> int:
    """Fake-quantizes the experts of the recipe's layers in place, and makes the model compute with them.

    Args:
        model: a transformers model whose experts are one module a layer with `gate_up_proj` [E, 2I, H] and `down_proj`
            [E, H, I].
        rounding: rounds activations.

    Returns:
        Layers that are quantized.

    Raises:
        ConfigError: the model's experts are of another kind, or there are none that the recipe quantizes.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, experts_forward)
    count = 0
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        layer = layer_of(name)
        if not recipe.quantizes_experts(layer):
            continue
        check_experts(name, module)
        with torch.no_grad():
            for weights, parts in ((module.gate_up_proj, 2), (module.down_proj, 1)):
                for matrix in weights:
                    source = rotated(matrix, recipe.expert_rotation)
                    matrix.copy_(nvfp4.fake_quantize_weight(source, recipe, parts=parts))
        module.trace_serve = (layer, recipe.expert_rotation, rounding if recipe.experts == "w4a4" else None)
        count += 1
    if not count:
        raise ConfigError(f"{type(model).__name__}: has no experts that the recipe quantizes", field="recipe")
    model.set_experts_implementation(_IMPLEMENTATION)
    return count


def layer_of(name: str) -> int:
    """The layer that a module's name has."""
    return next(int(part) for part in reversed(name.split(".")) if part.isdecimal())


def check_experts(name: str, module: Any) -> None:
    """Raises ConfigError unless the experts are of the layout and activation that `experts_forward` computes."""
    weights = [getattr(module, attribute, None) for attribute in ("gate_up_proj", "down_proj")]
    usual = all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights)
    if not usual or getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        raise ConfigError(f"{name}: experts of this layout are not computed with fake quantization", field="training")
    activation = type(module.act_fn).__name__
    if getattr(module, "has_bias", False) or activation not in ("SiLU", "SiLUActivation"):
        raise ConfigError(f"{name}: activation {activation} or biases, expected SiLU without biases", field="training")


def experts_forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """hidden [T, H], chosen [T, K] expert indices, weights [T, K] to [T, H].

    Products are BF16, SiLU and its product with the up projection are FP32 and rounded once, experts are summed in FP32
    in the order of their index: as in the engine. A layer that the recipe leaves alone differs in no more than that.
    """
    layer: int
    rounding: Rounding | None
    layer, width, rounding = getattr(module, "trace_serve", (0, 0, None))
    x = rotated(hidden, width)
    x = (x if rounding is None else rounding.experts_in(layer, x)).to(hidden.dtype)
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for expert in sorted(set(chosen.flatten().tolist())):
        if expert >= module.gate_up_proj.shape[0]:
            continue
        rows, places = torch.where(chosen == expert)
        gate, up = linear(x[rows], module.gate_up_proj[expert]).float().chunk(2, dim=-1)
        middle = rotated((silu(gate) * up).to(hidden.dtype), width)
        middle = (middle if rounding is None else rounding.experts_mid(layer, middle, rows, places)).to(hidden.dtype)
        product = linear(middle, module.down_proj[expert]).float()
        out.index_add_(0, rows, product * weights[rows, places].float().unsqueeze(-1))
    return out.to(hidden.dtype)
