"""Quantization to NVFP4 and back, in plain torch: the definition that every other backend is compared with.

For a block of 16 values x along the last dimension, with global scale g and S = 1/g (all in fp32, each operation
rounded to nearest), the default recipe gives

    scale byte = e4m3(amax * (S * fp32(1/6)))        saturating at 448, ties to even
    code       = e2m1(x * fp32(1 / (scale * g)))     saturating at 6, ties to even

and a scale byte of 0 makes every code 0. `Recipe` says what its other choices change. Under every recipe a block with
NaN or infinity gets scale byte 0x7F and codes 0, so that it reads back as NaN, and is counted.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_serve.errors import RecipeError, ShapeError
from trace_serve.nvfp4 import e2m1, e4m3, packing
from trace_serve.nvfp4.block_scale import Operand, Rules, fill_zero_scales, over_square_tiles, rules, unrounded
from trace_serve.nvfp4.global_scale import FLOAT32_MAX, matrix_global_scale, token_global_scale
from trace_serve.recipe import BLOCK, E2M1_MAX, Recipe

INCIDENT_NAMES = ("nonfinite", "saturated", "underflow_blocks")
"""Meaning of the three counters: non-finite values; finite values clipped because their block scale was clipped at
448; blocks with a non-zero value whose scale rounded to 0."""


@dataclass(frozen=True)
class Quantized:
    """NVFP4 data of a tensor [..., K].

    Attributes:
        codes: uint8 [..., K/2], two E2M1 codes a byte, even index in the low nibble.
        scales: uint8 [..., K/16], E4M3 bytes in row order.
        global_scale: fp32, broadcastable to [...].
        hints: uint16 [..., K/16], the lowest bit of every code, where a kernel was asked for them; otherwise None, and
            `hint_bits(codes)` gives them.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    hints: Tensor | None = None


def new_counters(device: torch.device | str = "cpu") -> Tensor:
    """int64 [3] zeros in the order of INCIDENT_NAMES, to be passed as `counters`."""
    return torch.zeros(len(INCIDENT_NAMES), dtype=torch.int64, device=device)


def check_blocks(x: Tensor, name: str = "x") -> None:
    """Refuses a tensor that cannot be cut into blocks of 16 along its last dimension.

    Raises:
        ShapeError: wrong dtype, no dimension, or a last dimension that is not a multiple of 16.
    """
    if x.dtype not in (torch.bfloat16, torch.float32, torch.float16):
        raise ShapeError(f"{name}: dtype is {x.dtype}, expected bfloat16, float16 or float32", field=name)
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        got = "a scalar" if x.dim() == 0 else f"a last dimension of {x.shape[-1]}"
        raise ShapeError(f"{name}: got {got}, expected a last dimension that is a multiple of {BLOCK}", field=name)


def _broadcast_global_scale(g: Tensor | float, x: Tensor) -> Tensor:
    if isinstance(g, Tensor):
        scale = g.to(device=x.device, dtype=torch.float32)
    else:
        scale = torch.full((), g, dtype=torch.float32, device=x.device)
    try:
        scale.expand(x.shape[:-1])
    except RuntimeError as exc:
        raise ShapeError(
            f"global_scale: got shape {tuple(scale.shape)}, expected one that broadcasts to {tuple(x.shape[:-1])}",
            field="global_scale",
        ) from exc
    good = (scale > 0) & scale.isfinite()
    if not isinstance(g, Tensor):
        refused = not (g > 0 and math.isfinite(g))
    elif scale.device.type == "cpu":
        refused = not bool(good.all())
    else:
        # The host does not wait for the device; what such a scale belongs to reads back as NaN.
        return torch.where(good, scale, torch.nan)
    if refused:
        raise ShapeError("global_scale: got a value that is not positive and finite", field="global_scale")
    return scale


@dataclass(frozen=True)
class _Blocks:
    """One candidate for a tensor's blocks: scales [..., K/16], values before rounding and codes [..., K/16, 16]."""

    scale: Tensor
    scale_byte: Tensor
    u: Tensor
    codes: Tensor


def _round_blocks(blocks: Tensor, scale: Tensor, usable: Tensor, decode: Tensor, rules: Rules) -> _Blocks:
    rounded = e4m3.encode(scale)
    scale_byte = fill_zero_scales(rounded, scale, rules.zero_block)
    divisor = e4m3.decode(scale_byte) * decode
    if rules.reciprocal == "divide":
        u = blocks / divisor.unsqueeze(-1)
    else:
        u = blocks * divisor.reciprocal().clamp(max=FLOAT32_MAX).unsqueeze(-1)
    if rules.zero_block == "saturate":
        empty = (rounded == 0) & (blocks == 0).all(dim=-1)
        # FlashInfer keeps the sign of -0 in a block of zeros, but not in its 4over6 path.
        u = torch.where(empty.unsqueeze(-1), torch.zeros_like(blocks) if rules.four_over_six else blocks, u)
    else:
        usable = usable & (scale_byte != 0)
    # Multiplying by a masked value would turn 0 * inf into NaN, so unusable blocks are masked after the product.
    u = u.masked_fill(~usable.unsqueeze(-1), 0)
    return _Blocks(scale, scale_byte, u, e2m1.encode(u, rules.ties))


def _squared_error(candidate: _Blocks, blocks: Tensor, encode: Tensor) -> Tensor:
    """Sum over the block, in order, of (code * block scale - x * S)^2."""
    kept = e2m1.decode(candidate.codes) * e4m3.decode(candidate.scale_byte).unsqueeze(-1)
    squares = (kept - blocks * encode.unsqueeze(-1)).square()
    total = squares[..., 0].clone()
    for i in range(1, BLOCK):
        total += squares[..., i]
    return total


def _choose(six: _Blocks, four: _Blocks, blocks: Tensor, encode: Tensor) -> _Blocks:
    take_four = _squared_error(four, blocks, encode) < _squared_error(six, blocks, encode)
    wide = take_four.unsqueeze(-1)
    return _Blocks(
        torch.where(take_four, four.scale, six.scale),
        torch.where(take_four, four.scale_byte, six.scale_byte),
        torch.where(wide, four.u, six.u),
        torch.where(wide, four.codes, six.codes),
    )


def quantize(
    x: Tensor,
    global_scale: Tensor | float,
    recipe: Recipe,
    *,
    operand: Operand = "activations",
    encode_scale: Tensor | None = None,
    counters: Tensor | None = None,
) -> Quantized:
    """Quantizes along the last dimension under the recipe.

    Args:
        x: bfloat16, float16 or float32 [..., K], K a multiple of 16; any number of rows, none included.
        global_scale: positive fp32, broadcastable to [...]. A tensor on a GPU is not waited for: there a scale that is
            not positive and finite makes its rows read back as NaN.
        recipe: the numeric choices.
        operand: whose choices of the recipe apply.
        encode_scale: S [...] where the recipe starts from it (`GlobalScale.encode`); the arithmetic then uses S and
            1/S, and `global_scale` is only kept.
        counters: int64 [3] to which the incidents are added in place (see INCIDENT_NAMES).

    Raises:
        ShapeError: see `check_blocks`; a global scale of the wrong shape or not positive and finite; or square weight
            tiles over rows that are not a multiple of 16.
    """
    return quantize_under(x, global_scale, rules(recipe, operand), encode_scale=encode_scale, counters=counters)


def quantize_under(
    x: Tensor,
    global_scale: Tensor | float,
    applied: Rules,
    *,
    encode_scale: Tensor | None = None,
    counters: Tensor | None = None,
) -> Quantized:
    """`quantize` with the rules of an operand in place of the recipe and the operand's name."""
    check_blocks(x)
    if applied.square_tiles and (x.dim() < 2 or x.shape[-2] % BLOCK):
        raise ShapeError(
            f"x: got shape {tuple(x.shape)}, expected a multiple of {BLOCK} rows for weight_tiles '16x16'", field="x"
        )
    g = _broadcast_global_scale(global_scale, x)
    encode = (g.reciprocal() if encode_scale is None else encode_scale).unsqueeze(-1)
    decode = g.unsqueeze(-1) if encode_scale is None else encode.reciprocal()

    blocks = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    finite = blocks.isfinite()
    usable = finite.all(dim=-1)
    amax = blocks.abs().masked_fill(~finite, 0).amax(dim=-1)
    peak = over_square_tiles(amax) if applied.square_tiles else amax
    scale = unrounded(applied.scale_formula, peak, encode, decode)
    chosen = _round_blocks(blocks, scale, usable, decode, applied)
    if applied.four_over_six:
        larger = _round_blocks(blocks, scale * 1.5, usable, decode, applied)
        chosen = _choose(chosen, larger, blocks, encode)

    codes = packing.pack(chosen.codes.reshape(x.shape))
    scales = chosen.scale_byte.masked_fill(~usable, e4m3.NAN_BYTE)
    if counters is not None:
        clipped = (chosen.scale > e4m3.CLIP_THRESHOLD).unsqueeze(-1) & (chosen.u.abs() > E2M1_MAX)
        underflow = usable & (e4m3.encode(chosen.scale) == 0) & (amax > 0)
        counters += torch.stack(((~finite).sum(), clipped.sum(), underflow.sum()))
    return Quantized(codes, scales, g)


def quantize_tokens(
    x: Tensor, recipe: Recipe, *, static_scale: float | None = None, counters: Tensor | None = None
) -> Quantized:
    """`quantize` of activations with one global scale a token, or with the recipe's static scale of the site.

    Raises:
        RecipeError: `per_tensor_static` without `static_scale`, or a `static_scale` that the recipe does not use.
        ShapeError: as `quantize` does.
    """
    check_blocks(x)
    if static_scale is None:
        scale = token_global_scale(x, recipe)
        return quantize(x, scale.decode, recipe, encode_scale=scale.encode, counters=counters)
    if recipe.activation_global_scale != "per_tensor_static":
        raise RecipeError(
            f"recipe activation_global_scale: {recipe.activation_global_scale!r} takes the scale from each token; "
            "leave static_scale out",
            field="activation_global_scale",
        )
    kept = quantize(x, static_scale, recipe, counters=counters)
    return dataclasses.replace(kept, global_scale=kept.global_scale.expand(x.shape[:-1]).contiguous())


def quantize_weight(weight: Tensor, recipe: Recipe, *, parts: int = 1, counters: Tensor | None = None) -> Quantized:
    """Quantizes matrices along their last dimension.

    Args:
        weight: [..., N, K]; for gated experts gate and up rows follow each other.
        recipe: the numeric choices.
        parts: equal groups of rows that have a global scale of their own where `gate_up_scale` is `split` (2 for gate
            and up).
        counters: int64 [3] to which the incidents are added in place.

    Returns:
        `Quantized` with global_scale [..., N], one entry a row.

    Raises:
        ShapeError: no matrix, rows that do not divide into `parts`, or as `quantize` does.
    """
    check_blocks(weight, "weight")
    if weight.dim() < 2 or parts < 1 or weight.shape[-2] % parts:
        raise ShapeError(
            f"weight: got shape {tuple(weight.shape)}, expected [..., N, K] with N a multiple of {parts} parts",
            field="weight",
        )
    groups = parts if recipe.gate_up_scale == "split" else 1
    rows = weight.shape[-2] // groups
    scale = matrix_global_scale(weight.reshape(*weight.shape[:-2], groups, rows, weight.shape[-1]), recipe)
    decode = scale.decode.repeat_interleave(rows, dim=-1)
    encode = None if scale.encode is None else scale.encode.repeat_interleave(rows, dim=-1)
    return quantize(weight, decode, recipe, operand="weights", encode_scale=encode, counters=counters)


def dequantize(q: Quantized, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """(code * block scale) * global scale, computed in fp32 and cast to `dtype` [..., K].

    With a power-of-two global scale the result is exact in bfloat16 and float32.
    """
    values = packing.unpack_values(q.codes)
    blocks = values.reshape(*q.scales.shape, BLOCK) * e4m3.decode(q.scales).unsqueeze(-1)
    blocks = blocks * q.global_scale.unsqueeze(-1).unsqueeze(-1)
    return blocks.reshape(values.shape).to(dtype)


def count_incidents(x: Tensor, global_scale: Tensor | float, recipe: Recipe) -> dict[str, int]:
    """The incidents of quantizing `x`, by name."""
    counters = new_counters(x.device)
    quantize(x, global_scale, recipe, counters=counters)
    return dict(zip(INCIDENT_NAMES, counters.tolist(), strict=True))
