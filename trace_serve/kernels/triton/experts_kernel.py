"""Device code of the routed experts' products with NVFP4 weights."""

from __future__ import annotations

import triton.language as tl

from trace_serve.kernels.triton._jit import jit, kernel
from trace_serve.kernels.triton.formats import as_bf16
from trace_serve.kernels.triton.tile import product, split_pairs, unpack_tile


@jit
def _load_fp4(
    codes: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    exists: tl.tensor,
    start: tl.tensor,
    k: tl.constexpr,
    block_k: tl.constexpr,
) -> tl.tuple:
    """Codes uint8 [rows, block_k/2], scale bytes uint8 [rows, block_k/16] from column `start`; zeros past the end."""
    column = start // 2 + tl.arange(0, block_k // 2)
    mask = exists[:, None] & (column < k // 2)[None, :]
    code = tl.load(codes + row[:, None] * (k // 2) + column[None, :], mask=mask, other=0)
    column = start // 16 + tl.arange(0, block_k // 16)
    mask = exists[:, None] & (column < k // 16)[None, :]
    return code, tl.load(scales + row[:, None] * (k // 16) + column[None, :], mask=mask, other=0)


@kernel("pairs_per_row")
def expert_product_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    x_global_scales: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    global_scales: tl.tensor,
    pairs: tl.tensor,
    tile_experts: tl.tensor,
    out: tl.tensor,
    pairs_per_row: tl.int32,
    n: tl.constexpr,
    k: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    x_is_fp4: tl.constexpr,
    out_is_bf16: tl.constexpr,
    level: tl.constexpr,
) -> None:
    """One tile: `block_n` outputs of one expert for `block_m` (token, expert) pairs.

    The operands are swapped, weights x tokens: weights fill the 128 rows that a tensor core wants, and a handful of
    tokens is then only a narrow tile. With x in FP4 on sm_100 the product is block-scaled and nothing is expanded;
    otherwise tiles are expanded to BF16, which holds code * block scale exactly. Global scales are applied to the
    fp32 sum.
    """
    expert = tl.load(tile_experts + tl.program_id(0))
    if expert < 0:
        return
    pair = tl.load(pairs + tl.program_id(0) * block_m + tl.arange(0, block_m)).to(tl.int64)
    is_pair = pair >= 0
    x_row = tl.where(is_pair, pair, 0) // pairs_per_row
    column = tl.program_id(1) * block_n + tl.arange(0, block_n)
    is_column = column < n
    w_row = expert.to(tl.int64) * n + column

    acc = tl.zeros([block_n, block_m], tl.float32)
    for start in range(0, k, block_k):
        w_codes, w_scales = _load_fp4(codes, scales, w_row, is_column, start, k, block_k)
        if x_is_fp4:
            x_codes, x_blocks = _load_fp4(x, x_scales, x_row, is_pair, start, k, block_k)
            if level >= 100:
                acc = tl.dot_scaled(
                    w_codes,
                    w_scales.to(tl.float8e4nv, bitcast=True),
                    "e2m1",
                    tl.trans(x_codes),
                    x_blocks.to(tl.float8e4nv, bitcast=True),
                    "e2m1",
                    acc,
                )
            else:
                w_even, w_odd = unpack_tile(w_codes, w_scales)
                x_even, x_odd = unpack_tile(x_codes, x_blocks)
                acc = product(w_even, tl.trans(x_even), acc, level)
                acc = product(w_odd, tl.trans(x_odd), acc, level)
        else:
            w_even, w_odd = unpack_tile(w_codes, w_scales)
            at = start // 2 + tl.arange(0, block_k // 2)
            mask = is_pair[:, None] & (at < k // 2)[None, :]
            x_even, x_odd = split_pairs(tl.load(x + x_row[:, None] * (k // 2) + at[None, :], mask=mask, other=0))
            acc = product(w_even, tl.trans(x_even), acc, level)
            acc = product(w_odd, tl.trans(x_odd), acc, level)

    g = tl.load(global_scales + expert)
    if x_is_fp4:
        g = g * tl.load(x_global_scales + x_row, mask=is_pair, other=0.0)
        acc = acc * g[None, :]
    else:
        acc = acc * g
    target = out + tl.where(is_pair, pair, 0)[None, :] * n + column[:, None]
    mask = is_column[:, None] & is_pair[None, :]
    if out_is_bf16:
        tl.store(target, as_bf16(acc, level), mask=mask)
    else:
        tl.store(target, acc, mask=mask)
