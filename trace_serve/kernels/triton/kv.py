"""The NVFP4 KV cache: storing K and V with hints, and reading slots back as BF16."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trace_serve.errors import ShapeError
from trace_serve.kernels.triton import _jit, block_rules, kv_kernels
from trace_serve.kernels.triton.quantize import addressable, check_counters, check_rotation, rotation_factor
from trace_serve.nvfp4 import PORTABLE_RULES, Rules
from trace_serve.recipe import BLOCK

_LANES = 32
_MANY_PROGRAMS = 4096
_GATHER_LANES = 128
_INTERPRETED_LANES = 8192


@dataclass(frozen=True)
class KVBuffers:
    """The buffers of one layer, contiguous, uint8.

    Attributes:
        k_codes, v_codes: [slots, heads, D/2], or paged (HND) [pages, heads, page size, D/2].
        k_scales, v_scales: the same with D/16 as last dimension; E4M3 bytes.
        v_interleaved: V scales in the 4-token interleaved layout of the trtllm-gen decode kernels; needs the paged
            layout, a page size that is a multiple of 4 and D a multiple of 64. K scales are always linear.
    """

    k_codes: Tensor
    v_codes: Tensor
    k_scales: Tensor
    v_scales: Tensor
    v_interleaved: bool = False

    def __post_init__(self) -> None:
        check_layout(self.k_codes, self.k_scales, "k")
        check_layout(self.v_codes, self.v_scales, "v", interleaved=self.v_interleaved)
        if self.k_codes.shape != self.v_codes.shape:
            raise ShapeError(
                f"v_codes: got shape {tuple(self.v_codes.shape)}, expected that of k_codes, "
                f"{tuple(self.k_codes.shape)}",
                field="v_codes",
            )


def check_layout(codes: Tensor, scales: Tensor, name: str, *, interleaved: bool = False) -> None:
    """Refuses buffers of codes and scales that do not fit each other.

    Raises:
        ShapeError: naming `<name>_codes`, `<name>_scales` or `v_interleaved`.
    """
    if codes.dtype != torch.uint8 or codes.dim() not in (3, 4) or codes.shape[-1] % (BLOCK // 2):
        raise ShapeError(
            f"{name}_codes: got {codes.dtype} {tuple(codes.shape)}, expected uint8 [slots, heads, D/2] or [pages, "
            f"heads, page, D/2] with D a multiple of {BLOCK}",
            field=f"{name}_codes",
        )
    expected = (*codes.shape[:-1], codes.shape[-1] * 2 // BLOCK)
    if scales.dtype != torch.uint8 or tuple(scales.shape) != expected or scales.device != codes.device:
        raise ShapeError(
            f"{name}_scales: got {scales.dtype} {tuple(scales.shape)} on {scales.device}, expected uint8 {expected} on "
            f"{codes.device}",
            field=f"{name}_scales",
        )
    for tensor, what in ((codes, "codes"), (scales, "scales")):
        if not tensor.is_contiguous():
            raise ShapeError(
                f"{name}_{what}: got a view with gaps, expected a contiguous buffer", field=f"{name}_{what}"
            )
    if interleaved and (codes.dim() != 4 or codes.shape[2] % 4 or codes.shape[3] % 32):
        raise ShapeError(
            f"v_interleaved: got codes {tuple(codes.shape)}, expected [pages, heads, page, D/2] with page a multiple "
            "of 4 and D a multiple of 64",
            field="v_interleaved",
        )


def store_kv(
    k: Tensor,
    v: Tensor,
    index: Tensor,
    buffers: KVBuffers,
    *,
    k_global_scale: float,
    v_global_scale: float,
    k_rotation: int = 0,
    rules: Rules = PORTABLE_RULES,
    counters: Tensor | None = None,
    hints: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """Quantizes K and V in one launch and scatters codes and scales to their slots.

    Args:
        k, v: bfloat16, float16 or float32 [T, heads, D]; views of a fused projection are read in place.
        index: int64 or int32 [T], distinct slots. Negative ones and ones past the end are not written.
        buffers: where to.
        k_global_scale, v_global_scale: static scales.
        k_rotation: width of the Hadamard rotation of K, one of `quantize.ROTATIONS` that divides D.
        rules: the recipe's block rules of K and V.
        counters: int64 [3], incidents are added in place.
        hints: return the hint bits of K and V, uint16 [T, heads, D/16] each; rows that are not written are zeros.

    Raises:
        ShapeError: an argument of the wrong shape, dtype or device.
        RecipeError: rules that these kernels do not implement.
    """
    number = block_rules.number_of(rules)
    heads, half = buffers.k_codes.shape[1], buffers.k_codes.shape[-1]
    head_dim, device = half * 2, buffers.k_codes.device
    tokens = k.shape[0] if k.dim() else 0
    for name, x in (("k", k), ("v", v)):
        good = x.dtype in (torch.bfloat16, torch.float16, torch.float32) and x.dtype == k.dtype
        if not good or tuple(x.shape) != (tokens, heads, head_dim) or x.device != device:
            raise ShapeError(
                f"{name}: got {x.dtype} {tuple(x.shape)} on {x.device}, expected bfloat16, float16 or float32 "
                f"{(tokens, heads, head_dim)} on {device}, K and V alike",
                field=name,
            )
    _check_index(index, device, tokens)
    check_rotation(k_rotation)
    if k_rotation and head_dim % k_rotation:
        raise ShapeError(f"k_rotation: width {k_rotation} does not divide the head size {head_dim}", field="k_rotation")
    for name, g in (("k_global_scale", k_global_scale), ("v_global_scale", v_global_scale)):
        if not (g > 0 and math.isfinite(g)):
            raise ShapeError(f"{name}: got {g}, expected a positive finite number", field=name)
    check_counters(device, counters)
    d_blocks = head_dim // BLOCK
    shape = (tokens, heads, d_blocks)
    words = [torch.zeros(shape, dtype=torch.int16, device=device) for _ in range(2)] if hints else []
    total = tokens * heads * d_blocks
    if total:
        k, v = addressable(k), addressable(v)
        packed = k.dtype == torch.bfloat16
        chunks = 4 if total >= 4 * _LANES * _MANY_PROGRAMS else 1
        lanes = _INTERPRETED_LANES if _jit.INTERPRETED else _LANES
        _jit.launch(
            kv_kernels.store_kv_kernel,
            (-(-total // (lanes * chunks)), 2),
            k.view(torch.int32) if packed else k,
            v.view(torch.int32) if packed else v,
            index,
            buffers.k_codes.view(torch.int64),
            buffers.v_codes.view(torch.int64),
            buffers.k_scales,
            buffers.v_scales,
            *(words or [buffers.k_scales, buffers.v_scales]),
            buffers.k_scales if counters is None else counters,
            *(stride // BLOCK for x in (k, v) for stride in x.stride()[:2]),
            tokens,
            _slots(buffers.k_codes),
            float(k_global_scale),
            float(v_global_scale),
            heads=heads,
            d_blocks=d_blocks,
            page=_page(buffers.k_codes),
            v_interleaved=buffers.v_interleaved,
            lanes=lanes,
            chunks=chunks,
            packed=packed,
            k_rotation=k_rotation,
            factor=rotation_factor(k_rotation),
            with_hints=hints,
            with_counters=counters is not None,
            rules=number,
            level=_jit.device_level(device),
            num_warps=1,
        )
    return (words[0].view(torch.uint16), words[1].view(torch.uint16)) if hints else None


def gather_dequantize(
    codes: Tensor, scales: Tensor, index: Tensor, global_scale: float, *, interleaved: bool = False
) -> Tensor:
    """Reads slots as bfloat16 [n, heads, D]: (code * scale) * global scale, exact for a power of two.

    Args:
        codes, scales: as in `KVBuffers`, either layout.
        index: int64 or int32 [n], slots; any may repeat.
        global_scale: the static scale they were stored with.
        interleaved: the scales are in the 4-token interleaved layout.

    Raises:
        ShapeError: an argument of the wrong shape, dtype or device.
        IndexError: a slot outside the buffers, on a CPU. A GPU is not waited for: there such rows are NaN.
    """
    check_layout(codes, scales, "v" if interleaved else "kv", interleaved=interleaved)
    _check_index(index, codes.device, index.numel())
    heads, d_blocks = codes.shape[1], codes.shape[-1] * 2 // BLOCK
    out = torch.empty((index.shape[0], heads, d_blocks * BLOCK), dtype=torch.bfloat16, device=codes.device)
    slots = _slots(codes)
    if index.device.type == "cpu":
        bad = ((index < 0) | (index >= slots)).nonzero()
        if bad.numel():
            at = int(bad[0])
            raise IndexError(f"index[{at}]: slot {int(index[at])} is outside the pool of {slots}")
    if out.numel():
        lanes = _INTERPRETED_LANES if _jit.INTERPRETED else _GATHER_LANES
        halves = out.numel() // 8
        chunks = 4 if halves >= 4 * lanes * _MANY_PROGRAMS else 1
        _jit.launch(
            kv_kernels.gather_kernel,
            (-(-halves // (lanes * chunks)),),
            codes.view(torch.int32),
            scales,
            index,
            out.view(torch.int32),
            index.shape[0],
            slots,
            float(global_scale),
            heads=heads,
            d_blocks=d_blocks,
            page=_page(codes),
            interleaved=interleaved,
            lanes=lanes,
            chunks=chunks,
            level=_jit.device_level(codes.device),
            num_warps=4,
        )
    return out


def _slots(codes: Tensor) -> int:
    return codes.shape[0] * (codes.shape[2] if codes.dim() == 4 else 1)


def _page(codes: Tensor) -> int:
    return codes.shape[2] if codes.dim() == 4 else 0


def _check_index(index: Tensor, device: torch.device, count: int) -> None:
    good = index.dim() == 1 and index.dtype in (torch.int64, torch.int32) and index.shape[0] == count
    if not good or index.device != device or not index.is_contiguous():
        raise ShapeError(
            f"index: got {index.dtype} {tuple(index.shape)} on {index.device}, expected contiguous int64 or int32 "
            f"[{count}] on {device}",
            field="index",
        )
