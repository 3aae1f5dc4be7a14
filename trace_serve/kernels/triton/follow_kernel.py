"""The rule of `guided.rule` on blocks in registers, and the kernel that rounds rows as a rollout did."""

from __future__ import annotations

import triton.language as tl

from trace_serve.kernels.triton import block_rules, rows
from trace_serve.kernels.triton._jit import jit, kernel
from trace_serve.kernels.triton.block import (
    block_top,
    dequantize_wide,
    finite_block_top,
    over,
    quantize_blocks,
    store_codes,
    store_values,
    unrounded_scale,
)
from trace_serve.kernels.triton.formats import (
    e2m1_nibble,
    e2m1_value,
    e4m3_byte,
    e4m3_value,
    float_of,
    pack8,
    pow2_scale_bits,
)
from trace_serve.kernels.triton.load import load_blocks, values_of

NO_SCALES = tl.constexpr(0)
SCALE_BITS = tl.constexpr(1)
SCALE_BYTES = tl.constexpr(2)
"""What the rollout tells of a block's scale."""
_INF = tl.constexpr(0x7F800000)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@kernel("total", "passes")
def follow_rows_kernel(
    x: tl.tensor,
    bits: tl.tensor,
    given_scales: tl.tensor,
    own_scales: tl.tensor,
    rollout_scales: tl.tensor,
    present: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    global_scales: tl.tensor,
    values: tl.tensor,
    total: tl.int64,
    passes: tl.int32,
    tau: tl.float32,
    k_blocks: tl.constexpr,
    rows_held: tl.constexpr,
    lanes: tl.constexpr,
    mode: tl.constexpr,
    scale_max: tl.constexpr,
    kind: tl.constexpr,
    packed: tl.constexpr,
    with_rollout_scale: tl.constexpr,
    with_present: tl.constexpr,
    with_values: tl.constexpr,
    rules: tl.constexpr,
    level: tl.constexpr,
) -> None:
    """Rounds `rows_held` rows of `k_blocks` blocks; a row is `passes` passes of `lanes` lanes.

    Where each row's global scale comes from it, the row is read twice, the second time from cache. All tensors are
    contiguous; blocks from number `total` on do not exist.
    """
    n: tl.constexpr = rows_held * lanes
    lane = tl.arange(0, n)
    column = lane % lanes
    row = tl.program_id(0).to(tl.int64) * rows_held + lane // lanes
    exists = row * k_blocks < total
    one = tl.full([n], 1.0, tl.float32)
    if mode == rows.GIVEN:
        own_kept = tl.load(own_scales + row, mask=exists, other=1.0)
        own_decode = own_kept
        own_encode = tl.div_rn(one, own_kept)
    else:
        top = tl.zeros([n], tl.uint32)
        for c in range(passes):
            position = column + c * lanes
            mask = (position < k_blocks) & exists
            held = load_blocks(x, row * k_blocks + position, mask, packed, 0, 0, 1.0, level)
            top = tl.maximum(top, finite_block_top(held, packed))
        row_top = tl.max(tl.reshape(top, [rows_held, lanes]), axis=1)
        top = tl.reshape(tl.broadcast_to(tl.expand_dims(row_top, 1), [rows_held, lanes]), [n])
        if mode == rows.POW2_PER_TOKEN:
            scale_bits = pow2_scale_bits(top, scale_max)
            own_decode = float_of(scale_bits)
            own_encode = float_of(0x7F000000 - scale_bits)
        else:
            own_encode = tl.minimum(tl.div_rn(tl.full([n], 6.0 * scale_max, tl.float32), float_of(top)), _LARGEST)
            own_decode = tl.div_rn(one, own_encode)
        own_kept = own_decode
    kept = own_kept
    decode = own_decode
    encode = own_encode
    if with_rollout_scale:
        kept = tl.load(rollout_scales + row, mask=exists, other=1.0)
        encode = tl.div_rn(one, kept)
        decode = kept
        if mode == rows.PER_TOKEN:
            encode = tl.where(kept == own_kept, own_encode, encode)
            decode = tl.div_rn(one, encode)
    followed = tl.full([n], 1, tl.int1)
    if with_present:
        followed = tl.load(present + row, mask=exists, other=0) != 0
    g = tl.where(followed, kept, own_kept)
    tl.store(global_scales + row, g, mask=exists & (column == 0))
    for c in range(passes):
        position = column + c * lanes
        block = row * k_blocks + position
        mask = (position < k_blocks) & exists
        held = load_blocks(x, block, mask, packed, 0, 0, 1.0, level)
        word = tl.load(bits + block, mask=mask, other=0).to(tl.uint32)
        given = tl.load(given_scales + block, mask=mask, other=0).to(tl.uint32)
        top = block_top(held, packed)
        quantized = _follow_block(held, packed, top, word, given, encode, decode, tau, kind, rules, level)
        if with_present:
            own = quantize_blocks(held, packed, top, own_encode, own_decode, rules, level)
            first = tl.where(followed, quantized[0], own[0])
            second = tl.where(followed, quantized[1], own[1])
            quantized = (first, second, tl.where(followed, quantized[2], own[2]))
        store_codes(codes, scales, block, quantized, mask)
        if with_values:
            if packed:
                store_values(values, block, quantized, g, mask, level)
            else:
                octets = values + (block * 16)[:, None] + tl.arange(0, 8)[None, :]
                tl.store(octets, dequantize_wide(quantized[0], quantized[2], g), mask=mask[:, None])
                tl.store(octets + 8, dequantize_wide(quantized[1], quantized[2], g), mask=mask[:, None])


@jit
def _follow_block(
    held: tl.tuple,
    packed: tl.constexpr,
    top: tl.tensor,
    word: tl.tensor,
    given: tl.tensor,
    encode: tl.tensor,
    decode: tl.tensor,
    tau: tl.tensor,
    kind: tl.constexpr,
    rules: tl.constexpr,
    level: tl.constexpr,
) -> tl.tuple:
    """Packed codes of values 0..7 and 8..15, and the scale byte: uint32 [n] each."""
    finite = top < _INF
    byte = given
    if kind != SCALE_BYTES:
        unrounded = unrounded_scale(tl.where(finite, float_of(top), 0.0), encode, decode, rules)
        byte = e4m3_byte(unrounded, level)
        if kind == SCALE_BITS:
            byte = _follow_scale(unrounded, byte, given)
        fill: tl.constexpr = block_rules.zero_block(rules)
        if fill == block_rules.ONE:
            byte = tl.where(byte == 0, tl.where(unrounded == 0.0, 0x38, 1), byte)
        if fill == block_rules.MIN_SUBNORMAL:
            byte = tl.where(byte == 0, 1, byte)
    divisor = e4m3_value(byte) * decode
    usable = finite & (byte != 0) & (divisor != 0.0)
    divide: tl.constexpr = block_rules.divides(rules)
    one = tl.full(top.shape, 1.0, tl.float32)
    factor = divisor if divide else tl.minimum(tl.div_rn(one, divisor), _LARGEST)
    a_low, a_high, b_low, b_high = values_of(held, packed)
    first = pack8(
        _follow(over(a_low, factor, rules), word, 0, tau, usable),
        _follow(over(a_high, factor, rules), word, 1, tau, usable),
    )
    second = pack8(
        _follow(over(b_low, factor, rules), word, 8, tau, usable),
        _follow(over(b_high, factor, rules), word, 9, tau, usable),
    )
    return first, second, tl.where(finite, byte, 0x7F)


@jit
def _follow(u: tl.tensor, word: tl.tensor, offset: tl.constexpr, tau: tl.tensor, usable: tl.tensor) -> tl.tensor:
    """`guided.rule.follow_parity` of every second value from `offset` on: fp32 [n, 4] to codes in uint32."""
    bit = (tl.expand_dims(word, 1) >> (tl.arange(0, 4) * 2 + offset).to(tl.uint32)[None, :]) & 1
    u = tl.where(tl.expand_dims(usable, 1), u, 0.0)
    nearest = e2m1_nibble(u)
    n = nearest & 7
    a = tl.abs(u)
    grid = e2m1_value(n)
    saturated = (n == 7) & (a >= 6.0)
    other = tl.where((a > grid) & ~saturated, n + 1, tl.where((a < grid) | saturated, n - 1, n))
    index = _chosen(a, n, other, grid, e2m1_value(other & 7), saturated, bit, tau)
    return index | (nearest & 8)


@jit
def _follow_scale(scale: tl.tensor, n: tl.tensor, bit: tl.tensor) -> tl.tensor:
    """`guided.rule.follow_scale_parity` without a guard: fp32 and its nearest byte to the byte, uint32 [n]."""
    grid = e4m3_value(n)
    saturated = (n == 0x7E) & (scale >= 448.0)
    other = tl.where((scale > grid) & ~saturated, n + 1, tl.where((scale < grid) | saturated, n - 1, n))
    return _chosen(scale, n, other, grid, e4m3_value(other), saturated, bit, 0.5)


@jit
def _chosen(
    a: tl.tensor,
    n: tl.tensor,
    other: tl.tensor,
    grid: tl.tensor,
    beyond: tl.tensor,
    saturated: tl.tensor,
    bit: tl.tensor,
    tau: tl.tensor,
) -> tl.tensor:
    near = tl.abs(a - (grid + beyond) * 0.5) <= tau * tl.abs(beyond - grid)
    return tl.where(((n & 1) != bit) & (other != n) & (near | saturated), other, n)
