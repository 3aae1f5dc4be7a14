"""Device code of the NVFP4 KV cache: quantize and scatter, gather and dequantize.

Slot layout: codes [slots, heads, D/2] and scales [slots, heads, D/16]. Paged layout (HND): codes [pages, heads, page,
D/2] and scales [pages, heads, page, D/16], slot = page number * page size + place in the page.
"""

from __future__ import annotations

import triton.language as tl

from trace_serve.kernels.triton._jit import jit, kernel
from trace_serve.kernels.triton.block import (
    block_top,
    count_incidents,
    dequantize8,
    has_incident,
    quantize_blocks,
    store_hints,
)
from trace_serve.kernels.triton.load import load_blocks


@jit
def code_block(
    slot: tl.tensor, head: tl.tensor, d: tl.tensor, heads: tl.constexpr, d_blocks: tl.constexpr, page: tl.constexpr
) -> tl.tensor:
    """Index of block `d` of a head in a slot, in units of blocks; `page` is 0 for the slot layout."""
    if page == 0:
        index = (slot * heads + head) * d_blocks + d
    else:
        index = ((slot // page * heads + head) * page + slot % page) * d_blocks + d
    return index


@jit
def scale_block(
    slot: tl.tensor,
    head: tl.tensor,
    d: tl.tensor,
    heads: tl.constexpr,
    d_blocks: tl.constexpr,
    page: tl.constexpr,
    interleaved: tl.constexpr,
) -> tl.tensor:
    """Index of the block's scale byte.

    Interleaved, four tokens of a page share their 4 x D/16 bytes: quarter q of the blocks is row q, and within it the
    four tokens of one block are neighbours.
    """
    if interleaved:
        quarter: tl.constexpr = d_blocks // 4
        token = slot % page
        row = token // 4 * 4 + d // quarter
        index = ((slot // page * heads + head) * page + row) * d_blocks + d % quarter * 4 + token % 4
    else:
        index = code_block(slot, head, d, heads, d_blocks, page)
    return index


@jit
def _store_side(
    x: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    index: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    hints: tl.tensor,
    counters: tl.tensor,
    tokens: tl.tensor,
    slots: tl.tensor,
    global_scale: tl.tensor,
    heads: tl.constexpr,
    d_blocks: tl.constexpr,
    page: tl.constexpr,
    interleaved: tl.constexpr,
    lanes: tl.constexpr,
    chunks: tl.constexpr,
    packed: tl.constexpr,
    rotation: tl.constexpr,
    factor: tl.constexpr,
    with_hints: tl.constexpr,
    with_counters: tl.constexpr,
    rules: tl.constexpr,
    level: tl.constexpr,
) -> None:
    as_pairs: tl.constexpr = packed and rotation == 0
    g = tl.full([lanes], 1.0, tl.float32) * global_scale
    encode = tl.div_rn(tl.full([lanes], 1.0, tl.float32), g)
    for c in tl.static_range(chunks):
        block = (tl.program_id(0).to(tl.int64) * chunks + c) * lanes + tl.arange(0, lanes)
        token = block // (heads * d_blocks)
        head = block % (heads * d_blocks) // d_blocks
        d = block % d_blocks
        slot = tl.load(index + token, mask=token < tokens, other=-1).to(tl.int64)
        mask = (slot >= 0) & (slot < slots)
        held = load_blocks(x, token * token_stride + head * head_stride + d, mask, packed, 0, rotation, factor, level)
        top = block_top(held, as_pairs)
        quantized = quantize_blocks(held, as_pairs, top, encode, g, rules, level)
        word = quantized[0].to(tl.uint64) | (quantized[1].to(tl.uint64) << 32)
        place = code_block(slot, head, d, heads, d_blocks, page)
        tl.store(codes + place, word.to(tl.int64, bitcast=True), mask=mask)
        place = scale_block(slot, head, d, heads, d_blocks, page, interleaved)
        tl.store(scales + place, quantized[2].to(tl.uint8), mask=mask)
        if with_hints:
            store_hints(hints, block, quantized, mask)
        if with_counters:
            _count_any(counters, held, as_pairs, top, quantized, encode, g, rules, level)


@jit
def _count_any(
    counters: tl.tensor,
    held: tl.tuple,
    packed: tl.constexpr,
    top: tl.tensor,
    quantized: tl.tuple,
    encode: tl.tensor,
    decode: tl.tensor,
    rules: tl.constexpr,
    level: tl.constexpr,
) -> None:
    if tl.max(has_incident(top, quantized), axis=0) != 0:
        count_incidents(counters, held, packed, encode, decode, rules, level)


@kernel("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride", "tokens", "slots")
def store_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    index: tl.tensor,
    k_codes: tl.tensor,
    v_codes: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    k_hints: tl.tensor,
    v_hints: tl.tensor,
    counters: tl.tensor,
    k_token_stride: tl.int64,
    k_head_stride: tl.int64,
    v_token_stride: tl.int64,
    v_head_stride: tl.int64,
    tokens: tl.int64,
    slots: tl.int64,
    k_global_scale: tl.float32,
    v_global_scale: tl.float32,
    heads: tl.constexpr,
    d_blocks: tl.constexpr,
    page: tl.constexpr,
    v_interleaved: tl.constexpr,
    lanes: tl.constexpr,
    chunks: tl.constexpr,
    packed: tl.constexpr,
    k_rotation: tl.constexpr,
    factor: tl.constexpr,
    with_hints: tl.constexpr,
    with_counters: tl.constexpr,
    rules: tl.constexpr,
    level: tl.constexpr,
) -> None:
    """Quantizes K (program axis 1 = 0) and V (1) of `tokens` tokens; slots outside [0, slots) are not written.

    Strides are in blocks of 16 values.
    """
    if tl.program_id(1) == 0:
        _store_side(
            k,
            k_token_stride,
            k_head_stride,
            index,
            k_codes,
            k_scales,
            k_hints,
            counters,
            tokens,
            slots,
            k_global_scale,
            heads,
            d_blocks,
            page,
            False,
            lanes,
            chunks,
            packed,
            k_rotation,
            factor,
            with_hints,
            with_counters,
            rules,
            level,
        )
    else:
        _store_side(
            v,
            v_token_stride,
            v_head_stride,
            index,
            v_codes,
            v_scales,
            v_hints,
            counters,
            tokens,
            slots,
            v_global_scale,
            heads,
            d_blocks,
            page,
            v_interleaved,
            lanes,
            chunks,
            packed,
            0,
            1.0,
            with_hints,
            with_counters,
            rules,
            level,
        )


@kernel("rows", "slots")
def gather_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    index: tl.tensor,
    out: tl.tensor,
    rows: tl.int64,
    slots: tl.int64,
    global_scale: tl.float32,
    heads: tl.constexpr,
    d_blocks: tl.constexpr,
    page: tl.constexpr,
    interleaved: tl.constexpr,
    lanes: tl.constexpr,
    chunks: tl.constexpr,
    level: tl.constexpr,
) -> None:
    """Dequantizes `rows` slots to BF16 [rows, heads, D], half a block a lane (one 16-byte store).

    Slots outside [0, slots) give NaN.
    """
    g = tl.full([lanes], 1.0, tl.float32) * global_scale
    for c in tl.static_range(chunks):
        half = (tl.program_id(0).to(tl.int64) * chunks + c) * lanes + tl.arange(0, lanes)
        block = half // 2
        row = block // (heads * d_blocks)
        head = block % (heads * d_blocks) // d_blocks
        d = block % d_blocks
        exists = row < rows
        slot = tl.load(index + row, mask=exists, other=-1).to(tl.int64)
        inside = (slot >= 0) & (slot < slots)
        place = code_block(slot, head, d, heads, d_blocks, page)
        word = tl.load(codes + place * 2 + half % 2, mask=inside, other=0)
        place = scale_block(slot, head, d, heads, d_blocks, page, interleaved)
        byte = tl.load(scales + place, mask=inside, other=0x7F)
        pairs = dequantize8(word.to(tl.uint32, bitcast=True), byte.to(tl.uint32), g, level)
        target = out + (half * 4)[:, None] + tl.arange(0, 4)[None, :]
        tl.store(target, pairs.to(tl.int32, bitcast=True), mask=exists[:, None])
