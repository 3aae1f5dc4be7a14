"""Loops of the CPU backend on numpy arrays, compiled by numba and cached on disk.

Everything is fp32 with each operation rounded on its own (no fused multiply-add, no fast math), in the order of
`trace_serve.nvfp4.quantize`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64, njit, types, uint8, uint16
from numpy.typing import NDArray

from trace_serve.nvfp4.e4m3 import CLIP_THRESHOLD
from trace_serve.nvfp4.global_scale import MAX_EXPONENT, MIN_EXPONENT

_SIXTH = np.float32(1.0 / 6.0)
_CLIP = np.float32(CLIP_THRESHOLD)
_INF_BITS = 0x7F800000


def _e4m3_table() -> NDArray[np.float32]:
    table = np.empty(256, dtype=np.float32)
    for byte in range(256):
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        table[byte] = np.nan if byte & 0x7F == 0x7F else (-value if byte & 0x80 else value)
    return table


_E4M3 = _e4m3_table()
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def _compile(function: Any, signature: Any) -> Any:
    try:
        return njit(signature, cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError as exc:
        if "cannot cache" not in str(exc):
            raise
        # A read-only installation without a writable home: compile once a process (about 2 s).
        return njit(signature, nogil=True, error_model="numpy")(function)


def _encode_e4m3_loop(scale: Any, word: Any) -> Any:
    """The byte nearest to a non-negative fp32; `word` is fp32 [1] of scratch space."""
    if scale > np.float32(448.0):
        return 0x7E
    if scale < np.float32(0.015625):
        return int(np.rint(scale * np.float32(512.0)))
    word[0] = scale
    bits = np.int64(word.view(np.int32)[0])
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)


_encode_e4m3 = _compile(_encode_e4m3_loop, int64(float32, float32[::1]))


def _rotate_loop(row: Any, width: Any, factor: Any) -> None:
    stride = 1
    while stride < width:
        for start in range(0, row.size, 2 * stride):
            for i in range(start, start + stride):
                low, high = row[i], row[i + stride]
                row[i] = low + high
                row[i + stride] = low - high
        stride *= 2
    for i in range(row.size):
        row[i] *= factor


_rotate = _compile(_rotate_loop, types.void(float32[::1], int64, float32))


def _quantize_rows_loop(
    x: Any,
    rotation: Any,
    factor: Any,
    static_scale: Any,
    codes: Any,
    scales: Any,
    global_scales: Any,
    values: Any,
    counters: Any,
) -> None:
    """Quantizes x [N, K]; `static_scale` 0 means a power of two a row; `values` (BF16 bits) may have no rows."""
    rows, k = x.shape
    row = np.empty(k, dtype=np.float32)
    bits = row.view(np.int32)
    word = np.empty(1, dtype=np.float32)
    word_bits = word.view(np.int32)
    kept = np.empty(16, dtype=np.float32)
    kept_bits = kept.view(np.int32)
    nibbles = np.empty(16, dtype=np.uint8)
    with_values = values.shape[0] > 0
    for r in range(rows):
        for i in range(k):
            row[i] = x[r, i]
        if rotation > 1:
            _rotate(row, rotation, factor)
        g = static_scale
        if g == np.float32(0.0):
            # Magnitudes of finite fp32 values compare like their bits.
            top = np.int32(0)
            for i in range(k):
                magnitude = bits[i] & np.int32(0x7FFFFFFF)
                if magnitude < _INF_BITS:
                    top = max(top, magnitude)
            exponent = int(top >> 23) - 138 + (1 if (top & 0x7FFFFF) > 0x280000 else 0)
            exponent = 0 if top == 0 else min(max(exponent, MIN_EXPONENT), MAX_EXPONENT)
            word_bits[0] = np.int32((exponent + 127) << 23)
            g = word[0]
        global_scales[r] = g
        to_scale = (np.float32(1.0) / g) * _SIXTH
        for b in range(k // 16):
            base = b * 16
            top = np.int32(0)
            for i in range(base, base + 16):
                top = max(top, bits[i] & np.int32(0x7FFFFFFF))
            if top >= _INF_BITS:
                for i in range(base, base + 16):
                    counters[0] += (bits[i] & np.int32(0x7FFFFFFF)) >= _INF_BITS
                scales[r, b] = 0x7F
                for i in range(8):
                    codes[r, b * 8 + i] = 0
                if with_values:
                    for i in range(base, base + 16):
                        values[r, i] = 0x7FC0
                continue
            word_bits[0] = top
            unrounded = word[0] * to_scale
            byte = _encode_e4m3(unrounded, word)
            scales[r, b] = byte
            if byte == 0:
                counters[2] += top > 0
                for i in range(8):
                    codes[r, b * 8 + i] = 0
                if with_values:
                    for i in range(base, base + 16):
                        values[r, i] = 0
                continue
            scale = _E4M3[byte]
            inverse = np.float32(1.0) / (scale * g)
            for i in range(16):
                u = row[base + i] * inverse
                a = abs(u)
                # Thresholds are the midpoints; >= where the upper neighbour has the even code.
                index = np.uint8(a > np.float32(0.25)) + np.uint8(a >= np.float32(0.75))
                index += np.uint8(a > np.float32(1.25)) + np.uint8(a >= np.float32(1.75))
                index += np.uint8(a > np.float32(2.5)) + np.uint8(a >= np.float32(3.5))
                index += np.uint8(a > np.float32(5.0))
                nibbles[i] = index + (np.uint8(bits[base + i] < 0) << 3)
            for i in range(8):
                codes[r, b * 8 + i] = nibbles[2 * i] | (nibbles[2 * i + 1] << 4)
            if unrounded > _CLIP:
                for i in range(16):
                    counters[1] += abs(row[base + i] * inverse) > np.float32(6.0)
            if with_values:
                for i in range(16):
                    kept[i] = (_E2M1[nibbles[i]] * scale) * g
                for i in range(16):
                    word32 = kept_bits[i]
                    values[r, base + i] = (word32 + 0x7FFF + ((word32 >> 16) & 1)) >> 16


quantize_rows = _compile(
    _quantize_rows_loop,
    types.void(
        float32[:, ::1],
        int64,
        float32,
        float32,
        uint8[:, ::1],
        uint8[:, ::1],
        float32[::1],
        uint16[:, ::1],
        int64[::1],
    ),
)


def _gather_dequantize_loop(codes: Any, scales: Any, index: Any, global_scale: Any, out: Any) -> Any:
    """Fills `out` (BF16 bits) [n, heads, D]; returns the first position whose slot is outside the pool, or -1."""
    slots, heads, half = codes.shape
    kept = np.empty(2, dtype=np.float32)
    kept_bits = kept.view(np.int32)
    for n in range(index.size):
        slot = index[n]
        if slot < 0 or slot >= slots:
            return n
        for h in range(heads):
            for b in range(half // 8):
                byte = scales[slot, h, b]
                scale = _E4M3[byte]
                if byte & 0x7F == 0x7F:
                    for i in range(16):
                        out[n, h, b * 16 + i] = 0x7FC0
                    continue
                for i in range(8):
                    pair = codes[slot, h, b * 8 + i]
                    kept[0] = (_E2M1[pair & 15] * scale) * global_scale
                    kept[1] = (_E2M1[pair >> 4] * scale) * global_scale
                    for j in range(2):
                        word32 = kept_bits[j]
                        out[n, h, b * 16 + 2 * i + j] = (word32 + 0x7FFF + ((word32 >> 16) & 1)) >> 16
    return -1


gather_dequantize = _compile(
    _gather_dequantize_loop,
    int64(
        types.Array(uint8, 3, "A"),
        types.Array(uint8, 3, "A"),
        types.Array(int64, 1, "A"),
        float32,
        uint16[:, :, ::1],
    ),
)


def _hint_bits_loop(blocks: Any, out: Any) -> None:
    for n in range(blocks.shape[0]):
        bits = 0
        for i in range(8):
            byte = int(blocks[n, i])
            bits |= ((byte & 1) << (2 * i)) | (((byte >> 4) & 1) << (2 * i + 1))
        out[n] = bits


hint_bits = _compile(_hint_bits_loop, types.void(uint8[:, ::1], uint16[::1]))
