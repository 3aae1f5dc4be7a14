"""Policies packed under recipes that differ in every choice of the weights, and what ModelOpt makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trace_serve.policy import build_policy
from trace_serve.recipe import PRESETS, Recipe

POW2 = Recipe()
FOUR_OVER_SIX = Recipe(four_over_six="weights", global_scale_max=256.0)
STATIC = Recipe(
    activation_global_scale="per_tensor_static",
    experts_in_global_scale=(0.25, 0.5),
    experts_mid_global_scale=(0.125,),
)
RECIPES = {
    "pow2": POW2,
    "4over6": FOUR_OVER_SIX,
    "square tiles": Recipe(weight_tiles="16x16"),
    "modelopt scales": Recipe(weight_scale_formula="amax_over_six_g", zero_block="one", reciprocal="divide"),
    "static inputs": STATIC,
    "weights only": Recipe(experts="w4a16"),
    "gb200": PRESETS["gb200"],
}


def build(source: Path, out: Path, recipe: Recipe, weights: str) -> Path:
    return build_policy(source, out, name="p", version="1", recipe=recipe, weights=weights).path


@dataclass(frozen=True)
class ByModelOpt:
    """Attributes:
    policies: directory of each recipe's policy in ModelOpt's layout.
    values: its experts by module, as ModelOpt's reader dequantizes them to fp32.
    configs: quantization_config as ModelOpt's exporter derives it from our hf_quant_config.json.
    written: tensors that ModelOpt wrote for experts of qwen3_moe, each module with its `values` in BF16.
    """

    policies: dict[str, Path]
    values: dict[str, dict[str, Tensor]]
    configs: dict[str, dict[str, Any]]
    written: dict[str, Tensor]
