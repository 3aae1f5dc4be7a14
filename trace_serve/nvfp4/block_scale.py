"""The E4M3 scale of a block of 16, under each formula and zero-block rule of the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trace_serve.nvfp4 import e4m3
from trace_serve.recipe import BLOCK, E2M1_MAX, E4M3_MAX, Recipe

Operand = Literal["activations", "weights", "kv"]
OPERANDS: tuple[Operand, ...] = ("activations", "weights", "kv")


@dataclass(frozen=True)
class Rules:
    """What the recipe says about the rows and blocks of one operand; see `Recipe` for the meaning of each value.

    `token_scale` (`pow2_per_token` or `per_token`) and `scale_max` matter where a row's global scale is taken from it.
    """

    scale_formula: str
    reciprocal: str
    ties: str
    zero_block: str
    four_over_six: bool
    square_tiles: bool
    token_scale: str = "pow2_per_token"
    scale_max: float = E4M3_MAX


def rules(recipe: Recipe, operand: Operand) -> Rules:
    formula = {
        "activations": recipe.scale_formula,
        "weights": recipe.weight_scale_formula,
        "kv": recipe.kv_scale_formula,
    }[operand]
    searched = {"off": (), "weights": ("weights",), "experts": ("weights", "activations")}[recipe.four_over_six]
    from_tokens = operand == "activations" and recipe.activation_global_scale != "per_tensor_static"
    return Rules(
        scale_formula=formula,
        reciprocal=recipe.reciprocal,
        ties=recipe.ties,
        zero_block=recipe.zero_block,
        four_over_six=operand in searched,
        square_tiles=operand == "weights" and recipe.weight_tiles == "16x16",
        token_scale=recipe.activation_global_scale if from_tokens else "pow2_per_token",
        scale_max=recipe.global_scale_max if from_tokens else E4M3_MAX,
    )


PORTABLE_RULES = rules(Recipe(), "activations")
"""Those of the default recipe, for every operand."""


def unrounded(formula: str, amax: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    """The block scale before it is rounded to E4M3: fp32, the shape of `amax`."""
    # Filled, not copied from the host, which a CUDA graph cannot capture.
    six = torch.full((), E2M1_MAX, dtype=torch.float32, device=amax.device)
    sixth = torch.full((), 1.0 / E2M1_MAX, dtype=torch.float32, device=amax.device)
    if formula == "amax_times_sixth":
        return amax * (encode * sixth)
    if formula == "amax_over_six":
        return (amax / six) * encode
    if formula == "s_times_amax_sixth":
        return encode * (amax * sixth)
    return amax / (six * decode)


def fill_zero_scales(scale_bytes: Tensor, scale: Tensor, rule: str) -> Tensor:
    """Replaces bytes of 0, which `scale` rounded to, as the zero-block rule says; `zero` and `saturate` keep them."""
    if rule in ("zero", "saturate"):
        return scale_bytes
    filled = scale_bytes.masked_fill(scale_bytes == 0, e4m3.MIN_SUBNORMAL_BYTE)
    return filled.masked_fill(scale == 0, e4m3.ONE_BYTE) if rule == "one" else filled


def over_square_tiles(amax: Tensor) -> Tensor:
    """Block maxima [..., N, K/16] to those of the 16 x 16 tile that each block lies in, the same shape."""
    *lead, rows, blocks = amax.shape
    tiles = amax.reshape(*lead, rows // BLOCK, BLOCK, blocks).amax(dim=-2, keepdim=True)
    return tiles.expand(*lead, rows // BLOCK, BLOCK, blocks).reshape(amax.shape)
