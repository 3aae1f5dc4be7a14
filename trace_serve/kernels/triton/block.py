"""Device functions that quantize blocks held as `load` says, count what went wrong, and store the outcome."""

from __future__ import annotations

import triton.language as tl

from trace_serve.kernels.triton import block_rules
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
)
from trace_serve.kernels.triton.load import values_of

_INF = tl.constexpr(0x7F800000)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_SIXTH = tl.constexpr(0.1666666716337204)
_CLIP = tl.constexpr(464.0)


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
    encode: tl.tensor,
    decode: tl.tensor,
    rules: tl.constexpr,
    level: tl.constexpr,
) -> tl.tuple:
    """The formulas of `nvfp4.quantize`, in their order of roundings.

    Args:
        held, packed: the blocks.
        top: their `block_top`.
        encode, decode: fp32 [n] or scalars: S and the global scale that the arithmetic uses.
        rules: see `block_rules`.

    Returns:
        Packed codes of values 0..7 and of 8..15 and the scale byte, each uint32 [n]; the scale before it is rounded and
        what the values were multiplied or divided by, fp32 [n]; whether the scale rounded to zero.
    """
    a_low, a_high, b_low, b_high = values_of(held, packed)
    finite = top < _INF
    amax = tl.where(finite, float_of(top), 0.0)
    unrounded = unrounded_scale(amax, encode, decode, rules)
    byte = e4m3_byte(unrounded, level)
    vanished = byte == 0
    fill: tl.constexpr = block_rules.zero_block(rules)
    if fill == block_rules.ONE:
        byte = tl.where(vanished, tl.where(unrounded == 0.0, 0x38, 1), byte)
    if fill == block_rules.MIN_SUBNORMAL:
        byte = tl.where(vanished, 1, byte)
    usable = finite
    if fill == block_rules.ZERO:
        usable = byte != 0
    divisor = tl.where(usable, e4m3_value(byte) * decode, 1.0)
    divide: tl.constexpr = block_rules.divides(rules)
    one = tl.full(top.shape, 1.0, tl.float32)
    factor = divisor if divide else tl.minimum(tl.div_rn(one, divisor), _LARGEST)
    first = e2m1_word(_scaled(a_low, factor, rules), _scaled(a_high, factor, rules), level)
    second = e2m1_word(_scaled(b_low, factor, rules), _scaled(b_high, factor, rules), level)
    first = tl.where(usable, first, 0)
    second = tl.where(usable, second, 0)
    return first, second, tl.where(finite, byte, 0x7F), unrounded, factor, vanished


@jit
def unrounded_scale(amax: tl.tensor, encode: tl.tensor, decode: tl.tensor, rules: tl.constexpr) -> tl.tensor:
    """`nvfp4.block_scale.unrounded`."""
    formula: tl.constexpr = block_rules.scale_formula(rules)
    if formula == block_rules.AMAX_TIMES_SIXTH:
        scale = amax * (encode * _SIXTH)
    elif formula == block_rules.AMAX_OVER_SIX:
        scale = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)) * encode
    elif formula == block_rules.S_TIMES_AMAX_SIXTH:
        scale = encode * (amax * _SIXTH)
    else:
        scale = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32) * decode)
    return scale


@jit
def _scaled(x: tl.tensor, factor: tl.tensor, rules: tl.constexpr) -> tl.tensor:
    """Values [n, 4] in units of their block's scale, ready for rounding to E2M1 with ties to even."""
    u = over(x, factor, rules)
    ties_up: tl.constexpr = block_rules.ties_up(rules)
    if ties_up:
        # Midpoints have a zero in their lowest bit: setting it lifts ties and moves nothing else past one.
        bits = bits_of(u)
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x7F7FFFFF) | 1
        u = float_of((bits & 0x80000000) | magnitude)
    return u


@jit
def over(x: tl.tensor, factor: tl.tensor, rules: tl.constexpr) -> tl.tensor:
    """Values [n, 4] divided by their block's factor [n], or times it, as the rules say."""
    wide = tl.expand_dims(factor, 1)
    divide: tl.constexpr = block_rules.divides(rules)
    return tl.div_rn(x, tl.broadcast_to(wide, x.shape)) if divide else x * wide


@jit
def has_incident(top: tl.tensor, quantized: tl.tuple) -> tl.tensor:
    """int32 [n], 1 where a block is not finite, was clipped, or underflowed."""
    underflow = quantized[5] & (top != 0)
    return tl.where((quantized[3] > _CLIP) | underflow | (top >= _INF), 1, 0)


@jit
def count_incidents(
    counters: tl.tensor,
    held: tl.tuple,
    packed: tl.constexpr,
    encode: tl.tensor,
    decode: tl.tensor,
    rules: tl.constexpr,
    level: tl.constexpr,
) -> None:
    """Adds the incidents of quantizing the blocks to int64 [3], in the order of `nvfp4.INCIDENT_NAMES`."""
    top = block_top(held, packed)
    quantized = quantize_blocks(held, packed, top, encode, decode, rules, level)
    a_low, a_high, b_low, b_high = values_of(held, packed)
    factor = quantized[4]
    nonfinite = _count(_magnitude(a_low) >= _INF) + _count(_magnitude(a_high) >= _INF)
    nonfinite += _count(_magnitude(b_low) >= _INF) + _count(_magnitude(b_high) >= _INF)
    clipped = _count(tl.abs(over(a_low, factor, rules)) > 6.0) + _count(tl.abs(over(a_high, factor, rules)) > 6.0)
    clipped += _count(tl.abs(over(b_low, factor, rules)) > 6.0) + _count(tl.abs(over(b_high, factor, rules)) > 6.0)
    saturated = tl.where(quantized[3] > _CLIP, clipped, 0)
    underflow = tl.where(quantized[5] & (top != 0) & (top < _INF), 1, 0)
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
def dequantize_wide(word: tl.tensor, byte: tl.tensor, g: tl.tensor) -> tl.tensor:
    """Eight packed codes (uint32 [n]) to fp32 [n, 8], in their order; arguments as `dequantize8`."""
    low, high = _dequantized(word, byte, g)
    return tl.reshape(tl.join(low, high), [word.shape[0], 8])


@jit
def dequantize8(word: tl.tensor, byte: tl.tensor, g: tl.tensor, level: tl.constexpr) -> tl.tensor:
    """Eight packed codes (uint32 [n]) with scale byte (uint32 [n]) to four BF16 pairs, uint32 [n, 4].

    (code * scale) * g in fp32, rounded to BF16, as in `nvfp4.dequantize`; `g` is fp32 [n].
    """
    low, high = _dequantized(word, byte, g)
    return bf16_pair(low, high, level)


@jit
def _dequantized(word: tl.tensor, byte: tl.tensor, g: tl.tensor) -> tl.tuple:
    scale = tl.expand_dims(e4m3_value(byte), 1)
    g = tl.expand_dims(g, 1)
    codes = tl.expand_dims(word, 1) >> (tl.arange(0, 4) * 8).to(tl.uint32)[None, :]
    return (e2m1_value(codes & 0xF) * scale) * g, (e2m1_value((codes >> 4) & 0xF) * scale) * g
