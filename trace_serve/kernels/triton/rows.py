"""The row quantizer: codes, scale bytes, global scales, hint bits and the kept values in one pass over the input."""

from __future__ import annotations

import triton.language as tl

from trace_serve.kernels.triton._jit import jit, kernel
from trace_serve.kernels.triton.block import (
    block_top,
    count_incidents,
    finite_block_top,
    has_incident,
    quantize_blocks,
    store_codes,
    store_hints,
    store_values,
)
from trace_serve.kernels.triton.formats import float_of, pow2_scale_bits
from trace_serve.kernels.triton.load import load_blocks

POW2_PER_TOKEN = tl.constexpr(0)
PER_TOKEN = tl.constexpr(1)
GIVEN = tl.constexpr(2)
STATIC = tl.constexpr(3)
"""Where the global scale comes from: each row's maximum, as a power of two or as fp32; one a row by the caller; or
constants."""
_LARGEST = tl.constexpr(3.4028234663852886e38)


@kernel("total", "row_stride", "steps", "passes")
def quantize_rows_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    hints: tl.tensor,
    global_scales: tl.tensor,
    values: tl.tensor,
    counters: tl.tensor,
    total: tl.int64,
    row_stride: tl.int64,
    steps: tl.int32,
    passes: tl.int32,
    static_scale: tl.float32,
    static_encode: tl.float32,
    static_decode: tl.float32,
    k_blocks: tl.constexpr,
    rows: tl.constexpr,
    lanes: tl.constexpr,
    chunks: tl.constexpr,
    mode: tl.constexpr,
    scale_max: tl.constexpr,
    packed: tl.constexpr,
    gate_blocks: tl.constexpr,
    rotation: tl.constexpr,
    factor: tl.constexpr,
    with_hints: tl.constexpr,
    with_values: tl.constexpr,
    with_counters: tl.constexpr,
    rules: tl.constexpr,
    level: tl.constexpr,
) -> None:
    """Quantizes `steps` times `rows` rows of `k_blocks` blocks; a row is `chunks` passes of `lanes` lanes.

    `passes` is `chunks` once more, at run time, so that loops that are hardly ever entered are not unrolled.
    With `gate_blocks`, what is quantized is silu(gate) * up of the two halves of each row of x. `static_scale` is kept
    with the codes, `static_encode` and `static_decode` are what the arithmetic uses.
    Blocks from number `total` on do not exist. Rows of x are `row_stride` blocks apart; every output is contiguous.
    """
    n: tl.constexpr = rows * lanes
    lane = tl.arange(0, n)
    column = lane % lanes
    as_pairs: tl.constexpr = packed and rotation == 0
    for step in range(steps):
        first_row = (tl.program_id(0).to(tl.int64) * steps + step) * rows
        row = first_row + lane // lanes
        held: tl.tuple = ()
        tops: tl.tuple = ()
        for c in tl.static_range(chunks):
            position = column + c * lanes
            mask = (position < k_blocks) & (row * k_blocks + position < total)
            chunk = load_blocks(x, row * row_stride + position, mask, packed, gate_blocks, rotation, factor, level)
            held += (chunk,)
            tops += (block_top(chunk, as_pairs),)

        if mode <= PER_TOKEN:
            row_top = tops[0]
            for c in tl.static_range(1, chunks):
                row_top = tl.maximum(row_top, tops[c])
            row_top = tl.max(tl.reshape(row_top, [rows, lanes]), axis=1)
            if tl.max(row_top, axis=0) >= 0x7F800000:
                row_top = _finite_row_top(
                    x,
                    row,
                    column,
                    total,
                    row_stride,
                    passes,
                    k_blocks,
                    rows,
                    lanes,
                    packed,
                    gate_blocks,
                    rotation,
                    factor,
                    level,
                )
            if mode == POW2_PER_TOKEN:
                bits = pow2_scale_bits(row_top, scale_max)
                row_decode = float_of(bits)
                # The reciprocal of a power of two, without a division.
                row_encode = float_of(0x7F000000 - bits)
            else:
                most = tl.full([rows], 6.0 * scale_max, tl.float32)
                row_encode = tl.minimum(tl.div_rn(most, float_of(row_top)), _LARGEST)
                row_decode = tl.div_rn(tl.full([rows], 1.0, tl.float32), row_encode)
            stored_row = first_row + tl.arange(0, rows)
            tl.store(global_scales + stored_row, row_decode, mask=stored_row * k_blocks < total)
            decode = _to_lanes(row_decode, lanes)
            encode = _to_lanes(row_encode, lanes)
            g = decode
        elif mode == GIVEN:
            g = tl.load(global_scales + row, mask=row * k_blocks < total, other=1.0)
            decode = g
            encode = tl.div_rn(tl.full([n], 1.0, tl.float32), g)
        else:
            one = tl.full([n], 1.0, tl.float32)
            g = one * static_scale
            encode = one * static_encode
            decode = one * static_decode

        incidents = tl.zeros([n], tl.int32)
        for c in tl.static_range(chunks):
            position = column + c * lanes
            block = row * k_blocks + position
            mask = (position < k_blocks) & (block < total)
            quantized = quantize_blocks(held[c], as_pairs, tops[c], encode, decode, rules, level)
            store_codes(codes, scales, block, quantized, mask)
            if with_hints:
                store_hints(hints, block, quantized, mask)
            if with_values:
                store_values(values, block, quantized, g, mask, level)
            incidents = incidents | has_incident(tops[c], quantized)
        if with_counters:
            _count_any(
                incidents,
                counters,
                x,
                row,
                column,
                total,
                row_stride,
                passes,
                encode,
                decode,
                k_blocks,
                lanes,
                packed,
                gate_blocks,
                rotation,
                factor,
                rules,
                level,
            )


@jit
def _to_lanes(by_row: tl.tensor, lanes: tl.constexpr) -> tl.tensor:
    """One value a row [rows] to one a lane [rows * lanes]."""
    rows: tl.constexpr = by_row.shape[0]
    return tl.reshape(tl.broadcast_to(tl.expand_dims(by_row, 1), [rows, lanes]), [rows * lanes])


@jit
def _count_any(
    incidents: tl.tensor,
    counters: tl.tensor,
    x: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    total: tl.tensor,
    row_stride: tl.tensor,
    passes: tl.tensor,
    encode: tl.tensor,
    decode: tl.tensor,
    k_blocks: tl.constexpr,
    lanes: tl.constexpr,
    packed: tl.constexpr,
    gate_blocks: tl.constexpr,
    rotation: tl.constexpr,
    factor: tl.constexpr,
    rules: tl.constexpr,
    level: tl.constexpr,
) -> None:
    """Counts incidents where a lane saw one. They are rare: it costs one vote, and then reads the rows again."""
    if tl.max(incidents, axis=0) != 0:
        for c in range(passes):
            position = column + c * lanes
            mask = (position < k_blocks) & (row * k_blocks + position < total)
            chunk = load_blocks(x, row * row_stride + position, mask, packed, gate_blocks, rotation, factor, level)
            count_incidents(counters, chunk, packed and rotation == 0, encode, decode, rules, level)


@jit
def _finite_row_top(
    x: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    total: tl.tensor,
    row_stride: tl.tensor,
    passes: tl.tensor,
    k_blocks: tl.constexpr,
    rows: tl.constexpr,
    lanes: tl.constexpr,
    packed: tl.constexpr,
    gate_blocks: tl.constexpr,
    rotation: tl.constexpr,
    factor: tl.constexpr,
    level: tl.constexpr,
) -> tl.tensor:
    """The bits [rows] of each row's largest finite magnitude. It reads the rows again, being hardly ever needed."""
    top = tl.zeros([rows * lanes], tl.uint32)
    for c in range(passes):
        position = column + c * lanes
        mask = (position < k_blocks) & (row * k_blocks + position < total)
        chunk = load_blocks(x, row * row_stride + position, mask, packed, gate_blocks, rotation, factor, level)
        top = tl.maximum(top, finite_block_top(chunk, packed and rotation == 0))
    return tl.max(tl.reshape(top, [rows, lanes]), axis=1)
