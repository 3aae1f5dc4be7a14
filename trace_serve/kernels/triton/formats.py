"""Device functions for E2M1, E4M3 and BF16 bits; each is exact at every arithmetic level.

Kernels that use them must be compiled without contraction into fused multiply-adds (`enable_fp_fusion=False`): the
product x * inverse is rounded to fp32 before it is rounded to E2M1.
"""

from __future__ import annotations

import triton.language as tl

from trace_serve.kernels.triton._jit import jit

# 1.5 * 2^23: fp32 numbers this large are spaced by 1, so adding it rounds to a whole number, ties to even, and leaves
# that number in the low bits.
_WHOLE = tl.constexpr(12582912.0)
_E4M3_SHIFT = tl.constexpr(2.0**120)
_E2M1_SHIFT = tl.constexpr(2.0**126)


@jit
def bits_of(x: tl.tensor) -> tl.tensor:
    """fp32 as uint32."""
    return x.to(tl.uint32, bitcast=True)


@jit
def float_of(bits: tl.tensor) -> tl.tensor:
    """uint32 as fp32."""
    return bits.to(tl.float32, bitcast=True)


@jit
def split4(x: tl.tensor) -> tl.tensor:
    """[N, 4] to its four columns [N]."""
    n: tl.constexpr = x.shape[0]
    even, odd = tl.split(tl.reshape(x, [n, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@jit
def join4(x0: tl.tensor, x1: tl.tensor, x2: tl.tensor, x3: tl.tensor) -> tl.tensor:
    """Four columns [N] to [N, 4]."""
    n: tl.constexpr = x0.shape[0]
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [n, 4])


@jit
def e2m1_word(low: tl.tensor, high: tl.tensor, level: tl.constexpr) -> tl.tensor:
    """Rounds eight fp32 to codes, packed in one uint32 [N]; see `nvfp4.e2m1.encode`.

    `low` [N, 4] holds values 0, 2, 4, 6 (the low nibbles), `high` [N, 4] values 1, 3, 5, 7.
    """
    if level >= 100:
        x0, x2, x4, x6 = split4(low)
        x1, x3, x5, x7 = split4(high)
        return tl.inline_asm_elementwise(
            "{ .reg .b8 b0, b1, b2, b3; "
            "cvt.rn.satfinite.e2m1x2.f32 b0, $2, $1; cvt.rn.satfinite.e2m1x2.f32 b1, $4, $3; "
            "cvt.rn.satfinite.e2m1x2.f32 b2, $6, $5; cvt.rn.satfinite.e2m1x2.f32 b3, $8, $7; "
            "mov.b32 $0, {b0, b1, b2, b3}; }",
            "=r,f,f,f,f,f,f,f,f",
            [x0, x1, x2, x3, x4, x5, x6, x7],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    return pack8(e2m1_nibble(low), e2m1_nibble(high))


@jit
def pack8(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Codes in uint32 [N, 4], of values 0, 2, 4, 6 and of 1, 3, 5, 7, as one uint32 [N]."""
    b0, b1, b2, b3 = split4(low | (high << 4))
    return (b0 | (b1 << 8)) | ((b2 << 16) | (b3 << 24))


@jit
def e2m1_nibble(u: tl.tensor) -> tl.tensor:
    """The code of each fp32 in a uint32, in integers and fp32 alone; see `nvfp4.e2m1.encode`."""
    # The three sums round to the grids of [0, 2], [2, 4] and [4, 6], numbered so that the smallest is the right index.
    # Their offsets are even, so ties go to the even code; doubling and halving are exact, so fusing changes nothing.
    a = tl.abs(u)
    index = tl.minimum(tl.fma(a, 2.0, _WHOLE), a + (_WHOLE + 2.0))
    index = tl.minimum(index, tl.fma(a, 0.5, _WHOLE + 4.0))
    index = tl.minimum(index, _WHOLE + 7.0)
    return (bits_of(index) & 7) | ((bits_of(u) >> 28) & 8)


@jit
def e2m1_value(nibble: tl.tensor) -> tl.tensor:
    """The fp32 value of a code in the low four bits of a uint32; other bits must be zero."""
    # Mantissa and exponent land in place as a number 2^126 too small; code 1 is then subnormal, and the product exact.
    return float_of(((nibble & 7) << 22) | ((nibble & 8) << 28)) * _E2M1_SHIFT


@jit
def e4m3_byte(scale: tl.tensor, level: tl.constexpr) -> tl.tensor:
    """Rounds non-negative fp32 to an E4M3 byte in a uint32, saturating at 448; see `nvfp4.e4m3.encode`."""
    if level >= 90:
        return scale.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32)
    clamped = tl.minimum(scale, 448.0)
    bits = bits_of(clamped)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    subnormal = bits_of(tl.fma(clamped, 512.0, _WHOLE)) & 0xF
    return tl.where(clamped < 0.015625, subnormal, normal)


@jit
def e4m3_value(byte: tl.tensor) -> tl.tensor:
    """The fp32 value of an E4M3 byte in a uint32; 0x7F and 0xFF are NaN."""
    # Exponent and mantissa land in place as a number 2^120 too small, perhaps subnormal; the product is exact.
    bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    return tl.where((byte & 0x7F) == 0x7F, float_of(bits | 0x7FC00000), float_of(bits) * _E4M3_SHIFT)


@jit
def bf16_pair(low: tl.tensor, high: tl.tensor, level: tl.constexpr) -> tl.tensor:
    """Two fp32 rounded to BF16, ties to even, in a uint32 (`low` in the low half); NaN stays a NaN."""
    if level >= 90:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
    return _bf16_bits(low) | (_bf16_bits(high) << 16)


@jit
def as_bf16(x: tl.tensor, level: tl.constexpr) -> tl.tensor:
    """fp32 rounded to BF16, ties to even; the interpreter's own conversion truncates."""
    if level >= 90:
        return x.to(tl.bfloat16)
    return _bf16_bits(x).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit
def _bf16_bits(x: tl.tensor) -> tl.tensor:
    bits = bits_of(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


@jit
def hint_word(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The lowest bits of 16 packed codes (two uint32, eight codes each) as 16 bits of a uint32."""
    return _every_fourth_bit(low) | (_every_fourth_bit(high) << 8)


@jit
def _every_fourth_bit(word: tl.tensor) -> tl.tensor:
    word = word & 0x11111111
    word = (word | (word >> 3)) & 0x03030303
    word = (word | (word >> 6)) & 0x000F000F
    return (word | (word >> 12)) & 0xFF


@jit
def pow2_scale_bits(top: tl.tensor, scale_max: tl.constexpr) -> tl.tensor:
    """The bits of `nvfp4.pow2_global_scale` from the bits of a non-negative finite fp32; 1.0 for zero."""
    # 6 * scale_max is 1.3125 * 2^11 or 1.5 * 2^10.
    if scale_max == 448:
        biased = (top >> 23).to(tl.int32) - 11 + ((top & 0x7FFFFF) > 0x280000).to(tl.int32)
    else:
        biased = (top >> 23).to(tl.int32) - 10 + ((top & 0x7FFFFF) > 0x400000).to(tl.int32)
    biased = tl.minimum(tl.maximum(biased, 27), 243)
    return tl.where(top == 0, 127, biased).to(tl.uint32) << 23
