"""Global scales: powers of two, under which BF16 holds every NVFP4 value exactly, or FP32 ones as in the field."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_serve.errors import RecipeError
from trace_serve.nvfp4.block_scale import Rules, rules
from trace_serve.recipe import E2M1_MAX, E4M3_MAX, Recipe

MIN_EXPONENT = -100
MAX_EXPONENT = 116
"""Bounds of the exponent: between them every code x block scale x global scale and its reciprocal is a normal fp32."""

FLOAT32_MAX = float(torch.finfo(torch.float32).max)

# A maximum M = fraction * 2^k: amax / M <= 2^e exactly when the fraction of amax is at most that of M.
_FRACTION_AND_BIAS = {E4M3_MAX: (0x280000, 127 + 11), 256.0: (0x400000, 127 + 10)}


def pow2_fraction_and_bias(scale_max: float) -> tuple[int, int]:
    """Mantissa bits of 6 * scale_max, and what to take from the exponent bits of a maximum, as `pow2_exponent` does."""
    return _FRACTION_AND_BIAS[scale_max]


def pow2_exponent(amax: Tensor, scale_max: float = E4M3_MAX) -> Tensor:
    """ceil(log2(amax / (6 * scale_max))) from the bits of `amax`, clamped to [MIN_EXPONENT, MAX_EXPONENT].

    Args:
        amax: fp32, any shape, finite and not negative; 0 gives exponent 0.
        scale_max: 448 or 256.

    Returns:
        int32, the shape of `amax`.
    """
    fraction, bias = pow2_fraction_and_bias(scale_max)
    bits = amax.to(torch.float32).contiguous().view(torch.int32)
    above = (bits & 0x7FFFFF) > fraction
    exponent = ((bits >> 23) - bias + above).clamp(MIN_EXPONENT, MAX_EXPONENT)
    return exponent.masked_fill(bits == 0, 0).to(torch.int32)


def pow2_from_exponent(exponent: Tensor) -> Tensor:
    """2^exponent in fp32 for int exponents in [-126, 127]."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def pow2_global_scale(amax: Tensor, scale_max: float = E4M3_MAX) -> Tensor:
    """2^ceil(log2(amax / (6 * scale_max))) in fp32: the smallest power of two that keeps block scales in bounds.

    It is 1.0 where amax is 0. With 448, below 2688 * 2^-100 the exponent stays at -100 and values may underflow; above
    2688 * 2^116 it stays at 116 and values may saturate; both are counted as incidents by the quantizer.
    """
    return pow2_from_exponent(pow2_exponent(amax, scale_max))


def finite_amax(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """max |x| over `dim` in fp32, ignoring NaN and infinities; 0 where nothing is finite or nothing is there."""
    if x.numel() == 0:
        dims = (dim,) if isinstance(dim, int) else dim
        return x.float().sum(dim=dims)
    return x.to(torch.float32).abs().nan_to_num(0.0, 0.0, 0.0).amax(dim=dim)


@dataclass(frozen=True)
class GlobalScale:
    """A global scale as it is kept, and as it is computed with.

    Attributes:
        decode: fp32 g, kept with the codes.
        encode: fp32 S where the recipe starts from it, so that the arithmetic uses S and 1/S; None where it starts from
            g and uses 1/g and g. With powers of two it makes no difference.
    """

    decode: Tensor
    encode: Tensor | None


def _maximum(like: Tensor, scale_max: float) -> Tensor:
    """6 * scale_max as a tensor: torch divides a Python number by a tensor, or the reverse on a card, through a
    reciprocal that is rounded first."""
    return torch.full((), E2M1_MAX * scale_max, dtype=torch.float32, device=like.device)


def token_global_scale(x: Tensor, recipe: Recipe) -> GlobalScale:
    """One scale a token from its finite values: x [..., K] to fp32 [...].

    Raises:
        RecipeError: the recipe has static scales, which are not computed from the token.
    """
    if recipe.activation_global_scale == "per_tensor_static":
        raise RecipeError(
            "recipe activation_global_scale: 'per_tensor_static' takes its scale from the recipe, not from a token; "
            "pass global_scale",
            field="activation_global_scale",
        )
    return row_global_scale(x, rules(recipe, "activations"))


def row_global_scale(x: Tensor, applied: Rules) -> GlobalScale:
    """One scale a row as `applied.token_scale` says: x [..., K] to fp32 [...]."""
    amax = finite_amax(x, -1)
    if applied.token_scale == "pow2_per_token":
        return GlobalScale(pow2_global_scale(amax, applied.scale_max), None)
    encode = (_maximum(amax, applied.scale_max) / amax).clamp(max=FLOAT32_MAX)
    return GlobalScale(encode.reciprocal(), encode)


def matrix_global_scale(weight: Tensor, recipe: Recipe) -> GlobalScale:
    """One scale a matrix: weight [..., N, K] to fp32 [...] (gate and up rows are passed together if they share one)."""
    amax = finite_amax(weight, (-2, -1))
    if recipe.weight_global_scale == "pow2_per_expert":
        return GlobalScale(pow2_global_scale(amax, recipe.global_scale_max), None)
    decode = torch.where(amax > 0, amax / _maximum(amax, recipe.global_scale_max), torch.ones_like(amax))
    # ModelOpt's formula divides by g and never forms S.
    starts_from_g = recipe.weight_scale_formula == "amax_over_six_g"
    return GlobalScale(decode, None if starts_from_g else decode.reciprocal())


def activation_global_scale(x: Tensor, recipe: Recipe) -> Tensor:
    """The scale kept for each token: x [..., K] to fp32 [...]. Raises as `token_global_scale` does."""
    return token_global_scale(x, recipe).decode


def weight_global_scale(weight: Tensor, recipe: Recipe) -> Tensor:
    """The scale kept for each matrix: weight [E, N, K] to fp32 [E]."""
    return matrix_global_scale(weight, recipe).decode
