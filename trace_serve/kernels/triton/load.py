"""Device functions that load blocks of 16 values, one block a lane, and rotate them or take silu(gate) * up on the way.

All of a block's values stay in one lane, so its maximum and the packing need no exchange between lanes. A set of n
blocks is held either packed, as two uint32 tensors [n, 4] of BF16 pairs (values 0..7 and 8..15), or as four fp32
tensors [n, 4]: values 0, 2, 4, 6 of each block, then 1, 3, 5, 7, then 8, 10, 12, 14, then 9, 11, 13, 15.
"""

from __future__ import annotations

import triton.language as tl

from trace_serve.kernels.triton._jit import jit
from trace_serve.kernels.triton.formats import bf16_pair, float_of, join4, split4
from trace_serve.kernels.triton.silu import silu_times


@jit
def load_pairs(x: tl.tensor, block: tl.tensor, mask: tl.tensor) -> tl.tuple:
    """Blocks at int64 `block` [n] of BF16 pairs (int32 pointer), packed; masked blocks are zeros.

    A block is two 16-byte loads.
    """
    pairs = x + (block * 8)[:, None] + tl.arange(0, 4)[None, :]
    a = tl.load(pairs, mask=mask[:, None], other=0)
    b = tl.load(pairs + 4, mask=mask[:, None], other=0)
    return a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)


@jit
def load_fp32(x: tl.tensor, block: tl.tensor, mask: tl.tensor) -> tl.tuple:
    """Blocks at int64 `block` [n] of fp32 values, unpacked; masked blocks are zeros."""
    quads = x + (block * 16)[:, None] + tl.arange(0, 4)[None, :]
    x0, x1, x2, x3 = split4(tl.load(quads, mask=mask[:, None], other=0.0))
    x4, x5, x6, x7 = split4(tl.load(quads + 4, mask=mask[:, None], other=0.0))
    a_low, a_high = join4(x0, x2, x4, x6), join4(x1, x3, x5, x7)
    x0, x1, x2, x3 = split4(tl.load(quads + 8, mask=mask[:, None], other=0.0))
    x4, x5, x6, x7 = split4(tl.load(quads + 12, mask=mask[:, None], other=0.0))
    return a_low, a_high, join4(x0, x2, x4, x6), join4(x1, x3, x5, x7)


@jit
def unpack_pairs(pairs: tl.tuple) -> tl.tuple:
    """Packed blocks to fp32. Shifting is what a BF16 conversion does; unlike it, the interpreter keeps subnormals."""
    a, b = pairs
    return float_of(a << 16), float_of(a & 0xFFFF0000), float_of(b << 16), float_of(b & 0xFFFF0000)


@jit
def values_of(held: tl.tuple, packed: tl.constexpr) -> tl.tuple:
    """The four fp32 tensors of blocks held either way."""
    values = held
    if packed:
        values = unpack_pairs(held)
    return values


@jit
def rotate_blocks(values: tl.tuple, width: tl.constexpr, factor: tl.constexpr) -> tl.tuple:
    """`nvfp4.rotate` with the same order of sums; groups of width/16 consecutive blocks form one rotation."""
    a_low, a_high, b_low, b_high = values
    a_low, a_high = a_low + a_high, a_low - a_high
    b_low, b_high = b_low + b_high, b_low - b_high
    a_low, a_high = _butterfly4(a_low), _butterfly4(a_high)
    b_low, b_high = _butterfly4(b_low), _butterfly4(b_high)
    a_low, b_low = a_low + b_low, a_low - b_low
    a_high, b_high = a_high + b_high, a_high - b_high
    if width >= 32:
        a_low, a_high = _butterfly_lanes(a_low, 1), _butterfly_lanes(a_high, 1)
        b_low, b_high = _butterfly_lanes(b_low, 1), _butterfly_lanes(b_high, 1)
    if width >= 64:
        a_low, a_high = _butterfly_lanes(a_low, 2), _butterfly_lanes(a_high, 2)
        b_low, b_high = _butterfly_lanes(b_low, 2), _butterfly_lanes(b_high, 2)
    if width >= 128:
        a_low, a_high = _butterfly_lanes(a_low, 4), _butterfly_lanes(a_high, 4)
        b_low, b_high = _butterfly_lanes(b_low, 4), _butterfly_lanes(b_high, 4)
    return a_low * factor, a_high * factor, b_low * factor, b_high * factor


@jit
def load_blocks(
    x: tl.tensor,
    block: tl.tensor,
    mask: tl.tensor,
    packed: tl.constexpr,
    gate_blocks: tl.constexpr,
    rotation: tl.constexpr,
    factor: tl.constexpr,
    level: tl.constexpr,
) -> tl.tuple:
    """Blocks of BF16 pairs (`packed`) or of fp32, rotated if asked; held packed only if they are not rotated.

    With `gate_blocks`, a row of x is that many blocks of gate and as many of up, and the blocks are silu(gate) * up.
    """
    if packed:
        held = load_pairs(x, block, mask)
        if gate_blocks > 0:
            held = _gated(held, load_pairs(x, block + gate_blocks, mask), level)
        if rotation > 0:
            held = rotate_blocks(unpack_pairs(held), rotation, factor)
    else:
        held = load_fp32(x, block, mask)
        if rotation > 0:
            held = rotate_blocks(held, rotation, factor)
    return held


@jit
def _gated(gate: tl.tuple, up: tl.tuple, level: tl.constexpr) -> tl.tuple:
    gate_a_low, gate_a_high, gate_b_low, gate_b_high = unpack_pairs(gate)
    up_a_low, up_a_high, up_b_low, up_b_high = unpack_pairs(up)
    a = bf16_pair(silu_times(gate_a_low, up_a_low), silu_times(gate_a_high, up_a_high), level)
    b = bf16_pair(silu_times(gate_b_low, up_b_low), silu_times(gate_b_high, up_b_high), level)
    return a, b


@jit
def _butterfly4(x: tl.tensor) -> tl.tensor:
    x0, x1, x2, x3 = split4(x)
    x0, x1 = x0 + x1, x0 - x1
    x2, x3 = x2 + x3, x2 - x3
    return join4(x0 + x2, x1 + x3, x0 - x2, x1 - x3)


@jit
def _butterfly_lanes(x: tl.tensor, stride: tl.constexpr) -> tl.tensor:
    """low + high and low - high of blocks `stride` apart, as two sums over pairs of lanes."""
    n: tl.constexpr = x.shape[0]
    pairs = tl.reshape(x, [n // (2 * stride), 2, stride, 4])
    is_high = (tl.arange(0, 2) == 1)[None, :, None, None]
    total = tl.expand_dims(tl.sum(pairs, axis=1), 1)
    difference = tl.expand_dims(tl.sum(tl.where(is_high, -pairs, pairs), axis=1), 1)
    return tl.reshape(tl.where(is_high, difference, total), [n, 4])
