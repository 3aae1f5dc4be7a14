"""The frozen set of every numeric choice under which a policy is served (no torch here).

Two runs whose recipes hash to the same `recipe_id` compute the same codes from the same inputs. The id is stored
wherever a number produced under the recipe is stored, and a mismatch is an error.
"""

from trace_serve.recipe.choices import (
    BLOCK,
    CHOICES,
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN_SUBNORMAL,
    GLOBAL_SCALE_MAXIMA,
    ROTATIONS,
    SCALE_FORMULAS,
)
from trace_serve.recipe.presets import PORTABLE, PRESETS, load_recipe
from trace_serve.recipe.recipe import Recipe

__all__ = [
    "BLOCK",
    "CHOICES",
    "E2M1_MAX",
    "E4M3_MAX",
    "E4M3_MIN_SUBNORMAL",
    "GLOBAL_SCALE_MAXIMA",
    "PORTABLE",
    "PRESETS",
    "ROTATIONS",
    "SCALE_FORMULAS",
    "Recipe",
    "load_recipe",
]
