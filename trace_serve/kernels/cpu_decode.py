"""From packed codes back to BF16, two values a lane of 32 bits.

Under one block scale the eight magnitudes of E2M1 are 1 and 1.5 times powers of two. So a block needs two roundings to
BF16, of scale * g and of 1.5 * scale * g, and the rest is arithmetic on their bits: an exponent is added, and the
difference of the two where the mantissa bit is set.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, float32, int32, int64, types, uint8, uint16, uint32

from trace_serve.kernels.cpu_memory import fetch_ahead, pointer
from trace_serve.kernels.cpu_stages import STRIP, compiled, spread

_LOW_BITS = np.int32(0x00010001)
_SIGNS = np.uint32(0x80008000).view(np.int32)


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


@compiled(int32(float32))
def _bf16_bits(value: Any) -> Any:
    bits = np.int32(np.float32(value).view(np.int32))
    odd = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
    return np.int32(np.int32(np.int32(bits + np.int32(0x7FFF)) + odd) >> np.int32(16))


@compiled(types.void(float32[::1], float32, uint32[::1]))
def block_steps(scales: Any, g: Any, out: Any) -> None:
    """BF16 bits of half of scale * g in the lower half of a word, and in the upper half what 1.5 adds to them."""
    for b in range(out.size):
        one = _bf16_bits(np.float32(scales[b] * g))
        three_halves = _bf16_bits(np.float32(np.float32(scales[b] * np.float32(1.5)) * g))
        start = np.int32(np.int32(one - np.int32(0x80)) & np.int32(0xFFFF))
        out[b] = np.uint32(start | np.int32(np.int32(three_halves - one) << np.int32(16)))


@compiled(types.boolean(uint8[::1]))
def any_special(scale_bytes: Any) -> Any:
    """Whether some block is zero or NaN, for which adding exponents does not hold (see `settle_special`)."""
    found = np.uint8(0)
    for b in range(scale_bytes.size):
        # Of 0x00, 0x7F, 0x80 and 0xFF alone, adding 1 leaves nothing above the lowest bit and below the sign.
        low = np.uint8(np.uint8(scale_bytes[b] + np.uint8(1)) & np.uint8(0x7E))
        found = np.uint8(max(found, np.uint8(low == np.uint8(0))))
    return found != np.uint8(0)


@compiled(types.void(uint8[::1], uint8[::1]))
def copy(source: Any, target: Any) -> None:
    """Not by slices: those are copied with an index a byte."""
    for i in range(target.size):
        target[i] = source[i]


@compiled(types.void(uint8[::1], int32[::1]))
def widen(codes: Any, words: Any) -> None:
    """A byte a lane. In a loop of its own: bytes that are read beside arithmetic make it 64 bits wide."""
    for i in range(words.size):
        words[i] = codes[i]


@compiled(types.void(int32[::1], uint32[::1], int32[::1]))
def bf16_pairs(words: Any, steps: Any, out: Any) -> None:
    """Two codes a lane to two BF16 values a lane, from the block's `block_steps`."""
    for i in range(words.size):
        byte = np.int32(words[i])
        code = np.int32(np.int32(byte | np.int32(byte << np.int32(12))) & np.int32(0x000F000F))
        upper = np.int32(np.int32(code >> np.int32(1)) | np.int32(code >> np.int32(2)))
        # The mantissa bit counts but in code 1, which is half of code 2.
        mantissa = np.int32(np.int32(code & upper) & _LOW_BITS)
        nonzero = np.int32(np.int32(code | upper) & _LOW_BITS)
        exponent = np.int32(np.int32(code & np.int32(0x00060006)) << np.int32(6))
        step = np.int32(steps[i])
        start = np.int32(np.int32(step & np.int32(0xFFFF)) | np.int32(step << np.int32(16)))
        bits = np.int32(np.int32(start + exponent) + np.int32(mantissa * np.int32(step >> np.int32(16))))
        kept = np.int32(np.int32(np.int32(nonzero << np.int32(16)) - nonzero) | _SIGNS)
        sign = np.int32(np.int32(code & np.int32(0x00080008)) << np.int32(12))
        out[i] = np.int32(np.int32(bits & kept) ^ sign)


@compiled(types.void(int32[::1], uint8[::1], int32[::1]))
def settle_special(words: Any, scale_bytes: Any, out: Any) -> None:
    """What `bf16_pairs` leaves wrong: blocks of zeros keep only their signs, and NaN scales give NaN."""
    for b in range(scale_bytes.size):
        magnitude = scale_bytes[b] & 0x7F
        if magnitude == 0 or magnitude == 0x7F:
            negative = _SIGNS if scale_bytes[b] > 0x7F else np.int32(0)
            for i in range(8 * b, 8 * b + 8):
                sign = np.int32(np.int32(words[i] & np.int32(0x08)) << np.int32(12))
                sign = np.int32(sign | np.int32(np.int32(words[i] & np.int32(0x80)) << np.int32(24)))
                out[i] = np.int32(sign ^ negative) if magnitude == 0 else np.int32(0x7FC07FC0)


@compiled(types.void(uint8[::1], float32[::1], float32, uint16[::1]))
def bf16_products(codes: Any, scales: Any, g: Any, out: Any) -> None:
    """(code * scale) * g in fp32, rounded to BF16 bits, for global scales of any size; a NaN scale gives NaN."""
    for b in range(scales.size):
        for i in range(16 * b, 16 * b + 16):
            code = np.int32(np.int32(np.int32(codes[i // 2]) >> np.int32(4 * (i % 2))) & np.int32(0x0F))
            magnitude = np.int32(code & np.int32(7))
            bits = np.int32(np.int32(magnitude + np.int32(252)) << np.int32(22))
            bits = np.int32(magnitude * np.int32(0x3F000000)) if magnitude < np.int32(2) else bits
            value = np.float32(np.float32(np.int32(bits).view(np.float32) * scales[b]) * g)
            sign = np.int32(np.int32(code & np.int32(8)) << np.int32(12))
            out[i] = np.uint16(0x7FC0) if value != value else np.uint16(_bf16_bits(value) ^ sign)


@compiled(types.boolean(float32))
def _adds_exponents(g: Any) -> Any:
    """Whether no product under a global scale is subnormal or too large for BF16, so that exponents can be added."""
    return np.float32(2.0**-116) <= g <= np.float32(2.0**116)


@compiled(types.void(uint8[::1], uint8[::1], float32[::1], float32, uint32[::1], int32[::1], uint32[::1], int64))
def dequantize(codes: Any, scale_bytes: Any, scales: Any, g: Any, steps: Any, words: Any, lanes: Any, out: Any) -> None:
    """BF16 values at the address `out` of whole blocks.

    `steps`, `words` and `lanes` are scratch space of a block, a byte and a byte each.
    """
    n, blocks = codes.size, scales.size
    if not _adds_exponents(g):
        bf16_products(codes, scales, g, carray(pointer(out), 2 * n, np.uint16))
        return
    block_steps(scales, g, steps[:blocks])
    spread(steps[:blocks], lanes[:n])
    widen(codes, words[:n])
    pairs = carray(pointer(out), n, np.int32)
    bf16_pairs(words[:n], lanes[:n], pairs)
    if any_special(scale_bytes):
        settle_special(words[:n], scale_bytes, pairs)


@compiled(int64(int64, int64, int64, int64, int64, int64, float32, int64))
def gather_dequantize(
    codes: Any, scale_bytes: Any, slots: Any, k: Any, index_address: Any, count: Any, g: Any, out: Any
) -> Any:
    """BF16 [count, k] from slots [slots, k], all at addresses; returns the first position outside the pool, or -1."""
    index = carray(pointer(index_address), count, np.int64)
    for n in range(count):
        if index[n] < 0 or index[n] >= slots:
            return n
    half, blocks = k // 2, k // 16
    together = max(1, STRIP // max(k, 1))
    size = together * half
    scratch = np.empty(size * 10, dtype=np.uint8)
    here = scratch.ctypes.data
    words, lanes = carray(pointer(here), size, np.int32), carray(pointer(here + 4 * size), size, np.uint32)
    scales = carray(pointer(here + 8 * size), size // 8, np.float32)
    steps = carray(pointer(here + 8 * size + size // 2), size // 8, np.uint32)
    strip_codes = carray(pointer(here + 9 * size), size, np.uint8)
    bytes_of = np.empty(size // 8, dtype=np.uint8)
    strip_bytes = carray(pointer(bytes_of.ctypes.data), size // 8, np.uint8)
    for first in range(0, count, together):
        rows = min(together, count - first)
        for r in range(rows, min(rows + together, count - first)):
            fetch_ahead(codes + index[first + r] * half, half)
            fetch_ahead(scale_bytes + index[first + r] * blocks, blocks)
        for r in range(rows):
            slot = index[first + r]
            copy(carray(pointer(codes + slot * half), half, np.uint8), strip_codes[r * half : (r + 1) * half])
            row = carray(pointer(scale_bytes + slot * blocks), blocks, np.uint8)
            copy(row, strip_bytes[r * blocks : (r + 1) * blocks])
        scale_values(strip_bytes[: rows * blocks], scales[: rows * blocks])
        dequantize(
            strip_codes[: rows * half],
            strip_bytes[: rows * blocks],
            scales[: rows * blocks],
            g,
            steps,
            words,
            lanes,
            out + 2 * first * k,
        )
    # Memory is freed after its last use.
    scratch[:1], bytes_of[:1] = 0, 0
    return -1
