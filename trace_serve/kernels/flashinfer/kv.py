"""The paged NVFP4 KV cache as trtllm-gen attention reads it: appending to it, and decode attention over it.

Buffers are HND with K scales in row order and V scales interleaved over four tokens. Appending is ours:
`nvfp4_quantize_append_paged_kv_cache` writes V scales in row order, takes amax / (6 * g) with an approximate division,
and yields no hints. Decode is FlashInfer's, with one deviation that no recipe names: its NVFP4 kernels take queries and
give results in E4M3 (8 bits). `trace_serve.kernels.triton.decode_attention` reads the same buffers with BF16 queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trace_serve import nvfp4
from trace_serve.errors import ShapeError
from trace_serve.kernels.flashinfer import contract
from trace_serve.kernels.for_recipe import RecipeKernels
from trace_serve.kernels.triton.kv import KVBuffers, store_kv
from trace_serve.nvfp4 import Quantized
from trace_serve.nvfp4.layouts import V_TOKENS
from trace_serve.recipe import BLOCK, E4M3_MAX

HEAD_MULTIPLE = 64
WORKSPACE_BYTES = 128 << 20


def paged_buffers(pages: int, heads: int, page: int, head_dim: int, device: torch.device | str) -> KVBuffers:
    """Empty (all-zero) buffers of one layer.

    Raises:
        ShapeError: a page size that is not a multiple of 4, or a head size that is not one of 64.
    """
    _check_sizes(page, head_dim)
    codes, scales = (pages, heads, page, head_dim // 2), (pages, heads, page, head_dim // BLOCK)
    k, v, k_scales, v_scales = (
        torch.zeros(shape, dtype=torch.uint8, device=device) for shape in (codes, codes, scales, scales)
    )
    return KVBuffers(k, v, k_scales, v_scales, v_interleaved=True)


def append_kv(
    kernels: RecipeKernels,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    buffers: KVBuffers,
    *,
    k_global_scale: float,
    v_global_scale: float,
    hints: bool = False,
    counters: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Quantizes K and V under the recipe and writes codes and scales to their slots.

    One Triton launch where that implements the recipe's KV rules; otherwise the recipe's quantizer and a scatter, which
    waits for the device to know the slots.

    Args:
        kernels: quantizers of the recipe; K is rotated by `recipe.k_rotation`.
        k, v: bfloat16 or float32 [T, heads, D], K after rotary.
        index: int64 or int32 [T], distinct slots (page * page size + position). Negative ones and ones past the end are
            not written.
        buffers: from `paged_buffers`.
        k_global_scale, v_global_scale: `recipe.kv_scales(layer)`.
        hints: return the hint bits of K and V, uint16 [T, heads, D/16] each; rows that are not written are zeros.
        counters: int64 [3], incidents are added in place.

    Raises:
        ShapeError: buffers that attention cannot read, or an argument of the wrong shape, dtype or device.
    """
    check_buffers(buffers)
    rotation = kernels.recipe.k_rotation
    if kernels.backend_of("kv") == "triton":
        return store_kv(
            k,
            v,
            index,
            buffers,
            k_global_scale=k_global_scale,
            v_global_scale=v_global_scale,
            k_rotation=rotation,
            rules=nvfp4.rules(kernels.recipe, "kv"),
            counters=counters,
            hints=hints,
        )
    pages, heads, page, half = buffers.k_codes.shape
    if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        raise ShapeError(f"index: got {index.dtype} {tuple(index.shape)}, expected int64 or int32 [T]", field="index")
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 3 or x.shape[1:] != (heads, half * 2) or x.shape[0] != index.numel():
            raise ShapeError(
                f"{name}: got {tuple(x.shape)}, expected {(index.numel(), heads, half * 2)}: one row of every head a "
                "slot",
                field=name,
            )
    slots = index.to(torch.int64)
    written = (slots >= 0) & (slots < pages * page)
    slots = slots[written]
    words = []
    for x, g, width, codes, scales, interleaved in (
        (k, k_global_scale, rotation, buffers.k_codes, buffers.k_scales, False),
        (v, v_global_scale, 0, buffers.v_codes, buffers.v_scales, True),
    ):
        rows = x[written].reshape(-1, half * 2)
        kept = kernels.quantize_kv(rows, global_scale=g, rotation=width, hints=hints, counters=counters)
        _scatter(kept, slots, codes, scales, interleaved)
        if kept.hints is not None:
            word = torch.zeros((x.shape[0], heads, half * 2 // BLOCK), dtype=torch.int16, device=x.device)
            word[written] = kept.hints.view(torch.int16).view(-1, heads, half * 2 // BLOCK)
            words.append(word.view(torch.uint16))
    return (words[0], words[1]) if hints else None


def decode_attention(
    q: Tensor,
    buffers: KVBuffers,
    block_tables: Tensor,
    lengths: Tensor,
    scratch: Tensor,
    *,
    longest: int,
    softmax_scale: float,
    k_global_scale: float,
    v_global_scale: float,
) -> Tensor:
    """One query token a request against its pages, by trtllm-gen on sm_100 and sm_103.

    Queries are clamped to 448 and rounded to E4M3 without a scale, and the result is E4M3 before it is widened: both as
    SGLang does with these kernels.

    Args:
        q: bfloat16 [B, query heads, D]; rotated like K if K was stored rotated.
        buffers: from `paged_buffers`.
        block_tables: int32 [B, pages of the longest], page numbers in token order.
        lengths: int32 [B], cached tokens of each request.
        scratch: from `workspace`.
        longest: at least the largest of `lengths`; known on the host, so that the device is not waited for.
        softmax_scale: factor of the scores, usually 1/sqrt(D).
        k_global_scale, v_global_scale: the static scales.

    Returns:
        bfloat16 [B, query heads, D].

    Raises:
        ShapeError: an argument of the wrong shape, dtype or device, or sizes that the kernels cannot read.
        EngineError: the installed FlashInfer is another one.
    """
    check_buffers(buffers)
    heads, page, half = buffers.k_codes.shape[1:]
    device = buffers.k_codes.device
    good = q.dtype == torch.bfloat16 and q.dim() == 3 and q.shape[2] == half * 2 and q.shape[1] % heads == 0
    if not good or q.device != device:
        raise ShapeError(
            f"q: got {q.dtype} {tuple(q.shape)} on {q.device}, expected bfloat16 [B, a multiple of {heads}, "
            f"{half * 2}] on {device}",
            field="q",
        )
    tables = (q.shape[0], block_tables.shape[1] if block_tables.dim() == 2 else -(-longest // page))
    for name, tensor, shape in (("block_tables", block_tables, tables), ("lengths", lengths, (q.shape[0],))):
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape or tensor.device != device:
            raise ShapeError(
                f"{name}: got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, expected int32 {shape} on "
                f"{device}",
                field=name,
            )
    if not 0 < longest <= block_tables.shape[1] * page:
        raise ShapeError(
            f"longest: got {longest}, expected 1 to {block_tables.shape[1] * page}, what a row of block_tables holds",
            field="longest",
        )
    if scratch.dtype != torch.uint8 or scratch.device != device or scratch.numel() < WORKSPACE_BYTES:
        raise ShapeError(
            f"scratch: got {scratch.dtype} of {scratch.numel()} bytes on {scratch.device}, expected uint8 of at least "
            f"{WORKSPACE_BYTES} on {device}; use workspace()",
            field="scratch",
        )
    out = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=device)
    if q.numel() == 0:
        return out.to(torch.bfloat16)
    contract.DECODE(
        query=e4m3_queries(q),
        kv_cache=(buffers.k_codes, buffers.v_codes),
        workspace_buffer=scratch,
        block_tables=block_tables.contiguous(),
        seq_lens=lengths.contiguous(),
        max_seq_len=longest,
        bmm1_scale=softmax_scale * k_global_scale,
        bmm2_scale=float(v_global_scale),
        out=out,
        kv_layout="HND",
        backend="trtllm-gen",
        kv_cache_sf=(buffers.k_scales.view(torch.float8_e4m3fn), buffers.v_scales.view(torch.float8_e4m3fn)),
    )
    return out.to(torch.bfloat16)


def e4m3_queries(q: Tensor) -> Tensor:
    """bfloat16 to float8_e4m3fn, ties to even; what is larger than 448 becomes 448, where the bare cast gives NaN."""
    return q.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def workspace(device: torch.device | str) -> Tensor:
    """Scratch memory that every layer's `decode_attention` on one stream can share: uint8, zeros, 128 MiB."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def check_buffers(buffers: KVBuffers) -> None:
    """Refuses buffers that trtllm-gen attention cannot read.

    Raises:
        ShapeError: not paged HND, V scales not interleaved, or a page or head size that does not fit.
    """
    if buffers.k_codes.dim() != 4:
        raise ShapeError(
            f"buffers: got codes {tuple(buffers.k_codes.shape)}, expected [pages, heads, page, D/2]", field="buffers"
        )
    _check_sizes(buffers.k_codes.shape[2], buffers.k_codes.shape[3] * 2)
    if not buffers.v_interleaved:
        raise ShapeError(
            "v_interleaved: V scales are in row order, which these kernels would read as other tokens' scales; use "
            "paged_buffers()",
            field="v_interleaved",
        )


def _check_sizes(page: int, head_dim: int) -> None:
    if page <= 0 or page % V_TOKENS:
        raise ShapeError(f"page: got {page} tokens, expected a multiple of {V_TOKENS}", field="page")
    if head_dim <= 0 or head_dim % HEAD_MULTIPLE:
        raise ShapeError(f"head_dim: got {head_dim}, expected a multiple of {HEAD_MULTIPLE}", field="head_dim")


def _scatter(kept: Quantized, slots: Tensor, codes: Tensor, scales: Tensor, interleaved: bool) -> None:
    """Writes rows [n * heads, ...] to slots [n] of one buffer pair."""
    heads, page, columns = scales.shape[1:]
    pages, token = slots // page, slots % page
    codes[pages, :, token] = kept.codes.view(-1, heads, codes.shape[-1])
    rows = kept.scales.view(-1, heads, columns)
    if not interleaved:
        scales[pages, :, token] = rows
        return
    # Where `nvfp4.interleave_v` puts byte c of a token: see there.
    group = columns // V_TOKENS
    column = torch.arange(columns, device=slots.device)
    row = (token // V_TOKENS * V_TOKENS).unsqueeze(-1) + column // group
    place = (column % group) * V_TOKENS + (token % V_TOKENS).unsqueeze(-1)
    scales[pages.unsqueeze(-1), :, row, place] = rows.transpose(1, 2)
