"""Device functions that load, rotate and quantize blocks of 16 values, one block a lane.

All of a block's values stay in one lane, so its maximum and the packing need no exchange between lanes. A set of n
blocks is held either packed, as two uint32 tensors [n, 4] of BF16 pairs (values 0..7 and 8..15), or as four fp32
tensors [n, 4]: values 0, 2, 4, 6 of each block, then 1, 3, 5, 7, then 8, 10, 12, 14, then 9, 11, 13, 15.
"""

from __future__ import annotations

import triton.language as tl

from trace_serve.kernels.triton._jit import jit
from trace_serve.kernels.triton.formats import (
    bf16_pair,
    bits_of,
    e2m1_value,
    e2m1_word,
    e4m3_byte,
    e4m3_value,
    float_of,
    hint_word,
    join4,
    split4,
)
from trace_serve.kernels.triton.silu import silu_times

_INF = tl.constexpr(0x7F800000)
_SIXTH = tl.constexpr(0.1666666716337204)
_CLIP = tl.constexpr(464.0)


@jit
def load_pairs(x: tl.tensor, block: tl.tensor, mask: tl.tensor) -> tl.tuple:
    """Blocks at int64 `block` [n] of BF16 pairs (int32 pointer), packed; masked blocks are zeros.

    A block is two 16-byte loads.
    """
    pairs = x + (block * 8)[:, None] + tl.arange(0, 4)[None, :]
    a = tl.load(pairs, mask=mask[:, None], other=0)
    b = tl.load(pairs + 4, mask=mask[:, None], other=0)
    return a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)


@jit
def load_fp32(x: tl.tensor, block: tl.tensor, mask: tl.tensor) -> tl.tuple:
    """Blocks at int64 `block` [n] of fp32 values, unpacked; masked blocks are zeros."""
    quads = x + (block * 16)[:, None] + tl.arange(0, 4)[None, :]
    x0, x1, x2, x3 = split4(tl.load(quads, mask=mask[:, None], other=0.0))
    x4, x5, x6, x7 = split4(tl.load(quads + 4, mask=mask[:, None], other=0.0))
    a_low, a_high = join4(x0, x2, x4, x6), join4(x1, x3, x5, x7)
    x0, x1, x2, x3 = split4(tl.load(quads + 8, mask=mask[:, None], other=0.0))
    x4, x5, x6, x7 = split4(tl.load(quads + 12, mask=mask[:, None], other=0.0))
    return a_low, a_high, join4(x0, x2, x4, x6), join4(x1, x3, x5, x7)


@jit
def unpack_pairs(pairs: tl.tuple) -> tl.tuple:
    """Packed blocks to fp32. Shifting is what a BF16 conversion does; unlike it, the interpreter keeps subnormals."""
    a, b = pairs
    return float_of(a << 16), float_of(a & 0xFFFF0000), float_of(b << 16), float_of(b & 0xFFFF0000)


@jit
def values_of(held: tl.tuple, packed: tl.constexpr) -> tl.tuple:
    """The four fp32 tensors of blocks held either way."""
    values = held
    if packed:
        values = unpack_pairs(held)
    return values


@jit
def rotate_blocks(values: tl.tuple, width: tl.constexpr, factor: tl.constexpr) -> tl.tuple:
    """`nvfp4.rotate` with the same order of sums; groups of width/16 consecutive blocks form one rotation."""
    a_low, a_high, b_low, b_high = values
    a_low, a_high = a_low + a_high, a_low - a_high
    b_low, b_high = b_low + b_high, b_low - b_high
    a_low, a_high = _butterfly4(a_low), _butterfly4(a_high)
    b_low, b_high = _butterfly4(b_low), _butterfly4(b_high)
    a_low, b_low = a_low + b_low, a_low - b_low
    a_high, b_high = a_high + b_high, a_high - b_high
    if width >= 32:
        a_low, a_high = _butterfly_lanes(a_low, 1), _butterfly_lanes(a_high, 1)
        b_low, b_high = _butterfly_lanes(b_low, 1), _butterfly_lanes(b_high, 1)
    if width >= 64:
        a_low, a_high = _butterfly_lanes(a_low, 2), _butterfly_lanes(a_high, 2)
        b_low, b_high = _butterfly_lanes(b_low, 2), _butterfly_lanes(b_high, 2)
    if width >= 128:
        a_low, a_high = _butterfly_lanes(a_low, 4), _butterfly_lanes(a_high, 4)
        b_low, b_high = _butterfly_lanes(b_low, 4), _butterfly_lanes(b_high, 4)
    return a_low * factor, a_high * factor, b_low * factor, b_high * factor


@jit
def load_blocks(
    x: tl.tensor,
    block: tl.tensor,
    mask: tl.tensor,
    packed: tl.constexpr,
    gate_blocks: tl.constexpr,
    rotation: tl.constexpr,
    factor: tl.constexpr,
    level: tl.constexpr,
) -> tl.tuple:
    """Blocks of BF16 pairs (`packed`) or of fp32, rotated if asked; held packed only if they are not rotated.

    With `gate_blocks`, a row of x is that many blocks of gate and as many of up, and the blocks are silu(gate) * up.
    """
    if packed:
        held = load_pairs(x, block, mask)
        if gate_blocks > 0:
            held = _gated(held, load_pairs(x, block + gate_blocks, mask), level)
        if rotation > 0:
            held = rotate_blocks(unpack_pairs(held), rotation, factor)
    else:
        held = load_fp32(x, block, mask)
        if rotation > 0:
            held = rotate_blocks(held, rotation, factor)
    return held


@jit
def _gated(gate: tl.tuple, up: tl.tuple, level: tl.constexpr) -> tl.tuple:
    gate_a_low, gate_a_high, gate_b_low, gate_b_high = unpack_pairs(gate)
    up_a_low, up_a_high, up_b_low, up_b_high = unpack_pairs(up)
    a = bf16_pair(silu_times(gate_a_low, up_a_low), silu_times(gate_a_high, up_a_high), level)
    b = bf16_pair(silu_times(gate_b_low, up_b_low), silu_times(gate_b_high, up_b_high), level)
    return a, b


@jit
def _butterfly4(x: tl.tensor) -> tl.tensor:
    x0, x1, x2, x3 = split4(x)
    x0, x1 = x0 + x1, x0 - x1
    x2, x3 = x2 + x3, x2 - x3
    return join4(x0 + x2, x1 + x3, x0 - x2, x1 - x3)


@jit
def _butterfly_lanes(x: tl.tensor, stride: tl.constexpr) -> tl.tensor:
    """low + high and low - high of blocks `stride` apart, as two sums over pairs of lanes."""
    n: tl.constexpr = x.shape[0]
    pairs = tl.reshape(x, [n // (2 * stride), 2, stride, 4])
    is_high = (tl.arange(0, 2) == 1)[None, :, None, None]
    total = tl.expand_dims(tl.sum(pairs, axis=1), 1)
    difference = tl.expand_dims(tl.sum(tl.where(is_high, -pairs, pairs), axis=1), 1)
    return tl.reshape(tl.where(is_high, difference, total), [n, 4])


@jit
def block_top(held: tl.tuple, packed: tl.constexpr) -> tl.tensor:
    """The fp32 bits [n] of the largest magnitude; at least those of infinity where a value is not finite."""
    if packed:
        # Both halves of a pair are compared in place, so that the values need not be kept unpacked until they are used.
        a, b = held
        a = a & 0x7FFF7FFF
        b = b & 0x7FFF7FFF
        top = tl.maximum(tl.maximum(a, b) & 0xFFFF0000, tl.maximum(a << 16, b << 16))
    else:
        a_low, a_high, b_low, b_high = held
        a = tl.maximum(_magnitude(a_low), _magnitude(a_high))
        top = tl.maximum(a, tl.maximum(_magnitude(b_low), _magnitude(b_high)))
    return tl.max(top, axis=1)


@jit
def finite_block_top(held: tl.tuple, packed: tl.constexpr) -> tl.tensor:
    """The fp32 bits [n] of the largest finite magnitude; 0 where there is none."""
    a_low, a_high, b_low, b_high = values_of(held, packed)
    a = tl.maximum(_finite_magnitude(a_low), _finite_magnitude(a_high))
    b = tl.maximum(_finite_magnitude(b_low), _finite_magnitude(b_high))
    return tl.max(tl.maximum(a, b), axis=1)


@jit
def _magnitude(x: tl.tensor) -> tl.tensor:
    return bits_of(x) & 0x7FFFFFFF


@jit
def _finite_magnitude(x: tl.tensor) -> tl.tensor:
    magnitude = _magnitude(x)
    return tl.where(magnitude < _INF, magnitude, 0)


@jit
def quantize_blocks(
    held: tl.tuple,
    packed: tl.constexpr,
    top: tl.tensor,
    g: tl.tensor,
    inverse_g: tl.tensor,
    level: tl.constexpr,
) -> tl.tuple:
    """The formula of `nvfp4.quantize`, in its order of roundings.

    Args:
        held, packed: the blocks.
        top: their `block_top`.
        g, inverse_g: fp32 [n] or scalars, the global scale and fp32(1 / g).

    Returns:
        Packed codes of values 0..7 and of 8..15 and the scale byte, each uint32 [n]; then the
        scale before rounding and the factor that the values were multiplied by, fp32 [n].
    """
    a_low, a_high, b_low, b_high = values_of(held, packed)
    finite = top < _INF
    unrounded = tl.where(finite, float_of(top) * (inverse_g * _SIXTH), 0.0)
    byte = e4m3_byte(unrounded, level)
    usable = byte != 0
    inverse = tl.div_rn(tl.full(top.shape, 1.0, tl.float32), tl.where(usable, e4m3_value(byte) * g, 1.0))
    factor = tl.expand_dims(inverse, 1)
    first = tl.where(usable, e2m1_word(a_low * factor, a_high * factor, level), 0)
    second = tl.where(usable, e2m1_word(b_low * factor, b_high * factor, level), 0)
    return first, second, tl.where(finite, byte, 0x7F), unrounded, inverse


@jit
def has_incident(top: tl.tensor, quantized: tl.tuple) -> tl.tensor:
    """int32 [n], 1 where a block is not finite, was clipped, or underflowed."""
    underflow = (quantized[2] == 0) & (top != 0)
    return tl.where((quantized[3] > _CLIP) | underflow | (top >= _INF), 1, 0)


@jit
def count_incidents(
    counters: tl.tensor,
    held: tl.tuple,
    packed: tl.constexpr,
    g: tl.tensor,
    inverse_g: tl.tensor,
    level: tl.constexpr,
) -> None:
    """Adds the incidents of quantizing the blocks to int64 [3], in the order of `nvfp4.INCIDENT_NAMES`."""
    top = block_top(held, packed)
    quantized = quantize_blocks(held, packed, top, g, inverse_g, level)
    a_low, a_high, b_low, b_high = values_of(held, packed)
    factor = tl.expand_dims(quantized[4], 1)
    nonfinite = _count(_magnitude(a_low) >= _INF) + _count(_magnitude(a_high) >= _INF)
    nonfinite += _count(_magnitude(b_low) >= _INF) + _count(_magnitude(b_high) >= _INF)
    over = _count(tl.abs(a_low * factor) > 6.0) + _count(tl.abs(a_high * factor) > 6.0)
    over += _count(tl.abs(b_low * factor) > 6.0) + _count(tl.abs(b_high * factor) > 6.0)
    saturated = tl.where(quantized[3] > _CLIP, over, 0)
    underflow = tl.where((quantized[2] == 0) & (top != 0), 1, 0)
    tl.atomic_add(counters, tl.sum(nonfinite, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(counters + 1, tl.sum(saturated, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(counters + 2, tl.sum(underflow, axis=0).to(tl.int64), sem="relaxed")


@jit
def _count(flags: tl.tensor) -> tl.tensor:
    return tl.sum(tl.where(flags, 1, 0), axis=1)


@jit
def store_codes(codes: tl.tensor, scales: tl.tensor, block: tl.tensor, quantized: tl.tuple, mask: tl.tensor) -> None:
    """Stores 8 bytes of codes (int64 pointer) and one scale byte a block at int64 `block` [n]."""
    word = quantized[0].to(tl.uint64) | (quantized[1].to(tl.uint64) << 32)
    tl.store(codes + block, word.to(tl.int64, bitcast=True), mask=mask)
    tl.store(scales + block, quantized[2].to(tl.uint8), mask=mask)


@jit
def store_hints(hints: tl.tensor, block: tl.tensor, quantized: tl.tuple, mask: tl.tensor) -> None:
    """Stores 16 hint bits a block (int16 pointer)."""
    tl.store(hints + block, hint_word(quantized[0], quantized[1]).to(tl.int16), mask=mask)


@jit
def store_values(
    values: tl.tensor, block: tl.tensor, quantized: tl.tuple, g: tl.tensor, mask: tl.tensor, level: tl.constexpr
) -> None:
    """Stores the BF16 values that codes and scales stand for, as pairs (int32 pointer)."""
    pairs = values + (block * 8)[:, None] + tl.arange(0, 4)[None, :]
    low = dequantize8(quantized[0], quantized[2], g, level)
    high = dequantize8(quantized[1], quantized[2], g, level)
    tl.store(pairs, low.to(tl.int32, bitcast=True), mask=mask[:, None])
    tl.store(pairs + 4, high.to(tl.int32, bitcast=True), mask=mask[:, None])


@jit
def dequantize8(word: tl.tensor, byte: tl.tensor, g: tl.tensor, level: tl.constexpr) -> tl.tensor:
    """Eight packed codes (uint32 [n]) with scale byte (uint32 [n]) to four BF16 pairs, uint32 [n, 4].

    (code * scale) * g in fp32, rounded to BF16, as in `nvfp4.dequantize`; `g` is fp32 [n].
    """
    scale = tl.expand_dims(e4m3_value(byte), 1)
    g = tl.expand_dims(g, 1)
    codes = tl.expand_dims(word, 1) >> (tl.arange(0, 4) * 8).to(tl.uint32)[None, :]
    low = (e2m1_value(codes & 0xF) * scale) * g
    high = (e2m1_value((codes >> 4) & 0xF) * scale) * g
    return bf16_pair(low, high, level)
