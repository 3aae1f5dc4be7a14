"""Attention over a paged KV pool as compiled loops: gather, dequantize, scores, softmax and weighted sum.

Every sum runs in an order that depends on the row alone (head_dim ascending for scores, keys ascending for values,
16 fixed lanes for the softmax denominator), with each operation rounded on its own. So the bits of a row depend on its
own query and its own keys and values, never on the batch it is computed in nor on how its prompt was cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, int64, types, uint8, uint16

from trace_serve.kernels.cpu_decode import scale_values
from trace_serve.kernels.cpu_stages import compiled

KEYS = 64
"""Keys a tile: 64 of head_dim 64 in fp32 are 16 KiB, half of a usual first-level cache."""
ROWS = 32
"""Query tokens that share one reading of the keys; bounds the score buffer to 32 * group * context values."""

_ONE = np.int32(1)
_ZERO = np.float32(0.0)
_ROUND = np.int32(0x7FFF)
_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_SMALLEST = np.float32(-87.0)
_MAGIC = np.float32(12582912.0)


@compiled(float32(int32))
def _value(nibble: Any) -> Any:
    """The number that the low four bits stand for in E2M1."""
    magnitude = np.int32(nibble & np.int32(7))
    bits = np.int32(np.int32(magnitude + np.int32(252)) << np.int32(22))
    bits = np.int32(magnitude * np.int32(0x3F000000)) if magnitude < np.int32(2) else bits
    sign = np.int32(np.int32(nibble & np.int32(8)) << np.int32(28))
    return np.int32(bits | sign).view(np.float32)


@compiled(types.void(float32[::1], float32, float32, int64))
def exponentials(x: Any, scale: Any, top: Any, count: Any) -> None:
    """x[i] = exp(x[i] * scale - top) for i < count, in fp32 within 2 ulp; below exp(-87) it is exp(-87), about 1e-38.

    Range reduction in two parts and a polynomial of degree 5 (S. Moshier, Cephes, expf), without a call, so that the
    loop becomes vector instructions.
    """
    for i in range(count):
        v = np.float32(np.float32(x[i] * scale) - top)
        v = max(v, _SMALLEST)
        # Adding 1.5 * 2^23 rounds to a whole number.
        n = np.float32(np.float32(np.float32(v * _LOG2E) + _MAGIC) - _MAGIC)
        r = np.float32(np.float32(v - np.float32(n * _LN2_HIGH)) - np.float32(n * _LN2_LOW))
        p = np.float32(1.9875691500e-4)
        p = np.float32(np.float32(p * r) + np.float32(1.3981999507e-3))
        p = np.float32(np.float32(p * r) + np.float32(8.3334519073e-3))
        p = np.float32(np.float32(p * r) + np.float32(4.1665795894e-2))
        p = np.float32(np.float32(p * r) + np.float32(1.6666665459e-1))
        p = np.float32(np.float32(p * r) + np.float32(5.0000001201e-1))
        p = np.float32(np.float32(np.float32(p * np.float32(r * r)) + r) + np.float32(1.0))
        power = np.int32(np.int32(np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
        x[i] = np.float32(p * power)


@compiled(float32(float32[::1], float32, int64))
def softmax_numerators(scores: Any, scale: Any, count: Any) -> Any:
    """Turns the first `count` scores into exp(score * scale - maximum) and returns their sum; NaN if any is not finite.

    The buffer has room up to the next multiple of 16.
    """
    top = np.float32(-np.inf)
    unordered = np.int32(0)
    for i in range(count):
        value = np.float32(scores[i] * scale)
        top = value if value > top else top
        unordered = np.int32(unordered | np.int32(value != value))
    if unordered or abs(top) == np.float32(np.inf):
        return np.float32(np.nan)
    exponentials(scores, scale, top, count)
    lanes = np.zeros(16, dtype=np.float32)
    padded = (count + 15) // 16 * 16
    for i in range(count, padded):
        scores[i] = np.float32(0.0)
    for b in range(padded // 16):
        for j in range(16):
            lanes[j] += scores[b * 16 + j]
    width = 8
    while width > 0:
        for j in range(width):
            lanes[j] += lanes[j + width]
        width //= 2
    return lanes[0]


@compiled(types.void(float32[::1], float32[:, ::1], float32[::1]))
def score_tile(query: Any, keys: Any, out: Any) -> None:
    """out [KEYS] = query [D] . keys [D, KEYS]; D a multiple of 4."""
    for j in range(KEYS):
        out[j] = _ZERO
    for d in range(0, query.size, 4):
        q0, q1, q2, q3 = query[d], query[d + 1], query[d + 2], query[d + 3]
        k0, k1, k2, k3 = keys[d], keys[d + 1], keys[d + 2], keys[d + 3]
        for j in range(KEYS):
            out[j] = out[j] + q0 * k0[j] + q1 * k1[j] + q2 * k2[j] + q3 * k3[j]


@compiled(types.void(float32[:, ::1], float32[:, ::1], float32[:, ::1], int64))
def score_tile_of_four(query: Any, keys: Any, scores: Any, begin: Any) -> None:
    """`score_tile` of four rows into columns from `begin`: the same sums, with each key loaded once for all four."""
    a, b = scores[0, begin : begin + KEYS], scores[1, begin : begin + KEYS]
    c, e = scores[2, begin : begin + KEYS], scores[3, begin : begin + KEYS]
    for j in range(KEYS):
        a[j] = b[j] = c[j] = e[j] = _ZERO
    for d in range(0, query.shape[1], 4):
        k0, k1, k2, k3 = keys[d], keys[d + 1], keys[d + 2], keys[d + 3]
        a0, a1, a2, a3 = query[0, d], query[0, d + 1], query[0, d + 2], query[0, d + 3]
        b0, b1, b2, b3 = query[1, d], query[1, d + 1], query[1, d + 2], query[1, d + 3]
        c0, c1, c2, c3 = query[2, d], query[2, d + 1], query[2, d + 2], query[2, d + 3]
        e0, e1, e2, e3 = query[3, d], query[3, d + 1], query[3, d + 2], query[3, d + 3]
        for j in range(KEYS):
            x0, x1, x2, x3 = k0[j], k1[j], k2[j], k3[j]
            a[j] = a[j] + a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            b[j] = b[j] + b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
            c[j] = c[j] + c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
            e[j] = e[j] + e0 * x0 + e1 * x1 + e2 * x2 + e3 * x3


@compiled(types.void(float32[::1], float32[:, ::1], int64, int64, float32[::1]))
def add_values(weights: Any, values: Any, first: Any, end: Any, out: Any) -> None:
    """out [D] += sum over tokens first to end of the tile, ascending, of weight * values [KEYS, D]."""
    whole = first + (end - first) // 4 * 4
    for t in range(first, whole, 4):
        p0, p1, p2, p3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        v0, v1, v2, v3 = values[t], values[t + 1], values[t + 2], values[t + 3]
        for d in range(out.size):
            out[d] = out[d] + p0 * v0[d] + p1 * v1[d] + p2 * v2[d] + p3 * v3[d]
    for t in range(whole, end):
        p0 = weights[t]
        v0 = values[t]
        for d in range(out.size):
            out[d] = out[d] + p0 * v0[d]


@compiled(types.void(float32[:, ::1], int64, float32[:, ::1], int64, float32[:, ::1]))
def add_values_to_four(scores: Any, begin: Any, values: Any, end: Any, out: Any) -> None:
    """`add_values` from the tile's first token for four rows, as far as `end`, a multiple of 4."""
    a, b, c, e = out[0], out[1], out[2], out[3]
    for t in range(0, end, 4):
        i = begin + t
        v0, v1, v2, v3 = values[t], values[t + 1], values[t + 2], values[t + 3]
        a0, a1, a2, a3 = scores[0, i], scores[0, i + 1], scores[0, i + 2], scores[0, i + 3]
        b0, b1, b2, b3 = scores[1, i], scores[1, i + 1], scores[1, i + 2], scores[1, i + 3]
        c0, c1, c2, c3 = scores[2, i], scores[2, i + 1], scores[2, i + 2], scores[2, i + 3]
        e0, e1, e2, e3 = scores[3, i], scores[3, i + 1], scores[3, i + 2], scores[3, i + 3]
        for d in range(out.shape[1]):
            x0, x1, x2, x3 = v0[d], v1[d], v2[d], v3[d]
            a[d] = a[d] + a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            b[d] = b[d] + b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
            c[d] = c[d] + c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
            e[d] = e[d] + e0 * x0 + e1 * x1 + e2 * x2 + e3 * x3


_POOL = (uint8[:, ::1], uint16[:, ::1])


@compiled(*(types.void(pool, uint8[:, ::1], float32, int64, int32[::1], float32[:, ::1]) for pool in _POOL))
def load_keys(pool: Any, scale_bytes: Any, global_scale: Any, head: Any, slots: Any, out: Any) -> None:
    """out [D, KEYS] = the keys of the slots (at most KEYS) in fp32, transposed; columns past them are zero.

    `pool` holds packed codes [slots, heads * D/2] with block scales, or BF16 bits [slots, heads * D].
    """
    count = slots.size
    if pool.itemsize == 2:
        out[:, :] = np.float32(0.0)
        for t in range(count):
            row = pool[slots[t], head * out.shape[0] : (head + 1) * out.shape[0]]
            for d in range(out.shape[0]):
                out[d, t] = np.int32(np.int32(row[d]) << np.int32(16)).view(np.float32)
        return
    half = out.shape[0] // 2
    blocks = out.shape[0] // 16
    packed = np.zeros((half, KEYS), dtype=np.uint8)
    factors = np.zeros((blocks, KEYS), dtype=np.float32)
    scales = np.empty(blocks, dtype=np.float32)
    for t in range(count):
        row = pool[slots[t], head * half : (head + 1) * half]
        for i in range(half):
            packed[i, t] = np.uint8(row[i])
        scale_values(scale_bytes[slots[t], head * blocks : (head + 1) * blocks], scales)
        for b in range(blocks):
            factors[b, t] = np.float32(scales[b] * global_scale)
    for i in range(half):
        codes, factor, low, high = packed[i], factors[i // 8], out[2 * i], out[2 * i + 1]
        for t in range(KEYS):
            low[t] = np.float32(_value(np.int32(codes[t])) * factor[t])
        for t in range(KEYS):
            high[t] = np.float32(_value(np.int32(np.int32(codes[t]) >> np.int32(4))) * factor[t])


@compiled(types.void(uint8[::1], uint16[::1]), types.void(uint16[::1], uint16[::1]))
def unpack(codes: Any, pairs: Any) -> None:
    """One code a byte from two, the even one first. Compiled for BF16 bits too, but never run on them."""
    for i in range(codes.size):
        byte = np.uint16(codes[i])
        high = np.uint16(np.uint16(byte >> np.uint16(4)) << np.uint16(8))
        pairs[i] = np.uint16(np.uint16(byte & np.uint16(15)) | high)


@compiled(*(types.void(pool, uint8[:, ::1], float32, int64, int32[::1], float32[:, ::1]) for pool in _POOL))
def load_values(pool: Any, scale_bytes: Any, global_scale: Any, head: Any, slots: Any, out: Any) -> None:
    """out [KEYS, D]: its first rows are the values of the slots in fp32. `pool` as in `load_keys`."""
    width = out.shape[1]
    half, blocks = width // 2, width // 16
    scales = np.empty(blocks, dtype=np.float32)
    nibbles = np.empty(width, dtype=np.uint8)
    for t in range(slots.size):
        if pool.itemsize == 2:
            row = pool[slots[t], head * width : (head + 1) * width]
            for d in range(width):
                out[t, d] = np.int32(np.int32(row[d]) << np.int32(16)).view(np.float32)
        else:
            unpack(pool[slots[t], head * half : (head + 1) * half], nibbles.view(np.uint16))
            scale_values(scale_bytes[slots[t], head * blocks : (head + 1) * blocks], scales)
            for b in range(blocks):
                factor = np.float32(scales[b] * global_scale)
                for i in range(16):
                    out[t, b * 16 + i] = np.float32(_value(np.int32(nibbles[b * 16 + i])) * factor)


@compiled(types.void(float32[::1], float32, uint16[::1]))
def store(row: Any, denominator: Any, out: Any) -> None:
    """out = row / denominator, rounded to the nearest BF16, ties to even."""
    for d in range(row.size):
        bits = np.float32(row[d] / denominator).view(np.int32)
        rounded = np.int32(bits + np.int32(_ROUND + np.int32(np.int32(bits >> np.int32(16)) & _ONE)))
        is_nan = np.int32(bits & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000)
        out[d] = np.uint16(np.int32(0x7FC0) if is_nan else np.int32(rounded >> np.int32(16)))


@compiled(
    *(
        int64(
            uint16[:, ::1],
            int64[::1],
            int64[::1],
            int64[::1],
            types.Array(int32, 2, "C"),
            pool,
            uint8[:, ::1],
            float32,
            pool,
            uint8[:, ::1],
            float32,
            int64,
            float32,
            uint16[:, ::1],
        )
        for pool in _POOL
    )
)
def attend(
    query: Any,
    starts: Any,
    lengths: Any,
    table_rows: Any,
    table: Any,
    keys: Any,
    key_scales: Any,
    key_global: Any,
    values: Any,
    value_scales: Any,
    value_global: Any,
    kv_heads: Any,
    scaling: Any,
    out: Any,
) -> Any:
    """Causal attention of every sequence of a batch; a sequence's queries are its last tokens.

    Args:
        query: BF16 bits [N, heads * D].
        starts: [B + 1], first query of each sequence.
        lengths: [B], tokens of each sequence in the pool, its queries' own included.
        table_rows: [B], row of each sequence in `table`.
        table: [rows, context], slots of each sequence's tokens.
        keys, values: packed codes [slots, kv_heads * D/2], or BF16 bits [slots, kv_heads * D].
        key_scales, value_scales: E4M3 bytes [slots, kv_heads * D/16]; not read with BF16.
        key_global, value_global: static global scales.
        scaling: factor of the scores.
        out: BF16 bits [N, heads * D].

    Returns:
        The first sequence with a slot outside the pool or another length than its queries need, or -1; then `out` is
        not complete.
    """
    dim = keys.shape[1] // kv_heads * (1 if keys.itemsize == 2 else 2)
    group = query.shape[1] // (dim * kv_heads)
    longest, most = 0, 0
    for s in range(lengths.size):
        count = starts[s + 1] - starts[s]
        if count < 0 or count > lengths[s] or lengths[s] > table.shape[1]:
            return s
        for t in range(lengths[s]):
            slot = table[table_rows[s], t]
            if slot < 0 or slot >= keys.shape[0]:
                return s
        longest, most = max(longest, lengths[s]), max(most, min(count, ROWS))
    # One cache line more than whole tiles, so that the rows of one tile do not all fall into the same cache sets.
    scores = np.empty((most * group, (longest + KEYS - 1) // KEYS * KEYS + 16), dtype=np.float32)
    sums = np.empty((most * group, dim), dtype=np.float32)
    rows = np.empty((most * group, dim), dtype=np.float32)
    key_tile = np.empty((dim, KEYS), dtype=np.float32)
    value_tile = np.empty((KEYS, dim), dtype=np.float32)
    denominators = np.empty(most * group, dtype=np.float32)
    for s in range(lengths.size):
        slots = table[table_rows[s]]
        for first in range(starts[s], starts[s + 1], ROWS):
            count = min(ROWS, starts[s + 1] - first)
            # Keys that the first of these queries sees; each next one sees one more.
            seen = lengths[s] - (starts[s + 1] - first) + 1
            last = seen + count - 1
            for head in range(kv_heads):
                for r in range(count):
                    for g in range(group):
                        h = head * group + g
                        source = query[first + r, h * dim : (h + 1) * dim]
                        for d in range(dim):
                            rows[r * group + g, d] = np.int32(np.int32(source[d]) << np.int32(16)).view(np.float32)
                for begin in range(0, last, KEYS):
                    load_keys(keys, key_scales, key_global, head, slots[begin : min(begin + KEYS, last)], key_tile)
                    row = max(0, begin - seen + 1) * group
                    while row + 4 <= count * group:
                        score_tile_of_four(rows[row : row + 4], key_tile, scores[row : row + 4], begin)
                        row += 4
                    while row < count * group:
                        score_tile(rows[row], key_tile, scores[row, begin : begin + KEYS])
                        row += 1
                for r in range(count):
                    for g in range(group):
                        row = r * group + g
                        denominators[row] = softmax_numerators(scores[row], scaling, seen + r)
                sums[:, :] = np.float32(0.0)
                for begin in range(0, last, KEYS):
                    load_values(
                        values, value_scales, value_global, head, slots[begin : min(begin + KEYS, last)], value_tile
                    )
                    row = max(0, begin - seen + 1) * group
                    while row < count * group:
                        step, shared = 1, 0
                        if row + 4 <= count * group:
                            step, shared = 4, min(KEYS, seen + row // group - begin) // 4 * 4
                            add_values_to_four(scores[row : row + 4], begin, value_tile, shared, sums[row : row + 4])
                        for each in range(row, row + step):
                            visible = min(KEYS, seen + each // group - begin)
                            add_values(scores[each, begin : begin + KEYS], value_tile, shared, visible, sums[each])
                        row += step
                for r in range(count):
                    for g in range(group):
                        h = head * group + g
                        row = r * group + g
                        store(sums[row], denominators[row], out[first + r, h * dim : (h + 1) * dim])
    return -1
