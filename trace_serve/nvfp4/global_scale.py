"""Global scales: powers of two, so that BF16 holds every NVFP4 value exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from trace_serve.recipe import Recipe

MIN_EXPONENT = -100
MAX_EXPONENT = 116
"""Bounds of the exponent: between them every code x block scale x global scale and its reciprocal is a normal fp32."""

# 2688 = 6 * 448 = 1.3125 * 2^11: amax / 2688 <= 2^e exactly when the fraction of amax is at most that of 1.3125.
_FRACTION_OF_2688 = 0x280000
_EXPONENT_BIAS_AND_2688 = 127 + 11


def pow2_exponent(amax: Tensor) -> Tensor:
    """ceil(log2(amax / 2688)) from the bits of `amax`, clamped to [MIN_EXPONENT, MAX_EXPONENT]; 0 where amax is 0.

    Args:
        amax: fp32, any shape, finite and not negative.

    Returns:
        int32, the shape of `amax`.
    """
    bits = amax.to(torch.float32).contiguous().view(torch.int32)
    above = (bits & 0x7FFFFF) > _FRACTION_OF_2688
    exponent = ((bits >> 23) - _EXPONENT_BIAS_AND_2688 + above).clamp(MIN_EXPONENT, MAX_EXPONENT)
    return exponent.masked_fill(bits == 0, 0).to(torch.int32)


def pow2_from_exponent(exponent: Tensor) -> Tensor:
    """2^exponent in fp32 for int exponents in [-126, 127]."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def pow2_global_scale(amax: Tensor) -> Tensor:
    """2^ceil(log2(amax / 2688)) in fp32: the smallest power of two under which no block scale exceeds 448.

    It is 1.0 where amax is 0. Below 2688 * 2^-100 the exponent stays at -100 and values may underflow; above
    2688 * 2^116 it stays at 116 and values may saturate; both are counted as incidents by the quantizer.
    """
    return pow2_from_exponent(pow2_exponent(amax))


def finite_amax(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """max |x| over `dim` in fp32, ignoring NaN and infinities; 0 where nothing is finite or nothing is there."""
    if x.numel() == 0:
        dims = (dim,) if isinstance(dim, int) else dim
        return x.float().sum(dim=dims)
    return x.to(torch.float32).abs().nan_to_num(0.0, 0.0, 0.0).amax(dim=dim)


def activation_global_scale(x: Tensor, recipe: Recipe) -> Tensor:
    """One scale a token: x [..., K] to fp32 [...] (`pow2_per_token`)."""
    return pow2_global_scale(finite_amax(x, -1))


def weight_global_scale(weight: Tensor, recipe: Recipe) -> Tensor:
    """One scale an expert: weight [E, N, K] to fp32 [E] (`pow2_per_expert`; gate and up rows are passed together)."""
    return pow2_global_scale(finite_amax(weight, (-2, -1)))


def kv_global_scale(recipe: Recipe) -> float:
    """The one constant of `pow2_static`."""
    return float(2.0**recipe.kv_global_scale_log2)
