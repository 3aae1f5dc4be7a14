"""What a recipe refuses: single values, and choices that contradict each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from trace_serve.errors import RecipeError
from trace_serve.recipe.choices import E4M3_MAX, REFUSED, STATIC_SCALES

if TYPE_CHECKING:
    from trace_serve.recipe.recipe import Recipe


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuses a value that is not among `allowed`, with the reason if it exists in the field."""
    if value in allowed:
        return
    reason = REFUSED.get((name, value)) if isinstance(value, str) else None
    if reason is not None:
        raise RecipeError(f"recipe {name}: {value!r} is refused: {reason}", field=name)
    raise RecipeError(f"recipe {name}: got {value!r}, expected one of {', '.join(allowed)}", field=name)


def static_scales(name: str, scales: object) -> tuple[float, ...] | None:
    """Static global scales as floats; they lie between 2^-100 and 2^100, so that every product is a normal fp32."""
    if scales is None:
        return None
    ok = isinstance(scales, tuple) and all(
        isinstance(g, int | float) and not isinstance(g, bool) and 2.0**-100 <= g <= 2.0**100 for g in scales
    )
    if not isinstance(scales, tuple) or not ok or not scales:
        raise RecipeError(
            f"recipe {name}: got {scales!r}, expected null or a list of positive numbers, one or one a layer",
            field=name,
        )
    return tuple(float(g) for g in scales)


def of_layer(name: str, scales: tuple[float, ...] | None, layer: int) -> float | None:
    """The static scale of a layer: the only one, or that layer's own."""
    if scales is None or len(scales) == 1:
        return None if scales is None else scales[0]
    if not 0 <= layer < len(scales):
        raise RecipeError(
            f"recipe {name}: has {len(scales)} scales, layer {layer} needs one; give one a layer", field=name
        )
    return scales[layer]


def powers_of_two(*scales: tuple[float, ...] | None) -> bool:
    return all(math.frexp(g)[0] == 0.5 for group in scales if group is not None for g in group)


def check_layers(name: str, layers: object) -> None:
    """Refuses what is not None or a sorted tuple of distinct layer indices."""
    if layers is None:
        return
    if isinstance(layers, tuple) and layers:
        numbers = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in layers)
        if numbers and all(a < b for a, b in pairwise(layers)):
            return
    raise RecipeError(
        f"recipe {name}: got {layers!r}, expected null or a sorted list of distinct layer indices", field=name
    )


def contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Fields whose value contradicts another choice, each with what is wrong and what to choose instead."""
    if recipe.experts == "bf16" and (recipe.expert_rotation or recipe.expert_layers is not None):
        yield (
            "experts",
            "'bf16' leaves nothing to rotate or to select; remove expert_rotation and expert_layers, "
            "or choose w4a4 or w4a16",
        )
    if recipe.kv == "bf16" and (recipe.k_rotation or recipe.kv_layers is not None):
        yield (
            "kv",
            "'bf16' leaves nothing to rotate or to select; remove k_rotation and kv_layers, or choose nvfp4",
        )
    for mode, static, active, names in (
        ("activation_global_scale", "per_tensor_static", recipe.experts == "w4a4", STATIC_SCALES[:2]),
        ("kv_global_scale", "static", recipe.kv == "nvfp4", STATIC_SCALES[2:]),
    ):
        wanted = active and getattr(recipe, mode) == static
        for name in names:
            if wanted and getattr(recipe, name) is None:
                yield name, f"{mode} {static!r} needs it; give one positive number, or one a layer"
            if not wanted and getattr(recipe, name) is not None:
                yield name, f"is used only with {mode} {static!r} of a quantized format; remove it"
    if recipe.kv_global_scale == "static" and recipe.kv_global_scale_log2:
        yield "kv_global_scale_log2", "is used only with kv_global_scale 'pow2_static'; remove it"
    if recipe.global_scale_max != E4M3_MAX and recipe.four_over_six == "off":
        yield (
            "global_scale_max",
            "256 leaves room for the larger scale of 4over6; choose four_over_six, or keep 448",
        )
    if recipe.four_over_six != "off" and recipe.experts == "bf16":
        yield "four_over_six", "there are no quantized experts to choose scales for; choose off, w4a4 or w4a16"
    if recipe.four_over_six == "experts" and recipe.experts != "w4a4":
        yield "four_over_six", "activations are not quantized; choose weights, or experts 'w4a4'"
    if recipe.zero_block == "saturate" and recipe.reciprocal == "divide":
        yield "zero_block", "'saturate' is defined by a reciprocal; choose another, or reciprocal 'exact'"
    if recipe.weight_tiles != "1x16" and recipe.experts == "bf16":
        yield "weight_tiles", "there are no quantized weights; choose 1x16, w4a4 or w4a16"
    if recipe.weight_tiles != "1x16" and recipe.four_over_six != "off":
        yield "weight_tiles", "4over6 chooses per 1x16 block; choose 1x16, or four_over_six 'off'"
