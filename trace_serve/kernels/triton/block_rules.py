"""The block rules of a recipe as one compile-time number, and how device code reads it.

A number, because Triton keys compiled kernels by the text of their constants. The default recipe's rules are 0.
"""

from __future__ import annotations

import triton.language as tl

from trace_serve.errors import RecipeError
from trace_serve.kernels.triton._jit import constexpr_function
from trace_serve.nvfp4 import Rules
from trace_serve.recipe import SCALE_FORMULAS

AMAX_TIMES_SIXTH = tl.constexpr(0)
AMAX_OVER_SIX = tl.constexpr(1)
S_TIMES_AMAX_SIXTH = tl.constexpr(2)
AMAX_OVER_SIX_G = tl.constexpr(3)
"""`Recipe.scale_formula`, in the order of `SCALE_FORMULAS`."""

ZERO = tl.constexpr(0)
ONE = tl.constexpr(1)
MIN_SUBNORMAL = tl.constexpr(2)
SATURATE = tl.constexpr(3)
"""`Recipe.zero_block`."""

_ZERO_BLOCKS = ("zero", "one", "min_subnormal", "saturate")


def supports(rules: Rules) -> bool:
    """Whether the kernels here compute these rules: all but 4over6 and square tiles, which only weights have."""
    return not (rules.four_over_six or rules.square_tiles)


def number_of(rules: Rules) -> int:
    """The compile-time number of block rules.

    Raises:
        RecipeError: rules that are not supported.
    """
    if not supports(rules):
        raise RecipeError(
            "recipe: the Triton kernels compute neither 4over6 nor 16x16 tiles; quantize these with nvfp4.quantize",
            field="four_over_six" if rules.four_over_six else "weight_tiles",
        )
    number = SCALE_FORMULAS.index(rules.scale_formula) | _ZERO_BLOCKS.index(rules.zero_block) << 2
    return number | (rules.reciprocal == "divide") << 4 | (rules.ties == "up") << 5


@constexpr_function
def scale_formula(number: int) -> int:
    """One of the formulas above."""
    return number & 3


@constexpr_function
def zero_block(number: int) -> int:
    """One of the zero-block rules above."""
    return number >> 2 & 3


@constexpr_function
def divides(number: int) -> bool:
    """Whether values are divided by the scale rather than multiplied by its reciprocal."""
    return bool(number >> 4 & 1)


@constexpr_function
def ties_up(number: int) -> bool:
    """Whether E2M1 ties go to the larger magnitude rather than to the even code."""
    return bool(number >> 5 & 1)
