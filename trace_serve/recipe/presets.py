"""Named recipes, and recipes from a file."""

from __future__ import annotations

import json
from pathlib import Path

from trace_serve.errors import RecipeError
from trace_serve.recipe.recipe import Recipe

PORTABLE = Recipe()

PRESETS: dict[str, Recipe] = {
    "default": PORTABLE,
    "portable": PORTABLE,
    "bf16": Recipe(experts="bf16", kv="bf16"),
    "gb200": Recipe(
        activation_global_scale="per_token",
        weight_global_scale="per_expert",
        weight_scale_formula="amax_over_six",
        four_over_six="weights",
        kv_scale_formula="s_times_amax_sixth",
        zero_block="saturate",
    ),
    "paper": Recipe(activation_global_scale="per_token", weight_global_scale="per_expert"),
}
"""Named recipes.

- `default` is `portable`: power-of-two global scales, so BF16 holds every NVFP4 value exactly.
- `gb200`: what SGLang 0.5.23 with `nvfp4_online` and FlashInfer 0.7.2 computes under exact math: per-token FP32 scales,
  weights with 4over6 (448, squared error). FlashInfer's KV quantizer has no exact mode; this is its formula, exact.
- `paper`: TRACE (arXiv 2610.07767); where it is silent, Transformer Engine's row-scaled 1x16 recipe.
"""


def load_recipe(spec: str) -> Recipe:
    """A preset's name, or the path of a JSON file with a recipe object.

    Raises:
        RecipeError: neither a preset nor a readable file, or a bad recipe.
    """
    if spec in PRESETS:
        return PRESETS[spec]
    try:
        raw = json.loads(Path(spec).read_text(encoding="utf-8"))
    except OSError as exc:
        raise RecipeError(
            f"recipe {spec!r}: not a preset ({', '.join(PRESETS)}) and not a readable file ({exc.strerror})",
            field="recipe",
        ) from exc
    except ValueError as exc:
        raise RecipeError(f"recipe {spec!r}: not JSON: {exc}", field="recipe") from exc
    return Recipe.from_dict(raw)
