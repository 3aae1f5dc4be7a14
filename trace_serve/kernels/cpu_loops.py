"""The CPU quantizer on addresses: strips of a few thousand values go through the steps of `cpu_stages` in cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, float32, int32, int64, types, uint8

from trace_serve.kernels import cpu_stages as stages
from trace_serve.kernels.cpu_decode import dequantize
from trace_serve.kernels.cpu_memory import fetch_ahead, pointer
from trace_serve.kernels.cpu_stages import STRIP, compiled
from trace_serve.nvfp4.e4m3 import CLIP_THRESHOLD
from trace_serve.nvfp4.global_scale import FLOAT32_MAX, MAX_EXPONENT, MIN_EXPONENT

STATIC, POW2_PER_TOKEN, PER_TOKEN = range(3)
"""Where the global scale comes from: the arguments, or each row's maximum as a power of two or as fp32."""
TOKEN_SCALES = {"pow2_per_token": POW2_PER_TOKEN, "per_token": PER_TOKEN}

_INF_BITS = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_CLIP = np.float32(CLIP_THRESHOLD)
_CLIP_BITS = np.int32(_CLIP.view(np.int32))
# 2^-10 is the tie below which a scale rounds to zero.
_VANISHING = np.float32(2.0**-10)
_VANISHING_BITS = np.int32(_VANISHING.view(np.int32))
_FLOAT_MAX = np.float32(FLOAT32_MAX)
_SIX = np.float32(6.0)


@compiled(int32(int32[::1]))
def _finite_top(bits: Any) -> Any:
    """The bits of the largest finite magnitude of a row."""
    top = np.int32(0)
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & _MAGNITUDE)
        if magnitude < _INF_BITS:
            top = np.int32(max(top, magnitude))
    return top


@compiled(float32(int32, int64, int64))
def _pow2_scale(top: Any, fraction: Any, bias: Any) -> Any:
    """`nvfp4.pow2_global_scale`."""
    exponent = int(top >> 23) - bias + (1 if (top & 0x7FFFFF) > fraction else 0)
    exponent = 0 if top == 0 else min(max(exponent, MIN_EXPONENT), MAX_EXPONENT)
    return np.int32((exponent + 127) << 23).view(np.float32)


@compiled(types.void(int64, float32[::1], uint8[::1], float32[::1]))
def _fill_zero_scales(rule: Any, unrounded: Any, scale_bytes: Any, scales: Any) -> None:
    """`nvfp4.block_scale.fill_zero_scales`."""
    for b in range(scales.size):
        if scale_bytes[b] == 0:
            one = rule == stages.ONE and unrounded[b] == np.float32(0.0)
            scale_bytes[b] = 0x38 if one else 0x01
            scales[b] = np.float32(1.0) if one else np.float32(2.0**-9)


@compiled(
    types.void(
        int32[::1],
        int32[::1],
        float32[::1],
        float32[::1],
        types.boolean,
        int64,
        uint8[::1],
        uint8[::1],
        float32[::1],
        int64[::1],
    )
)
def _settle(
    bits: Any,
    maxima: Any,
    unrounded: Any,
    factors: Any,
    divide: Any,
    rule: Any,
    codes: Any,
    scale_bytes: Any,
    scales: Any,
    counters: Any,
) -> None:
    """Counts incidents, and sets the codes of blocks that are not finite or, under rule `zero`, have no scale."""
    row = bits.view(np.float32)
    for b in range(maxima.size):
        if maxima[b] >= _INF_BITS:
            for i in range(16 * b, 16 * b + 16):
                counters[0] += np.int32(bits[i] & _MAGNITUDE) >= _INF_BITS
            codes[8 * b : 8 * b + 8] = 0
            scale_bytes[b] = 0x7F
            scales[b] = np.nan
            continue
        if unrounded[b] > _CLIP:
            factor = factors[8 * b]
            for i in range(16 * b, 16 * b + 16):
                u = np.float32(row[i] / factor) if divide else np.float32(row[i] * factor)
                counters[1] += abs(u) > _SIX
        if unrounded[b] <= _VANISHING:
            counters[2] += maxima[b] > 0
            if rule == stages.ZERO:
                codes[8 * b : 8 * b + 8] = 0


@compiled(
    types.void(
        int64, int64, int64, int64, int64, float32, int64, float32, float32, float32, int64, int64, float32, int64,
        int64, types.boolean, types.boolean, int64, int64, int64, int64, int64, int64,
    )
)  # fmt: skip
def quantize_rows(
    x: Any,
    rows: Any,
    k: Any,
    itemsize: Any,
    rotation: Any,
    rotation_factor: Any,
    mode: Any,
    static_scale: Any,
    static_encode: Any,
    static_decode: Any,
    fraction: Any,
    bias: Any,
    most: Any,
    formula: Any,
    zero_block: Any,
    divide: Any,
    ties_up: Any,
    codes: Any,
    scale_bytes: Any,
    global_scales: Any,
    hints: Any,
    values: Any,
    counters: Any,
) -> None:
    """Quantizes contiguous x [rows, k] of BF16 (`itemsize` 2) or fp32 (4) at an address.

    `static_scale` is kept with the codes, `static_encode` and `static_decode` are what the arithmetic uses; `fraction`,
    `bias` and `most` say what 6 * scale_max is. `codes` and what follows are addresses, as in `nvfp4.Quantized`, of
    `values` BF16 [rows, k] and of int64 [3]; `hints` and `values` may be 0.
    """
    total = rows * k
    all_codes = carray(pointer(codes), total // 2, np.uint8)
    all_scales = carray(pointer(scale_bytes), total // 16, np.uint8)
    kept_scales = carray(pointer(global_scales), rows, np.float32)
    incidents = carray(pointer(counters), 3, np.int64)
    if mode == STATIC:
        # Rows do not matter then, and short ones would leave lanes idle.
        for r in range(rows):
            kept_scales[r] = static_scale
        step, width = STRIP, STRIP
    else:
        step, width = k * max(1, STRIP // k), k
    size = min(step, total)
    scratch = np.empty(10 * size, dtype=np.uint8)
    free = scratch.ctypes.data
    bits = carray(pointer(free), size, np.int32)
    pairs = carray(pointer(free + 4 * size), size // 2, np.uint32)
    lanes = carray(pointer(free + 6 * size), size // 2, np.float32)
    maxima = carray(pointer(free + 8 * size), size // 16, np.int32)
    unrounded = carray(pointer(free + 8 * size + size // 4), size // 16, np.float32)
    scales = carray(pointer(free + 8 * size + size // 2), size // 16, np.float32)
    factors = carray(pointer(free + 8 * size + size // 4 * 3), size // 16, np.float32)
    block_steps = carray(pointer(free + 9 * size), size // 16, np.uint32)
    by_rule = divide or ties_up
    in_bits = itemsize == 4 or rotation > 1 or by_rule
    for start in range(0, total, step):
        n = min(step, total - start)
        b0, nb = start // 16, n // 16
        here = x + start * itemsize
        # The strip after the next, fetched in four parts: memory is read while the steps compute.
        later = here + 2 * step * itemsize
        quarter = step * itemsize // 4 if start + 3 * step <= total else 0
        out_codes, out_scales = all_codes[start // 2 : (start + n) // 2], all_scales[b0 : b0 + nb]
        if in_bits:
            if itemsize == 2:
                stages.load_bits(carray(pointer(here), n, np.uint16), bits[:n])
            else:
                stages.load_bits(carray(pointer(here), n, np.float32), bits[:n])
            if rotation > 1:
                stages.rotate(bits[:n].view(np.float32), rotation, rotation_factor)
            stages.pair_maxima(bits[:n], pairs[: n // 2])
        else:
            stages.pair_maxima_bf16(carray(pointer(here), n // 2, np.uint32), pairs[: n // 2])
        fetch_ahead(later, quarter)
        stages.block_maxima(pairs[: n // 2], maxima[:nb])
        fetch_ahead(later + quarter, quarter)
        low, high, widest = np.int32(_MAGNITUDE), np.int32(0), np.int32(0)
        for first in range(0, n, width):
            i, j = first // 16, min(first + width, n) // 16
            top = stages.largest(maxima[i:j])
            widest = np.int32(max(widest, top))
            encode, decode = static_encode, static_decode
            if mode != STATIC:
                if top >= _INF_BITS:
                    if not in_bits:
                        row = carray(pointer(here + first * itemsize), k, np.uint16)
                        stages.load_bits(row, bits[16 * i : 16 * j])
                    top = _finite_top(bits[16 * i : 16 * j])
                if mode == POW2_PER_TOKEN:
                    decode = _pow2_scale(top, fraction, bias)
                    encode = np.float32(np.float32(1.0) / decode)
                else:
                    encode = min(np.float32(most / np.int32(top).view(np.float32)), _FLOAT_MAX)
                    decode = np.float32(np.float32(1.0) / encode)
                kept_scales[(start + first) // k] = decode
            stages.unrounded_scales(maxima[i:j], formula, encode, decode, unrounded[i:j])
            row_low, row_high = stages.round_scales(unrounded[i:j], out_scales[i:j], scales[i:j])
            low, high = np.int32(min(low, row_low)), np.int32(max(high, row_high))
            if row_low <= _VANISHING_BITS and (zero_block == stages.ONE or zero_block == stages.MIN_SUBNORMAL):
                _fill_zero_scales(zero_block, unrounded[i:j], out_scales[i:j], scales[i:j])
            if divide:
                stages.divisors(scales[i:j], decode, factors[i:j])
            else:
                stages.reciprocals(scales[i:j], decode, factors[i:j])
        fetch_ahead(later + 2 * quarter, quarter)
        stages.spread(factors[:nb], lanes[: n // 2])
        if by_rule:
            stages.codes_by_rule(bits[:n], lanes[: n // 2], divide, ties_up, out_codes)
        elif in_bits:
            stages.codes_of_fp32(bits[:n], lanes[: n // 2], out_codes)
        else:
            stages.codes_of_bf16(carray(pointer(here), n // 2, np.int32), lanes[: n // 2], out_codes)
        if low <= _VANISHING_BITS or high > _CLIP_BITS or widest >= _INF_BITS:
            if not in_bits:
                stages.load_bits(carray(pointer(here), n, np.uint16), bits[:n])
            _settle(
                bits[:n], maxima[:nb], unrounded[:nb], lanes[: n // 2], divide, zero_block, out_codes, out_scales,
                scales[:nb], incidents,
            )  # fmt: skip
        fetch_ahead(later + 3 * quarter, quarter)
        if hints != 0:
            words = carray(pointer(hints + 2 * b0), nb, np.uint16)
            stages.hint_words(carray(pointer(codes + start // 2), nb, np.uint64), words)
        if values != 0:
            for first in range(0, n, width):
                last = min(first + width, n)
                g = static_scale if mode == STATIC else kept_scales[(start + first) // k]
                dequantize(
                    out_codes[first // 2 : last // 2],
                    out_scales[first // 16 : last // 16],
                    scales[first // 16 : last // 16],
                    g,
                    block_steps,
                    bits,
                    pairs,
                    values + 2 * (start + first),
                )
    # Memory is freed after its last use.
    scratch[:1] = 0
