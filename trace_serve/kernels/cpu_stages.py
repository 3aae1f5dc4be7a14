"""The steps of the CPU kernels on a strip that lies in cache: loops that the compiler turns into vector instructions.

Each loop is free of branches and keeps every intermediate at the width of its lanes: numba widens integer results to 64
bits, which `np.int32(...)` takes back. Everything is fp32 with each operation rounded on its own; the one product that
may be contracted with a sum is a halving, which is exact. Two neighbouring values share a lane of 32 bits wherever that
saves work, so what belongs to a block is repeated 8 times (`_LANES`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import float32, int32, int64, njit, types, uint8, uint16, uint32, uint64

STRIP = 2048
"""Values that go through the steps together: a row of a usual hidden size, or several short ones."""

_LANES = 8
_SIGN_MASK = np.int32(0x7FFFFFFF)
_FLOAT_MAX = np.finfo(np.float32).max
_SIX = np.float32(6.0)
_SIXTH = np.float32(1.0 / 6.0)
# fp32 numbers are spaced by 0.5 below 2^23 and by 1 above it. So value + (2^23 - 2) is rounded to the grid of E2M1
# below 2 and from 2 to 4, and value / 2 + 2^23 to the grid from 4 to 6; the smaller sum is the right one, its lowest
# three bits count codes from -4, and ties go to the even code.
_LIFT = np.float32(2.0**23 - 2.0)
_LIFT_HALF = np.float32(2.0**23)
_LARGEST_SUM = np.float32(2.0**23 + 3.0)

AMAX_TIMES_SIXTH, AMAX_OVER_SIX, S_TIMES_AMAX_SIXTH, AMAX_OVER_SIX_G = range(4)
"""Scale formulas, in the order of `recipe.SCALE_FORMULAS`."""

ZERO_BLOCKS = ("zero", "one", "min_subnormal", "saturate")
ZERO, ONE, MIN_SUBNORMAL, SATURATE = range(4)
"""Zero-block rules, in the order of ZERO_BLOCKS."""


def compiled(*signatures: Any, **options: Any) -> Callable[[Any], Any]:
    """Compiles for the given signatures when the module is imported, and caches on disk where that is possible."""

    def compile_function(function: Any) -> Any:
        settings = {"nogil": True, "error_model": "numpy", **options}
        try:
            return njit(list(signatures), cache=True, **settings)(function)
        except RuntimeError as exc:
            if "cannot cache" not in str(exc):
                raise
            # A read-only installation without a writable home: compile once a process (some seconds).
            return njit(list(signatures), **settings)(function)

    return compile_function


@compiled(types.void(uint16[::1], int32[::1]), types.void(float32[::1], int32[::1]))
def load_bits(x: Any, bits: Any) -> None:
    """fp32 bits of BF16 bits or of fp32 values."""
    if x.itemsize == 2:
        for i in range(bits.size):
            bits[i] = np.int32(x[i]) << 16
    else:
        source = x.view(np.int32)
        for i in range(bits.size):
            bits[i] = source[i]


@compiled(types.void(uint32[::1], uint32[::1]))
def pair_maxima_bf16(pairs: Any, out: Any) -> None:
    """fp32 bits of the larger magnitude of each two BF16 values; finite magnitudes compare like their bits."""
    mask = np.uint32(0x7FFF0000)
    for i in range(out.size):
        pair = np.uint32(pairs[i])
        out[i] = np.uint32(max(np.uint32(np.uint32(pair << np.uint32(16)) & mask), np.uint32(pair & mask)))


@compiled(types.void(int32[::1], uint32[::1]))
def pair_maxima(bits: Any, out: Any) -> None:
    """The same from fp32 bits."""
    mask = np.uint32(0x7FFFFFFF)
    for i in range(out.size):
        out[i] = np.uint32(max(np.uint32(np.uint32(bits[2 * i]) & mask), np.uint32(np.uint32(bits[2 * i + 1]) & mask)))


@compiled(types.void(uint32[::1], int32[::1]))
def block_maxima(pairs: Any, out: Any) -> None:
    """The largest of each 8."""
    for b in range(out.size):
        p, q = max(pairs[8 * b], pairs[8 * b + 1]), max(pairs[8 * b + 2], pairs[8 * b + 3])
        r, s = max(pairs[8 * b + 4], pairs[8 * b + 5]), max(pairs[8 * b + 6], pairs[8 * b + 7])
        out[b] = np.int32(max(max(p, q), max(r, s)))


@compiled(int32(int32[::1]))
def largest(bits: Any) -> Any:
    """The largest of all; 0 of none."""
    top = np.int32(0)
    for b in range(bits.size):
        top = np.int32(max(top, bits[b]))
    return top


@compiled(int32(int32))
def _e4m3_byte(wide: Any) -> Any:
    """The bits of a non-negative fp32 to the nearest E4M3 byte, ties to even, saturating at 448."""
    bits = np.int32(min(wide, np.int32(0x43E00000)))
    normal = np.int32(np.int32(bits + np.int32(0x7FFFF)) + np.int32(np.int32(bits >> np.int32(20)) & np.int32(1)))
    normal = np.int32(np.int32(normal >> np.int32(20)) - np.int32(960))
    # Adding 2^14 rounds to multiples of 2^-9, the subnormals of E4M3.
    small = np.int32(np.float32(np.int32(bits).view(np.float32) + np.float32(16384.0)).view(np.int32))
    small = np.int32(small - np.int32(0x46800000))
    return small if bits < np.int32(0x3C800000) else normal


@compiled(float32(int32))
def _e4m3_value(byte: Any) -> Any:
    """The fp32 value of a byte up to 0x7E."""
    normal = np.int32(np.int32(byte + np.int32(960)) << np.int32(20)).view(np.float32)
    return np.float32(np.float32(byte) * np.float32(2.0**-9)) if byte < np.int32(8) else normal


@compiled(types.void(int32[::1], int64, float32, float32, float32[::1]))
def unrounded_scales(maxima: Any, formula: Any, encode: Any, decode: Any, out: Any) -> None:
    """`nvfp4.block_scale.unrounded`."""
    amax = maxima.view(np.float32)
    if formula == AMAX_TIMES_SIXTH:
        factor = np.float32(encode * _SIXTH)
        for b in range(out.size):
            out[b] = np.float32(amax[b] * factor)
    elif formula == AMAX_OVER_SIX:
        for b in range(out.size):
            out[b] = np.float32(np.float32(amax[b] / _SIX) * encode)
    elif formula == S_TIMES_AMAX_SIXTH:
        for b in range(out.size):
            out[b] = np.float32(encode * np.float32(amax[b] * _SIXTH))
    else:
        divisor = np.float32(_SIX * decode)
        for b in range(out.size):
            out[b] = np.float32(amax[b] / divisor)


@compiled(types.UniTuple(int32, 2)(float32[::1], uint8[::1], float32[::1]))
def round_scales(unrounded: Any, scale_bytes: Any, scales: Any) -> Any:
    """E4M3 bytes and their values; returns the bits of the smallest and of the largest scale before rounding."""
    wide = unrounded.view(np.int32)
    low, high = np.int32(0x7FFFFFFF), np.int32(0)
    for b in range(scales.size):
        low = np.int32(min(low, wide[b]))
        high = np.int32(max(high, wide[b]))
        byte = _e4m3_byte(wide[b])
        scale_bytes[b] = np.uint8(byte)
        scales[b] = _e4m3_value(byte)
    return low, high


@compiled(types.void(float32[::1], float32, float32[::1]))
def reciprocals(scales: Any, decode: Any, out: Any) -> None:
    """1 / (scale * g), at most the largest fp32."""
    for b in range(out.size):
        inverse = np.float32(np.float32(1.0) / np.float32(scales[b] * decode))
        out[b] = min(inverse, _FLOAT_MAX)


@compiled(types.void(float32[::1], float32, float32[::1]))
def divisors(scales: Any, decode: Any, out: Any) -> None:
    """scale * g."""
    for b in range(out.size):
        out[b] = np.float32(scales[b] * decode)


@compiled(types.void(float32[::1], float32[::1]), types.void(uint32[::1], uint32[::1]))
def spread(blocks: Any, lanes: Any) -> None:
    """Repeats what belongs to a block for each of its lanes."""
    for b in range(blocks.size):
        value = blocks[b]
        for i in range(_LANES):
            lanes[_LANES * b + i] = value


@compiled(float32(float32), fastmath={"contract"})
def _lifted_half(magnitude: Any) -> Any:
    return np.float32(magnitude * np.float32(0.5)) + _LIFT_HALF


@compiled(int32(float32))
def _code_bits(magnitude: Any) -> Any:
    """A magnitude rounded to E2M1, saturating at 6: the lowest three bits are its code xor 4."""
    total = min(np.float32(magnitude + _LIFT), _lifted_half(magnitude))
    return np.int32(np.float32(min(total, _LARGEST_SUM)).view(np.int32))


@compiled(uint8(float32, float32, int32))
def _packed(even: Any, odd: Any, signs: Any) -> Any:
    """Two magnitudes and the sign bits of a byte to the byte."""
    low = np.int32(_code_bits(even) & np.int32(7))
    high = np.int32(np.int32(_code_bits(odd) & np.int32(7)) << np.int32(4))
    return np.uint8(np.int32(np.int32(np.int32(low | high) | signs) ^ np.int32(0x44)))


@compiled(types.void(int32[::1], float32[::1], uint8[::1]))
def codes_of_bf16(pairs: Any, factors: Any, codes: Any) -> None:
    """Two BF16 values a lane, times the factor of their block, rounded to E2M1 with ties to even and packed."""
    for i in range(codes.size):
        pair = np.int32(pairs[i])
        even = np.int32(np.int32(pair & np.int32(0x7FFF)) << np.int32(16)).view(np.float32)
        odd = np.int32(pair & np.int32(0x7FFF0000)).view(np.float32)
        signs = np.int32(np.int32(pair >> np.int32(12)) & np.int32(0x08))
        signs = np.int32(signs | np.int32(np.int32(pair >> np.int32(24)) & np.int32(0x80)))
        codes[i] = _packed(np.float32(even * factors[i]), np.float32(odd * factors[i]), signs)


@compiled(types.void(int32[::1], float32[::1], uint8[::1]))
def codes_of_fp32(bits: Any, factors: Any, codes: Any) -> None:
    """The same from fp32 bits."""
    for i in range(codes.size):
        first, second = np.int32(bits[2 * i]), np.int32(bits[2 * i + 1])
        even = np.int32(first & _SIGN_MASK).view(np.float32)
        odd = np.int32(second & _SIGN_MASK).view(np.float32)
        signs = np.int32(np.int32(first >> np.int32(28)) & np.int32(0x08))
        signs = np.int32(signs | np.int32(np.int32(second >> np.int32(24)) & np.int32(0x80)))
        codes[i] = _packed(np.float32(even * factors[i]), np.float32(odd * factors[i]), signs)


@compiled(float32(int32, float32, types.boolean, types.boolean))
def _unit_magnitude(bits: Any, factor: Any, divide: Any, ties_up: Any) -> Any:
    magnitude = np.int32(bits & _SIGN_MASK).view(np.float32)
    u = np.float32(magnitude / factor) if divide else np.float32(magnitude * factor)
    # Midpoints have a zero in their lowest bit: setting it lifts ties and moves nothing else past one.
    u = min(u, _FLOAT_MAX)
    return np.int32(np.float32(u).view(np.int32) | np.int32(ties_up)).view(np.float32)


@compiled(types.void(int32[::1], float32[::1], types.boolean, types.boolean, uint8[::1]))
def codes_by_rule(bits: Any, factors: Any, divide: Any, ties_up: Any, codes: Any) -> None:
    """The same where a recipe divides by the divisor of the block, or rounds ties up."""
    for i in range(codes.size):
        first, second = np.int32(bits[2 * i]), np.int32(bits[2 * i + 1])
        even = _unit_magnitude(first, factors[i], divide, ties_up)
        odd = _unit_magnitude(second, factors[i], divide, ties_up)
        signs = np.int32(np.int32(first >> np.int32(28)) & np.int32(0x08))
        signs = np.int32(signs | np.int32(np.int32(second >> np.int32(24)) & np.int32(0x80)))
        codes[i] = _packed(even, odd, signs)


@compiled(types.void(uint64[::1], uint16[::1]))
def hint_words(codes: Any, words: Any) -> None:
    """The lowest bit of each of 16 packed codes, bit i = code i: every fourth bit, each step halving the gaps."""
    for b in range(words.size):
        w = np.uint64(codes[b] & np.uint64(0x1111111111111111))
        w = np.uint64(np.uint64(w | np.uint64(w >> np.uint64(3))) & np.uint64(0x0303030303030303))
        w = np.uint64(np.uint64(w | np.uint64(w >> np.uint64(6))) & np.uint64(0x000F000F000F000F))
        w = np.uint64(np.uint64(w | np.uint64(w >> np.uint64(12))) & np.uint64(0x000000FF000000FF))
        words[b] = np.uint16(w | np.uint64(w >> np.uint64(24)))


@compiled(types.void(float32[::1], int64, float32))
def rotate(row: Any, width: Any, factor: Any) -> None:
    """Hadamard rotation of every `width` values, 16 or more: butterflies of ascending stride, then the factor.

    The loops differ by stride because each becomes vector instructions in another form.
    """
    for j in range(row.size // 4):
        a, b, c, d = row[4 * j], row[4 * j + 1], row[4 * j + 2], row[4 * j + 3]
        p, q, r, s = a + b, a - b, c + d, c - d
        row[4 * j] = p + r
        row[4 * j + 1] = q + s
        row[4 * j + 2] = p - r
        row[4 * j + 3] = q - s
    for j in range(row.size // 8):
        for i in range(4):
            a, b = row[8 * j + i], row[8 * j + 4 + i]
            row[8 * j + i] = a + b
            row[8 * j + 4 + i] = a - b
    stride = 8
    while stride < width:
        for j in range(row.size // (2 * stride)):
            low = row[2 * stride * j : 2 * stride * j + stride]
            high = row[2 * stride * j + stride : 2 * stride * (j + 1)]
            for i in range(stride):
                a, b = low[i], high[i]
                low[i] = a + b
                high[i] = a - b
        stride *= 2
    for i in range(row.size):
        row[i] *= factor
