"""Quantization to NVFP4 and back, in plain torch: the definition that every other backend is compared with.

For a block of 16 values x along the last dimension, with global scale g and S = 1/g (all in fp32, each operation
rounded to nearest):

    scale byte = e4m3(amax * (S * fp32(1/6)))        saturating at 448, ties to even
    code       = e2m1(x * fp32(1 / (scale * g)))     saturating at 6, ties to even

A scale byte of 0 makes every code 0. A block with NaN or infinity gets scale byte 0x7F and codes 0, so that it reads
back as NaN, and is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_serve.errors import ShapeError
from trace_serve.nvfp4 import e2m1, e4m3, packing
from trace_serve.nvfp4.global_scale import activation_global_scale
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
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor


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
    scale = torch.as_tensor(g, dtype=torch.float32, device=x.device)
    try:
        scale.expand(x.shape[:-1])
    except RuntimeError as exc:
        raise ShapeError(
            f"global_scale: got shape {tuple(scale.shape)}, expected one that broadcasts to {tuple(x.shape[:-1])}",
            field="global_scale",
        ) from exc
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise ShapeError("global_scale: got a value that is not positive and finite", field="global_scale")
    return scale


def quantize(x: Tensor, global_scale: Tensor | float, recipe: Recipe, *, counters: Tensor | None = None) -> Quantized:
    """Quantizes along the last dimension under the recipe.

    Args:
        x: bfloat16, float16 or float32 [..., K], K a multiple of 16; any number of rows, none included.
        global_scale: positive fp32, broadcastable to [...].
        recipe: the numeric choices; all choices of this version share the formula of the module docstring.
        counters: int64 [3] to which the incidents are added in place (see INCIDENT_NAMES).

    Raises:
        ShapeError: see `check_blocks`; or a global scale of the wrong shape or not positive and finite.
    """
    check_blocks(x)
    g = _broadcast_global_scale(global_scale, x)
    blocks = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    finite = blocks.isfinite()
    block_is_finite = finite.all(dim=-1)
    g_block = g.unsqueeze(-1)

    amax = blocks.abs().masked_fill(~finite, 0).amax(dim=-1)
    unrounded = amax * (g_block.reciprocal() * torch.tensor(1.0 / E2M1_MAX, dtype=torch.float32, device=x.device))
    rounded = e4m3.encode(unrounded)
    scales = rounded.masked_fill(~block_is_finite, e4m3.NAN_BYTE)

    usable = (block_is_finite & (rounded != 0)).unsqueeze(-1)
    inverse = (e4m3.decode(rounded) * g_block).reciprocal().unsqueeze(-1)
    # Multiplying by a masked value would turn 0 * inf into NaN, so unusable blocks are masked after the product.
    u = (blocks * inverse).masked_fill(~usable, 0)
    codes = packing.pack(e2m1.encode(u).reshape(x.shape))
    if counters is not None:
        clipped = (unrounded > e4m3.CLIP_THRESHOLD).unsqueeze(-1) & (u.abs() > E2M1_MAX)
        underflow = block_is_finite & (rounded == 0) & (amax > 0)
        counters += torch.stack(((~finite).sum(), clipped.sum(), underflow.sum()))
    return Quantized(codes, scales, g)


def quantize_tokens(x: Tensor, recipe: Recipe, *, counters: Tensor | None = None) -> Quantized:
    """`quantize` with one power-of-two global scale a token, taken from the token's finite values."""
    check_blocks(x)
    return quantize(x, activation_global_scale(x, recipe), recipe, counters=counters)


def dequantize(q: Quantized, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """(code * block scale) * global scale, computed in fp32 and cast to `dtype` [..., K].

    With a power-of-two global scale the result is exact in bfloat16 and float32.
    """
    values = packing.unpack_values(q.codes)
    blocks = values.reshape(*q.scales.shape, BLOCK) * e4m3.decode(q.scales).unsqueeze(-1)
    blocks = blocks * q.global_scale.unsqueeze(-1).unsqueeze(-1)
    return blocks.reshape(values.shape).to(dtype)


def fake_quantize(x: Tensor, global_scale: Tensor | float, recipe: Recipe, *, counters: Tensor | None = None) -> Tensor:
    """The values that `quantize` keeps, in the shape and dtype of `x`. Raises as `quantize` does."""
    return dequantize(quantize(x, global_scale, recipe, counters=counters), x.dtype)


def count_incidents(x: Tensor, global_scale: Tensor | float, recipe: Recipe) -> dict[str, int]:
    """The incidents of quantizing `x`, by name."""
    counters = new_counters(x.device)
    quantize(x, global_scale, recipe, counters=counters)
    return dict(zip(INCIDENT_NAMES, counters.tolist(), strict=True))
