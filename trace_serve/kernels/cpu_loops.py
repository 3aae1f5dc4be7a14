"""The CPU kernels on numpy arrays: for each row, the steps of `cpu_stages` while the row lies in cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, int64, types, uint8, uint16

from trace_serve.kernels import cpu_stages as stages
from trace_serve.kernels.cpu_stages import INF_BITS, compiled
from trace_serve.nvfp4.e4m3 import CLIP_THRESHOLD
from trace_serve.nvfp4.global_scale import MAX_EXPONENT, MIN_EXPONENT

_SIXTH = np.float32(1.0 / 6.0)
_CLIP = np.float32(CLIP_THRESHOLD)
_MAGNITUDE = np.int32(0x7FFFFFFF)


@compiled(float32(int32[::1], int32[::1], types.boolean))
def _row_scale(bits: Any, maxima: Any, all_finite: Any) -> Any:
    """2^ceil(log2(amax / 2688)) of the row's finite values, as `nvfp4.pow2_global_scale`."""
    top = np.int32(0)
    if all_finite:
        for b in range(maxima.size):
            top = np.int32(max(top, maxima[b]))
    else:
        for i in range(bits.size):
            magnitude = np.int32(bits[i] & _MAGNITUDE)
            if magnitude < INF_BITS:
                top = np.int32(max(top, magnitude))
    exponent = int(top >> 23) - 138 + (1 if (top & 0x7FFFFF) > 0x280000 else 0)
    exponent = 0 if top == 0 else min(max(exponent, MIN_EXPONENT), MAX_EXPONENT)
    return np.int32((exponent + 127) << 23).view(np.float32)


@compiled(types.void(int32[::1], int32[::1], float32, float32[::1], uint8[::1], uint8[::1], float32[::1], int64[::1]))
def _settle_incidents(
    bits: Any, maxima: Any, to_scale: Any, inverses: Any, nibbles: Any, scale_bytes: Any, scales: Any, counters: Any
) -> None:
    """Counts what is not finite and what was clipped in a row, and makes blocks that are not finite read as NaN."""
    row = bits.view(np.float32)
    for b in range(maxima.size):
        if maxima[b] >= INF_BITS:
            for i in range(b * 16, b * 16 + 16):
                counters[0] += np.int32(bits[i] & _MAGNITUDE) >= INF_BITS
                nibbles[i] = 0
            scale_bytes[b] = 0x7F
            scales[b] = np.nan
        elif np.float32(np.int32(maxima[b]).view(np.float32) * to_scale) > _CLIP:
            for i in range(b * 16, b * 16 + 16):
                counters[1] += abs(np.float32(row[i] * inverses[b])) > np.float32(6.0)


@compiled(
    *(
        types.void(
            source,
            int64,
            float32,
            float32,
            uint8[:, ::1],
            uint8[:, ::1],
            float32[::1],
            uint16[:, ::1],
            uint16[:, ::1],
            int64[::1],
        )
        for source in (uint16[:, ::1], float32[:, ::1])
    )
)
def quantize_rows(
    x: Any,
    rotation: Any,
    factor: Any,
    static_scale: Any,
    codes: Any,
    scale_bytes: Any,
    global_scales: Any,
    hints: Any,
    values: Any,
    counters: Any,
) -> None:
    """Quantizes x [N, K], BF16 bits or fp32.

    `static_scale` 0 means a power of two a row; `hints` [N, K/16] and `values` (BF16 bits) [N, K] may have no rows.
    """
    rows, k = x.shape
    blocks = k // 16
    bits = np.empty(k, dtype=np.int32)
    row = bits.view(np.float32)
    maxima = np.empty(blocks, dtype=np.int32)
    eighths = np.empty(k // 2, dtype=np.uint32)
    quarters = np.empty(k // 4, dtype=np.uint32)
    scales = np.empty(blocks, dtype=np.float32)
    inverses = np.empty(blocks, dtype=np.float32)
    signs = np.empty(blocks, dtype=np.int32)
    nibbles = np.empty(k, dtype=np.uint8)
    narrow_eighths, narrow_quarters = eighths.view(np.uint16)[: k // 2], quarters.view(np.uint16)[: k // 4]
    halves = np.empty(k // 8, dtype=np.uint16)
    rotated = rotation > 1
    for r in range(rows):
        if rotated:
            stages.load_bits(x[r], bits)
            stages.rotate(row, rotation, factor)
        if x.itemsize == 2 and not rotated:
            stages.block_maxima_bf16(x[r].view(np.uint16), narrow_eighths, narrow_quarters, halves, maxima)
        else:
            stages.block_maxima(bits if rotated else x[r].view(np.int32), eighths, quarters, maxima)
        widest = np.int32(0)
        for b in range(blocks):
            widest = np.int32(max(widest, maxima[b]))
        all_finite = widest < INF_BITS
        if not (all_finite or rotated):
            stages.load_bits(x[r], bits)
        g = static_scale if static_scale != np.float32(0.0) else _row_scale(bits, maxima, all_finite)
        global_scales[r] = g
        to_scale = np.float32(np.float32(np.float32(1.0) / g) * _SIXTH)
        stages.block_scales(maxima, to_scale, g, scale_bytes[r], scales, inverses, signs)
        if rotated:
            stages.e2m1_codes(row, inverses, signs, nibbles)
        else:
            stages.e2m1_codes(x[r], inverses, signs, nibbles)
        vanished = 0
        for b in range(blocks):
            vanished += (signs[b] == 0) & (maxima[b] > 0)
        counters[2] += vanished
        if np.float32(np.int32(widest).view(np.float32) * to_scale) > _CLIP or not all_finite:
            if not rotated:
                stages.load_bits(x[r], bits)
            _settle_incidents(bits, maxima, to_scale, inverses, nibbles, scale_bytes[r], scales, counters)
        stages.pack_codes(nibbles.view(np.uint16), codes[r])
        if hints.shape[0] > 0:
            stages.hint_words(codes[r].view(np.uint64), hints[r])
        if values.shape[0] > 0:
            stages.bf16_values(nibbles, scales, g, values[r])


@compiled(int64(uint8[:, ::1], uint8[:, ::1], types.Array(int64, 1, "A"), float32, uint16[:, ::1]))
def gather_dequantize(codes: Any, scale_bytes: Any, index: Any, global_scale: Any, out: Any) -> Any:
    """Fills `out` (BF16 bits) [n, K] from slots [slots, K/2]; returns the first position outside the pool, or -1."""
    nibbles = np.empty(out.shape[1], dtype=np.uint8)
    scales = np.empty(scale_bytes.shape[1], dtype=np.float32)
    for n in range(index.size):
        slot = index[n]
        if slot < 0 or slot >= codes.shape[0]:
            return n
        stages.scale_values(scale_bytes[slot], scales)
        stages.unpack_codes(codes[slot], nibbles.view(np.uint16))
        stages.bf16_values(nibbles, scales, global_scale, out[n])
    return -1
