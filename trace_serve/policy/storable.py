"""Which recipes a packed layout can carry, and what an engine that knows only the layout does differently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from trace_serve.errors import PolicyError
from trace_serve.policy.layouts import COMPRESSED_TENSORS, MODELOPT, Declared, Layout
from trace_serve.recipe import Recipe


def check_storable(recipe: Recipe, layout: Layout) -> None:
    """Refuses a recipe whose weights mean something else to an engine that reads the layout.

    Raises:
        PolicyError: nothing is quantized; weights are rotated; or gate and up have global scales of their own.
    """
    if recipe.experts == "bf16":
        raise PolicyError(
            f"format {layout.name}: the recipe keeps experts in BF16, so there is nothing to pack; choose format bf16, "
            "or experts w4a4 or w4a16",
            field="format",
        )
    if recipe.expert_rotation:
        raise PolicyError(
            f"format {layout.name}: expert_rotation is {recipe.expert_rotation}; an engine that reads this layout does "
            "not rotate inputs and would answer nonsense. Choose format bf16, or expert_rotation 0",
            field="expert_rotation",
        )
    if recipe.gate_up_scale == "split":
        raise PolicyError(
            f"format {layout.name}: gate_up_scale is 'split'; engines fuse gate and up under the scale of one of them. "
            "Choose format bf16, or gate_up_scale 'shared'",
            field="gate_up_scale",
        )
    if layout.reciprocal:
        _check_reciprocals(recipe, layout)


def _check_reciprocals(recipe: Recipe, layout: Layout) -> None:
    """A layout that stores 1 / g gives g back only for powers of two."""
    static = {
        "experts_in_global_scale": recipe.experts_in_global_scale,
        "experts_mid_global_scale": recipe.experts_mid_global_scale,
    }
    inexact = [name for name, scales in static.items() if any(math.frexp(g)[0] != 0.5 for g in scales or ())]
    if recipe.weight_global_scale != "pow2_per_expert":
        inexact.append("weight_global_scale")
    for name in inexact:
        raise PolicyError(
            f"format {layout.name}: {name} is not a power of two, and this layout stores 1 / g, which does not give g "
            "back; choose powers of two, or format modelopt",
            field=name,
        )


def stores_kv_entry(recipe: Recipe, layers: Sequence[int]) -> bool:
    """Whether `kv_cache_quant_algo: NVFP4` says what the recipe says: every layer, global scale 1, no rotation."""
    plain = recipe.kv == "nvfp4" and not recipe.k_rotation
    return plain and all(recipe.quantizes_kv(i) and recipe.kv_scales(i) == (1.0, 1.0) for i in layers)


def notes(recipe: Recipe, layout: Layout, layers: Sequence[int]) -> list[str]:
    """What the layout cannot say about the recipe; trace-serve takes it from policy.json, other engines do not.

    Args:
        recipe: of the policy.
        layout: of its weights.
        layers: the model's layers with a KV cache.
    """
    out = []
    if recipe.experts == "w4a4" and recipe.activation_global_scale != "per_tensor_static":
        out.append(
            f"{layout.input_scale} is 1: the recipe takes activation scales from each token, which {layout.name} "
            "cannot say; an engine that uses the stored scale rounds activations otherwise"
        )
    if recipe.four_over_six == "experts":
        out.append(f"activations use 4over6, which {layout.name} cannot say; other engines round them otherwise")
    if recipe.kv != "bf16" and not (layout is MODELOPT and stores_kv_entry(recipe, layers)):
        out.append(f"the KV cache in NVFP4 is not declared: {layout.name} cannot say it as the recipe does")
    return out


def check_serves(recipe: Recipe, declared: Declared, where: Path) -> None:
    """Refuses to serve a packed checkpoint under a recipe that contradicts it.

    Raises:
        PolicyError: naming the choice of the recipe.
    """
    layout = declared.layout
    if recipe.experts == "bf16":
        raise PolicyError(
            f"{where}: its experts are packed NVFP4 ({layout.name}), the recipe says BF16; serve the BF16 model, or "
            "choose a recipe with w4a4 or w4a16",
            field="experts",
        )
    if recipe.experts == "w4a4" and declared.weight_only:
        what = "input_activations null" if layout is COMPRESSED_TENSORS else "quant_algo W4A16_NVFP4"
        raise PolicyError(
            f"{where}: {what} keeps inputs in BF16, the recipe says experts 'w4a4'; choose w4a16", field="experts"
        )
    if recipe.expert_rotation:
        raise PolicyError(
            f"{where}: packed weights are not rotated, the recipe says expert_rotation {recipe.expert_rotation}; "
            "choose 0, or serve the BF16 model",
            field="expert_rotation",
        )
