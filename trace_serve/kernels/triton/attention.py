"""Decode attention that reads K and V as NVFP4, for cards without a native kernel for it."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from trace_serve.errors import ShapeError
from trace_serve.kernels.triton import _jit
from trace_serve.kernels.triton.attention_kernels import decode_combine_kernel, decode_split_kernel
from trace_serve.kernels.triton.kv import KVBuffers, gather_dequantize
from trace_serve.recipe import BLOCK

BLOCK_TOKENS = 64
_PROGRAMS = 512
"""Split until about this many programs run: a few for each of the 132 to 148 multiprocessors of the cards meant."""
_MAX_SPLITS = 64


def choose_splits(requests: int, heads: int, longest: int) -> int:
    """Ranges a request is cut into, from its longest length."""
    wanted = -(-_PROGRAMS // max(requests * heads, 1))
    return max(1, min(wanted, _MAX_SPLITS, -(-longest // BLOCK_TOKENS)))


def decode_attention(
    q: Tensor,
    buffers: KVBuffers,
    starts: Tensor,
    index: Tensor,
    *,
    softmax_scale: float,
    k_global_scale: float,
    v_global_scale: float,
    splits: int,
) -> Tensor:
    """One query token a request against its cached tokens.

    Scores and sums are fp32; K, V and the softmax weights enter the products as BF16, which holds code * block scale
    exactly, so the error is that of a BF16 flash attention: at most 2^-8 of the weighted mean of |V| plus the BF16
    rounding of the result.

    Args:
        q: bfloat16 [B, query heads, D]; rotated like K if K was stored rotated.
        buffers: K and V of the layer, either layout.
        starts: int32 or int64 [B + 1], where each request's slots start in `index`.
        index: int32 or int64 [total], slots in token order; not checked on a GPU.
        softmax_scale: factor of the scores, usually 1/sqrt(D).
        k_global_scale, v_global_scale: the static scales.
        splits: ranges a request is cut into, see `choose_splits`; any number is right.

    Returns:
        bfloat16 [B, query heads, D]; zeros for a request without tokens.

    Raises:
        ShapeError: an argument of the wrong shape, dtype or device.
    """
    heads, d = buffers.k_codes.shape[1], buffers.k_codes.shape[-1] * 2
    device = buffers.k_codes.device
    good = q.dtype == torch.bfloat16 and q.dim() == 3 and q.shape[2] == d and q.shape[1] % heads == 0
    if not good or q.device != device or d < 32:
        raise ShapeError(
            f"q: got {q.dtype} {tuple(q.shape)} on {q.device}, expected bfloat16 [B, a multiple of {heads}, {d}] on "
            f"{device}, with D of at least 32",
            field="q",
        )
    for name, tensor, count in (("starts", starts, q.shape[0] + 1), ("index", index, index.numel())):
        if tensor.dtype not in (torch.int32, torch.int64) or tuple(tensor.shape) != (count,) or tensor.device != device:
            raise ShapeError(
                f"{name}: got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, expected int32 or int64 "
                f"[{count}] on {device}",
                field=name,
            )
    if splits < 1:
        raise ShapeError(f"splits: got {splits}, expected at least 1", field="splits")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.numel() == 0:
        return out
    rows, group = q.shape[0] * q.shape[1], q.shape[1] // heads
    partial = torch.empty((rows, splits, d), dtype=torch.float32, device=device)
    log_sums = torch.empty((rows, splits), dtype=torch.float32, device=device)
    level = _jit.device_level(device)
    _jit.launch(
        decode_split_kernel,
        (q.shape[0], heads, splits),
        q.contiguous().view(torch.int32),
        buffers.k_codes,
        buffers.k_scales,
        buffers.v_codes,
        buffers.v_scales,
        starts.contiguous(),
        index.contiguous(),
        partial,
        log_sums,
        splits,
        softmax_scale * k_global_scale * math.log2(math.e),
        float(v_global_scale),
        heads=heads,
        group=group,
        group_pow2=max(16, triton.next_power_of_2(group)),
        d_blocks=d // BLOCK,
        d_pow2=triton.next_power_of_2(d),
        page=buffers.k_codes.shape[2] if buffers.k_codes.dim() == 4 else 0,
        v_interleaved=buffers.v_interleaved,
        block_tokens=BLOCK_TOKENS,
        level=level,
        num_warps=4,
    )
    _jit.launch(
        decode_combine_kernel,
        (rows,),
        partial,
        log_sums,
        out,
        splits,
        d=d,
        d_pow2=triton.next_power_of_2(d),
        level=level,
        num_warps=1,
    )
    return out


def decode_attention_reference(
    q: Tensor,
    buffers: KVBuffers,
    starts: Tensor,
    index: Tensor,
    *,
    softmax_scale: float,
    k_global_scale: float,
    v_global_scale: float,
) -> tuple[Tensor, Tensor]:
    """The same in torch: float64 [B, query heads, D], and the weighted mean of |V| that the error bound refers to."""
    heads = buffers.k_codes.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    magnitude = torch.zeros_like(out)
    for request in range(q.shape[0]):
        slots = index[int(starts[request]) : int(starts[request + 1])]
        if slots.numel() == 0:
            continue
        k = gather_dequantize(buffers.k_codes, buffers.k_scales, slots, k_global_scale).double()
        v = gather_dequantize(
            buffers.v_codes, buffers.v_scales, slots, v_global_scale, interleaved=buffers.v_interleaved
        ).double()
        group = q.shape[1] // heads
        queries = q[request].double().view(heads, group, -1)
        weights = torch.softmax(torch.einsum("hgd,nhd->hgn", queries, k) * softmax_scale, dim=-1)
        out[request] = torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1)
        magnitude[request] = torch.einsum("hgn,nhd->hgd", weights, v.abs()).flatten(0, 1)
    return out, magnitude
