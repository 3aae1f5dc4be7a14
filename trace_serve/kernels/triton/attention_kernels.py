"""Device code of decode attention over an NVFP4 KV cache: softmax by ranges of tokens, then their combination."""

from __future__ import annotations

import triton.language as tl

from trace_serve.kernels.triton._jit import jit, kernel
from trace_serve.kernels.triton.formats import as_bf16
from trace_serve.kernels.triton.kv_kernels import code_block, scale_block
from trace_serve.kernels.triton.tile import product, split_pairs, unpack_tile


@jit
def _load_rows(
    codes: tl.tensor,
    scales: tl.tensor,
    slot: tl.tensor,
    exists: tl.tensor,
    head: tl.tensor,
    heads: tl.constexpr,
    d_blocks: tl.constexpr,
    page: tl.constexpr,
    interleaved: tl.constexpr,
    d_pow2: tl.constexpr,
) -> tl.tuple:
    """Even and odd values, fp32 [tokens, d_pow2/2], of one head of K or V; zeros where there is no token."""
    byte = tl.arange(0, d_pow2 // 2)
    block = tl.arange(0, d_pow2 // 16)
    place = code_block(slot, head, 0, heads, d_blocks, page)
    mask = exists[:, None] & (byte < d_blocks * 8)[None, :]
    code = tl.load(codes + place[:, None] * 8 + byte[None, :], mask=mask, other=0)
    place = scale_block(slot[:, None], head, block[None, :], heads, d_blocks, page, interleaved)
    mask = exists[:, None] & (block < d_blocks)[None, :]
    return unpack_tile(code, tl.load(scales + place, mask=mask, other=0))


@kernel("splits")
def decode_split_kernel(
    q: tl.tensor,
    k_codes: tl.tensor,
    k_scales: tl.tensor,
    v_codes: tl.tensor,
    v_scales: tl.tensor,
    starts: tl.tensor,
    index: tl.tensor,
    partial: tl.tensor,
    log_sums: tl.tensor,
    splits: tl.int32,
    score_scale: tl.float32,
    v_global_scale: tl.float32,
    heads: tl.constexpr,
    group: tl.constexpr,
    group_pow2: tl.constexpr,
    d_blocks: tl.constexpr,
    d_pow2: tl.constexpr,
    page: tl.constexpr,
    v_interleaved: tl.constexpr,
    block_tokens: tl.constexpr,
    level: tl.constexpr,
) -> None:
    """Attention of the queries of one KV head over one range of one request's tokens.

    Writes the normalized partial output, fp32 [B, heads * group, splits, D], and the base-2 logarithm of its sum of
    exponentials, -inf for an empty range. `score_scale` holds the softmax scale, K's global scale and log2(e).
    """
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    first = tl.load(starts + request).to(tl.int64)
    length = tl.load(starts + request + 1).to(tl.int64) - first
    # Ranges are whole steps of `block_tokens`, so that only a request's last step is masked.
    each = ((length + splits - 1) // splits + block_tokens - 1) // block_tokens * block_tokens
    begin = split * each
    end = tl.minimum(begin + each, length)

    row = tl.arange(0, group_pow2)
    is_row = row < group
    q_row = (request * heads + head) * group + row
    at = tl.arange(0, d_pow2 // 2)
    is_dim = at < d_blocks * 8
    q_pairs = tl.load(
        q + q_row[:, None] * (d_blocks * 8) + at[None, :], mask=is_row[:, None] & is_dim[None, :], other=0
    )
    q_even, q_odd = split_pairs(q_pairs)

    top = tl.full([group_pow2], float("-inf"), tl.float32)
    total = tl.zeros([group_pow2], tl.float32)
    even = tl.zeros([group_pow2, d_pow2 // 2], tl.float32)
    odd = tl.zeros([group_pow2, d_pow2 // 2], tl.float32)
    for start in range(begin, end, block_tokens):
        token = start + tl.arange(0, block_tokens)
        exists = token < end
        slot = tl.load(index + first + token, mask=exists, other=0).to(tl.int64)
        k_even, k_odd = _load_rows(k_codes, k_scales, slot, exists, head, heads, d_blocks, page, False, d_pow2)
        scores = tl.zeros([group_pow2, block_tokens], tl.float32)
        scores = product(q_even, tl.trans(k_even), scores, level)
        scores = product(q_odd, tl.trans(k_odd), scores, level)
        scores = tl.where(exists[None, :], scores * score_scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weight = tl.exp2(scores - new_top[:, None])
        keep = tl.exp2(top - new_top)
        total = total * keep + tl.sum(weight, axis=1)
        v_even, v_odd = _load_rows(v_codes, v_scales, slot, exists, head, heads, d_blocks, page, v_interleaved, d_pow2)
        even = product(weight, v_even, even * keep[:, None], level)
        odd = product(weight, v_odd, odd * keep[:, None], level)
        top = new_top

    inverse = tl.where(total > 0, v_global_scale / total, total * 0.0)
    place = (q_row * splits + split)[:, None] * (d_blocks * 16) + at[None, :] * 2
    mask = is_row[:, None] & is_dim[None, :]
    tl.store(partial + place, even * inverse[:, None], mask=mask)
    tl.store(partial + place + 1, odd * inverse[:, None], mask=mask)
    log_sum = tl.where(begin < end, top + tl.log2(total), float("-inf"))
    tl.store(log_sums + q_row * splits + split, log_sum, mask=is_row)


@kernel("splits")
def decode_combine_kernel(
    partial: tl.tensor,
    log_sums: tl.tensor,
    out: tl.tensor,
    splits: tl.int32,
    d: tl.constexpr,
    d_pow2: tl.constexpr,
    level: tl.constexpr,
) -> None:
    """Weighs the ranges of one query head by their sums of exponentials; a request without tokens gets zeros."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, d_pow2)
    top = tl.full([1], float("-inf"), tl.float32)
    for split in range(splits):
        top = tl.maximum(top, tl.load(log_sums + row * splits + split))
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([d_pow2], tl.float32)
    for split in range(splits):
        log_sum = tl.load(log_sums + row * splits + split)
        # A range without tokens has no weight; one whose scores are NaN must not be mistaken for it.
        weight = tl.where(log_sum == float("-inf"), 0.0, tl.exp2(log_sum - top))
        values = tl.load(partial + (row * splits + split) * d + at, mask=at < d, other=0.0)
        acc += values * weight
        total += weight
    acc = tl.where(total == 0, 0.0, acc / total)
    tl.store(out + row * d + at, as_bf16(acc, level), mask=at < d)
