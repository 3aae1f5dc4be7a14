"""The steps of the CPU kernels on one row that lies in cache: loops that the compiler turns into vector instructions.

Each loop is free of branches, has a fixed trip count of 16 or runs over the whole row, and keeps every intermediate
at the width of its lanes: numba widens integer results to 64 bits, which `np.int32(...)` takes back. Everything is fp32
with each operation rounded on its own (no fused multiply-add, no fast math).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import float32, int32, int64, njit, types, uint8, uint16, uint32, uint64
from numba.extending import overload

_SIGN_MASK = np.int32(0x7FFFFFFF)
_ONE = np.int32(1)
_FLOAT_MAX = np.finfo(np.float32).max
INF_BITS = np.int32(0x7F800000)


def compiled(*signatures: Any) -> Callable[[Any], Any]:
    """Compiles for the given signatures when the module is imported, and caches on disk where that is possible."""

    def compile_function(function: Any) -> Any:
        options = {"nogil": True, "error_model": "numpy"}
        try:
            return njit(list(signatures), cache=True, **options)(function)
        except RuntimeError as exc:
            if "cannot cache" not in str(exc):
                raise
            # A read-only installation without a writable home: compile once a process (some seconds).
            return njit(list(signatures), **options)(function)

    return compile_function


@compiled(types.void(uint16[::1], int32[::1]), types.void(float32[::1], int32[::1]))
def load_bits(x: Any, bits: Any) -> None:
    """fp32 bits of a row of BF16 bits or of fp32 values."""
    if x.itemsize == 2:
        for i in range(bits.size):
            bits[i] = np.int32(x[i]) << 16
    else:
        source = x.view(np.int32)
        for i in range(bits.size):
            bits[i] = source[i]


@compiled(types.void(uint16[::1], uint16[::1], uint16[::1], uint16[::1], int32[::1]))
def block_maxima_bf16(x: Any, eighths: Any, quarters: Any, halves: Any, out: Any) -> None:
    """As `block_maxima` from BF16 bits; 8, 4 and 2 entries of scratch space a block."""
    low = np.uint32(0x7FFF)
    half = np.uint32(16)
    pairs = x.view(np.uint32)
    for i in range(eighths.size):
        eighths[i] = np.uint16(max(np.uint32(pairs[i] & low), np.uint32(np.uint32(pairs[i] >> half) & low)))
    pairs = eighths.view(np.uint32)
    for i in range(quarters.size):
        quarters[i] = np.uint16(max(np.uint32(pairs[i] & low), np.uint32(pairs[i] >> half)))
    pairs = quarters.view(np.uint32)
    for i in range(halves.size):
        halves[i] = np.uint16(max(np.uint32(pairs[i] & low), np.uint32(pairs[i] >> half)))
    pairs = halves.view(np.uint32)
    for b in range(out.size):
        out[b] = np.int32(np.uint32(max(np.uint32(pairs[b] & low), np.uint32(pairs[b] >> half)))) << 16


@compiled(types.void(int32[::1], uint32[::1], uint32[::1], int32[::1]))
def block_maxima(bits: Any, eighths: Any, quarters: Any, out: Any) -> None:
    """Largest magnitude bits of each 16 fp32 values; finite magnitudes compare like their bits.

    Neighbours are paired as halves of a wider integer, which needs no shuffles; `eighths` and `quarters` are scratch
    space of 8 and 4 entries a block.
    """
    low = np.uint64(0x7FFFFFFF)
    half = np.uint64(32)
    pairs = bits.view(np.uint64)
    for i in range(eighths.size):
        eighths[i] = np.uint32(max(np.uint64(pairs[i] & low), np.uint64((pairs[i] >> half) & low)))
    pairs = eighths.view(np.uint64)
    for i in range(quarters.size):
        quarters[i] = np.uint32(max(np.uint64(pairs[i] & low), np.uint64(pairs[i] >> half)))
    for b in range(out.size):
        left = max(quarters[4 * b], quarters[4 * b + 1])
        right = max(quarters[4 * b + 2], quarters[4 * b + 3])
        out[b] = np.int32(max(left, right))


@compiled(types.void(int32[::1], float32, float32, uint8[::1], float32[::1], float32[::1], int32[::1]))
def block_scales(maxima: Any, to_scale: Any, g: Any, scale_bytes: Any, scales: Any, inverses: Any, signs: Any) -> None:
    """E4M3 bytes, their values, the factors of the values and the sign bit that codes may have (0 in a zero block)."""
    for b in range(maxima.size):
        wide = np.int32(np.float32(np.int32(maxima[b]).view(np.float32) * to_scale).view(np.int32))
        bits = np.int32(min(wide, np.int32(0x43E00000)))
        normal = np.int32(np.int32(bits + np.int32(0x7FFFF)) + np.int32(np.int32(bits >> np.int32(20)) & _ONE))
        normal = np.int32(np.int32(normal >> np.int32(20)) - np.int32(960))
        # Adding 2^14 rounds to multiples of 2^-9, the subnormals of E4M3.
        small = np.int32(np.float32(np.int32(bits).view(np.float32) + np.float32(16384.0)).view(np.int32))
        small = np.int32(small - np.int32(0x46800000))
        is_small = bits < np.int32(0x3C800000)
        byte = small if is_small else normal
        scale = np.int32(np.int32(byte + np.int32(960)) << np.int32(20)).view(np.float32)
        scale = np.float32(np.float32(byte) * np.float32(2.0**-9)) if is_small else scale
        inverse = np.float32(np.float32(1.0) / np.float32(scale * g))
        inverse = _FLOAT_MAX if inverse > _FLOAT_MAX else inverse
        scale_bytes[b] = np.uint8(byte)
        scales[b] = scale
        inverses[b] = np.float32(0.0) if byte == 0 else inverse
        signs[b] = np.int32(0) if byte == 0 else np.int32(8)


def _as_float(value: Any) -> Any:
    raise NotImplementedError("only inside compiled functions")


def _as_float_of(value: Any) -> Any:
    """How `_as_float` compiles: BF16 bits are the upper half of an fp32, which itself stays what it is."""

    def of_bf16_bits(value: Any) -> Any:
        return np.int32(np.int32(value) << np.int32(16)).view(np.float32)

    def of_float(value: Any) -> Any:
        return value

    return of_bf16_bits if isinstance(value, types.Integer) else of_float


overload(_as_float)(_as_float_of)


@compiled(*(types.void(source, float32[::1], int32[::1], uint8[::1]) for source in (uint16[::1], float32[::1])))
def e2m1_codes(row: Any, inverses: Any, signs: Any, nibbles: Any) -> None:
    """One code a byte: row (BF16 bits or fp32) * inverse rounded to E2M1, ties to even, saturating at 6."""
    for b in range(inverses.size):
        inverse = inverses[b]
        sign = np.int32(signs[b])
        for i in range(16):
            u = np.float32(_as_float(row[b * 16 + i]) * inverse).view(np.int32)
            a = np.int32(min(np.int32(u & _SIGN_MASK), np.int32(0x40C00000)))
            normal = np.int32(np.int32(a + np.int32(0x1FFFFF)) + np.int32(np.int32(a >> np.int32(22)) & _ONE))
            normal = np.int32(np.int32(normal >> np.int32(22)) - np.int32(252))
            # Adding 2^22 rounds to multiples of 0.5, the values below 1.
            small = np.int32(np.float32(np.int32(a).view(np.float32) + np.float32(4194304.0)).view(np.int32))
            small = np.int32(small - np.int32(0x4A800000))
            magnitude = small if a < np.int32(0x3F800000) else normal
            nibbles[b * 16 + i] = np.uint8(np.int32(magnitude) | np.int32(np.int32(u >> np.int32(28)) & sign))


@compiled(types.void(uint16[::1], uint8[::1]))
def pack_codes(pairs: Any, codes: Any) -> None:
    """Two codes a byte from two bytes each."""
    for i in range(codes.size):
        codes[i] = np.uint8(pairs[i] | np.uint16(pairs[i] >> np.uint16(4)))


@compiled(types.void(uint8[::1], uint16[::1]))
def unpack_codes(codes: Any, pairs: Any) -> None:
    """Undoes `pack_codes`."""
    for i in range(codes.size):
        byte = np.uint16(codes[i])
        pairs[i] = np.uint16(
            np.uint16(byte & np.uint16(15)) | np.uint16(np.uint16(byte >> np.uint16(4)) << np.uint16(8))
        )


@compiled(types.void(uint64[::1], uint16[::1]))
def hint_words(codes: Any, words: Any) -> None:
    """The lowest bit of each of 16 packed codes, bit i = code i: every fourth bit, each step halving the gaps."""
    for b in range(words.size):
        w = np.uint64(codes[b] & np.uint64(0x1111111111111111))
        w = np.uint64(np.uint64(w | np.uint64(w >> np.uint64(3))) & np.uint64(0x0303030303030303))
        w = np.uint64(np.uint64(w | np.uint64(w >> np.uint64(6))) & np.uint64(0x000F000F000F000F))
        w = np.uint64(np.uint64(w | np.uint64(w >> np.uint64(12))) & np.uint64(0x000000FF000000FF))
        words[b] = np.uint16(w | np.uint64(w >> np.uint64(24)))


@compiled(types.void(uint8[::1], float32[::1]))
def scale_values(scale_bytes: Any, scales: Any) -> None:
    """fp32 values of E4M3 bytes; 0x7F and 0xFF give NaN."""
    for b in range(scales.size):
        byte = np.int32(scale_bytes[b])
        magnitude = np.int32(byte & np.int32(0x7F))
        normal = np.int32(np.int32(magnitude + np.int32(960)) << np.int32(20)).view(np.float32)
        small = np.float32(np.float32(magnitude) * np.float32(2.0**-9))
        value = small if magnitude < np.int32(8) else normal
        value = np.float32(np.nan) if magnitude == np.int32(0x7F) else value
        scales[b] = -value if byte > np.int32(0x7F) else value


@compiled(types.void(uint8[::1], float32[::1], float32, uint16[::1]))
def bf16_values(nibbles: Any, scales: Any, g: Any, out: Any) -> None:
    """(code * scale) * g in fp32, rounded to BF16 bits; a NaN scale gives NaN."""
    for b in range(scales.size):
        scale = scales[b]
        for i in range(16):
            nibble = np.int32(nibbles[b * 16 + i])
            magnitude = np.int32(nibble & np.int32(7))
            bits = np.int32(np.int32(magnitude + np.int32(252)) << np.int32(22))
            bits = np.int32(magnitude * np.int32(0x3F000000)) if magnitude < np.int32(2) else bits
            value = np.float32(np.float32(np.int32(bits).view(np.float32) * scale) * g).view(np.int32)
            rounded = np.int32(np.int32(value + np.int32(0x7FFF)) + np.int32(np.int32(value >> np.int32(16)) & _ONE))
            sign = np.int32(np.int32(nibble & np.int32(8)) << np.int32(12))
            out[b * 16 + i] = np.uint16(np.int32(np.int32(rounded >> np.int32(16)) ^ sign))


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
