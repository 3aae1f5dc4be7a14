"""Routed experts' products with NVFP4 weights: which rows meet which expert, and the launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trace_serve.errors import ShapeError
from trace_serve.kernels.triton import _jit
from trace_serve.kernels.triton.experts_kernel import expert_product_kernel
from trace_serve.nvfp4 import Quantized, dequantize
from trace_serve.recipe import BLOCK

BLOCK_N = 128
TILE_ROWS = (16, 32, 64, 128)


@dataclass(frozen=True)
class ExpertTiles:
    """(token, expert) pairs in tiles of one expert each.

    Pair number p is entry p of the flattened `topk_ids` [T, top_k].

    Attributes:
        pairs: int32 [tiles * rows], pair numbers grouped by expert in their order, -1 where a tile is not full.
        experts: int32 [tiles], the expert of a tile, -1 for tiles that are not needed.
        rows: pairs a tile.
    """

    pairs: Tensor
    experts: Tensor
    rows: int


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile: about the pairs that an expert gets, between 16 and 128."""
    each = -(-pairs // max(experts, 1))
    return next((rows for rows in TILE_ROWS if rows >= each), TILE_ROWS[-1])


def group_by_expert(topk_ids: Tensor, experts: int, rows: int | None = None) -> ExpertTiles:
    """Groups pairs by expert without waiting for the device: the number of tiles is an upper bound.

    Args:
        topk_ids: int32 or int64 [T, top_k]; ids outside [0, experts) get no tile.
        experts: number of experts.
        rows: one of `TILE_ROWS`; None chooses.

    Raises:
        ShapeError: `topk_ids` of another shape or dtype.
    """
    if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            f"topk_ids: got {topk_ids.dtype} {tuple(topk_ids.shape)}, expected int32 or int64 [T, top_k]",
            field="topk_ids",
        )
    device, count = topk_ids.device, topk_ids.numel()
    rows = tile_rows(count, experts) if rows is None else rows
    tiles = min(-(-count // rows) + experts, count)
    ids = topk_ids.flatten().to(torch.int64)
    # Ids without an expert are sorted last, into a place behind the last tile.
    ids = torch.where((ids < 0) | (ids >= experts), experts, ids)
    ids, order = torch.sort(ids, stable=True)
    sizes = torch.zeros(experts + 1, dtype=torch.int64, device=device)
    sizes.scatter_add_(0, ids, torch.ones_like(ids))
    padded = (sizes + rows - 1) // rows * rows
    rank = torch.arange(count, device=device) - (sizes.cumsum(0) - sizes)[ids]
    place = torch.where(ids < experts, (padded.cumsum(0) - padded)[ids] + rank, tiles * rows)
    pairs = torch.full((tiles * rows + 1,), -1, dtype=torch.int32, device=device)
    pairs[place] = order.to(torch.int32)
    ends = padded[:experts].cumsum(0)
    owner = torch.searchsorted(ends, torch.arange(tiles, device=device) * rows, right=True)
    owner = torch.where(owner < experts, owner, -1).to(torch.int32)
    return ExpertTiles(pairs[:-1].contiguous(), owner, rows)


def expert_product(
    x: Tensor | Quantized, weight: Quantized, tiles: ExpertTiles, *, pairs: int, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """x @ weight[expert]^T for each pair, with fp32 sums.

    Args:
        x: bfloat16 [R, K], for example the values kept by the quantizer; or quantized rows with codes [R, K/2], scales
            [R, K/16] and global_scale [R], which sm_100 multiplies without expanding them.
        weight: codes [E, N, K/2], scales [E, N, K/16] in row order, global_scale [E].
        tiles: from `group_by_expert`.
        pairs: number of pairs P, a multiple of R: pair p reads row p // (P / R), so R = T for the first product of an
            expert and R = P for the second.
        out_dtype: bfloat16 or float32.

    Returns:
        [P, N]; rows of pairs without an expert are zeros.

    Raises:
        ShapeError: an argument of the wrong shape, dtype or device.
    """
    experts, n, half = _check_weight(weight)
    device = weight.codes.device
    rows = x.codes.shape[0] if isinstance(x, Quantized) else x.shape[0]
    _check_x(x, half * 2, device)
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ShapeError(f"out_dtype: got {out_dtype}, expected bfloat16 or float32", field="out_dtype")
    if pairs and (rows == 0 or pairs % rows):
        raise ShapeError(f"pairs: got {pairs}, expected a multiple of the {rows} rows of x", field="pairs")
    out = torch.zeros((pairs, n), dtype=out_dtype, device=device)
    if out.numel() == 0 or experts == 0:
        return out
    level = _jit.device_level(device)
    x_is_fp4 = isinstance(x, Quantized)
    if isinstance(x, Quantized):
        x_data, x_scales, x_global = x.codes.contiguous(), x.scales.contiguous(), x.global_scale.contiguous()
    else:
        x_data, x_scales, x_global = x.contiguous().view(torch.int32), weight.scales, weight.global_scale
    _jit.launch(
        expert_product_kernel,
        (tiles.experts.shape[0], -(-n // BLOCK_N)),
        x_data,
        x_scales,
        x_global,
        weight.codes,
        weight.scales,
        weight.global_scale,
        tiles.pairs,
        tiles.experts,
        out,
        pairs // rows,
        n=n,
        k=half * 2,
        block_n=BLOCK_N,
        block_m=tiles.rows,
        block_k=256 if x_is_fp4 and level >= _jit.BLACKWELL else 128,
        x_is_fp4=x_is_fp4,
        out_is_bf16=out_dtype == torch.bfloat16,
        level=level,
        num_warps=8 if tiles.rows >= 64 else 4,
    )
    return out


def expert_product_reference(x: Tensor | Quantized, weight: Quantized, topk_ids: Tensor, *, pairs: int) -> Tensor:
    """The same in torch, float64 [P, N]: each pair's row times its expert's dequantized matrix."""
    values = dequantize(x, torch.float32) if isinstance(x, Quantized) else x
    wide = Quantized(weight.codes, weight.scales, weight.global_scale[:, None])
    matrices = dequantize(wide, torch.float32).double()
    rows = values.double().repeat_interleave(pairs // max(values.shape[0], 1), dim=0)
    out = torch.zeros(pairs, matrices.shape[1], dtype=torch.float64, device=rows.device)
    for pair, expert in enumerate(topk_ids.flatten().tolist()):
        if 0 <= expert < matrices.shape[0]:
            out[pair] = matrices[expert] @ rows[pair]
    return out


def _check_weight(weight: Quantized) -> tuple[int, int, int]:
    codes, scales, g = weight.codes, weight.scales, weight.global_scale
    if codes.dtype != torch.uint8 or codes.dim() != 3 or codes.shape[2] % (BLOCK // 2) or not codes.is_contiguous():
        raise ShapeError(
            f"weight: got codes {codes.dtype} {tuple(codes.shape)}, expected contiguous uint8 [E, N, K/2] with K a "
            f"multiple of {BLOCK}",
            field="weight",
        )
    experts, n, half = codes.shape
    expected = (experts, n, half * 2 // BLOCK)
    if scales.dtype != torch.uint8 or tuple(scales.shape) != expected or not scales.is_contiguous():
        raise ShapeError(
            f"weight: got scales {scales.dtype} {tuple(scales.shape)}, expected contiguous uint8 {expected}",
            field="weight",
        )
    if g.dtype != torch.float32 or tuple(g.shape) != (experts,) or not g.is_contiguous():
        raise ShapeError(
            f"weight: got global_scale {g.dtype} {tuple(g.shape)}, expected contiguous float32 [{experts}]",
            field="weight",
        )
    return experts, n, half


def _check_x(x: Tensor | Quantized, k: int, device: torch.device) -> None:
    if isinstance(x, Quantized):
        rows = x.codes.shape[0]
        shapes = (tuple(x.codes.shape), tuple(x.scales.shape), tuple(x.global_scale.shape))
        expected = ((rows, k // 2), (rows, k // BLOCK), (rows,))
        if shapes != expected or x.codes.device != device:
            raise ShapeError(
                f"x: got codes, scales and global_scale {shapes} on {x.codes.device}, expected {expected} on {device}",
                field="x",
            )
    elif x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != k or x.device != device:
        raise ShapeError(
            f"x: got {x.dtype} {tuple(x.shape)} on {x.device}, expected bfloat16 [rows, {k}] on {device}", field="x"
        )
