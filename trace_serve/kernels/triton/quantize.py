"""Launches the row quantizer on tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from trace_serve.errors import ShapeError
from trace_serve.kernels.checks import check_rows, static_arithmetic
from trace_serve.kernels.triton import _jit, block_rules, plan, rows
from trace_serve.nvfp4 import PORTABLE_RULES, Quantized, Rules
from trace_serve.recipe import BLOCK, ROTATIONS


@dataclass(frozen=True)
class QuantizedRows:
    """What one pass over rows [N, K] yields.

    Attributes:
        quantized: codes uint8 [N, K/2], scales uint8 [N, K/16], global_scale fp32 [N] and, if asked for, hints uint16
            [N, K/16], bit i = lowest bit of value i's code.
        values: bfloat16 [N, K], what the codes stand for; None unless asked for.
    """

    quantized: Quantized
    values: Tensor | None


def check_rotation(rotation: int) -> None:
    """Refuses a rotation width that has no fused kernel.

    Raises:
        ShapeError: a width other than 0, 16, 32, 64 and 128.
    """
    if rotation not in ROTATIONS:
        raise ShapeError(f"rotation: got width {rotation}, expected one of {ROTATIONS}", field="rotation")


def rotation_factor(rotation: int) -> float:
    """fp32(1/sqrt(width)) as a Python float; 1.0 without rotation."""
    return float(torch.tensor(1.0 / math.sqrt(rotation), dtype=torch.float32)) if rotation else 1.0


def quantize_rows(
    x: Tensor,
    *,
    rules: Rules = PORTABLE_RULES,
    rotation: int = 0,
    global_scale: Tensor | float | None = None,
    encode_scale: float | None = None,
    counters: Tensor | None = None,
    hints: bool = False,
    values: bool = False,
) -> QuantizedRows:
    """Rotates and quantizes each row, bit for bit as `nvfp4.rotate` and `nvfp4.quantize`, in one pass over `x`.

    Args:
        x: bfloat16, float16 or float32 [N, K], K a multiple of 16 and at most 32768; N may be 0.
        rules: the recipe's rules of the operand.
        rotation: width of the Hadamard rotation, one of `ROTATIONS` that divides K.
        global_scale: fp32 [N], positive and finite (not checked on a GPU: that would wait for it); one number for every
            row; or None for the scale that the rules take from each rotated row.
        encode_scale: S beside one number, where the recipe starts from it (`nvfp4.GlobalScale.encode`); the arithmetic
            then uses S and 1/S, and the number is only kept.
        counters: int64 [3] on the device of `x`, incidents are added in place.
        hints, values: what to return beside the codes.

    Raises:
        ShapeError: an argument of the wrong shape, dtype or device, or a row that is too long.
        RecipeError: rules that these kernels do not implement.
    """
    check_rows(x, rotation, None if isinstance(global_scale, Tensor) else global_scale, encode_scale)
    return _quantize(x, x.shape[1], 0, rules, rotation, global_scale, encode_scale, counters, hints, values)


def quantize_silu_and_mul(
    gate_up: Tensor,
    *,
    rules: Rules = PORTABLE_RULES,
    rotation: int = 0,
    global_scale: Tensor | float | None = None,
    encode_scale: float | None = None,
    counters: Tensor | None = None,
    hints: bool = False,
    values: bool = False,
) -> QuantizedRows:
    """`quantize_rows` of `silu.silu_and_mul(gate_up)`, bit for bit, without writing the product out.

    Args:
        gate_up: bfloat16 [N, 2 * K], the gate in the first half of each row and the up projection in the second; K and
            the other arguments as in `quantize_rows`.

    Raises:
        ShapeError: as `quantize_rows`, or `gate_up` is not bfloat16 with halves of whole blocks.
    """
    if gate_up.dtype != torch.bfloat16 or gate_up.dim() != 2 or gate_up.shape[1] % (2 * BLOCK):
        raise ShapeError(
            f"gate_up: got {gate_up.dtype} {tuple(gate_up.shape)}, expected bfloat16 [rows, 2 * K] with K a multiple "
            f"of {BLOCK}",
            field="gate_up",
        )
    k = gate_up.shape[1] // 2
    check_rows(gate_up[:, :k], rotation, None if isinstance(global_scale, Tensor) else global_scale, encode_scale)
    return _quantize(gate_up, k, k // BLOCK, rules, rotation, global_scale, encode_scale, counters, hints, values)


def _quantize(
    x: Tensor,
    k: int,
    gate_blocks: int,
    rules: Rules,
    rotation: int,
    global_scale: Tensor | float | None,
    encode_scale: float | None,
    counters: Tensor | None,
    hints: bool,
    values: bool,
) -> QuantizedRows:
    check_rotation(rotation)
    number = block_rules.number_of(rules)
    n = x.shape[0]
    g = _row_scales(x, global_scale)
    check_counters(x.device, counters)
    codes = torch.empty((n, k // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((n, k // BLOCK), dtype=torch.uint8, device=x.device)
    bits = torch.empty((n, k // BLOCK), dtype=torch.uint16, device=x.device) if hints else None
    kept = torch.empty((n, k), dtype=torch.bfloat16, device=x.device) if values else None
    out = QuantizedRows(Quantized(codes, scales, g, bits), kept)
    if x.numel() == 0:
        return out
    x = addressable(x)
    mode = _mode(global_scale, rules)
    number_given = 1.0 if global_scale is None or isinstance(global_scale, Tensor) else global_scale
    scale, encode, decode = static_arithmetic(number_given, encode_scale)
    k_blocks, total, row_stride = k // BLOCK, n * k // BLOCK, x.stride(0) // BLOCK
    if mode == rows.STATIC and not gate_blocks and (x.is_contiguous() or k_blocks > plan.MAX_ROW_BLOCKS):
        x = x.contiguous()
        k_blocks = row_stride = plan.FLAT_BLOCKS
    if k_blocks > plan.MAX_ROW_BLOCKS:
        raise ShapeError(f"x: rows of {k} values, expected at most {plan.MAX_ROW_BLOCKS * BLOCK}", field="x")
    count = -(-total // k_blocks)
    packed = x.dtype == torch.bfloat16
    if _jit.INTERPRETED:
        cut = plan.plan_rows_interpreted(k_blocks)
    else:
        unpacked = bool(rotation or gate_blocks or not packed)
        cut = plan.plan_rows(k_blocks, count, rotation=rotation, unpacked=unpacked)
    _jit.launch(
        rows.quantize_rows_kernel,
        (-(-count // (cut.rows * cut.steps)),),
        x.view(torch.int32) if packed else x,
        codes.view(torch.int64),
        scales,
        scales if bits is None else bits.view(torch.int16),
        g,
        codes if kept is None else kept.view(torch.int32),
        scales if counters is None else counters,
        total,
        row_stride,
        cut.steps,
        cut.chunks,
        scale,
        encode,
        decode,
        k_blocks=k_blocks,
        rows=cut.rows,
        lanes=cut.lanes,
        chunks=cut.chunks,
        mode=mode.value,
        scale_max=int(rules.scale_max),
        packed=packed,
        gate_blocks=gate_blocks,
        rotation=rotation,
        factor=rotation_factor(rotation),
        with_hints=hints,
        with_values=values,
        with_counters=counters is not None,
        rules=number,
        level=_jit.device_level(x.device),
        num_warps=cut.num_warps,
    )
    return out


def _mode(global_scale: Tensor | float | None, rules: Rules) -> tl.constexpr:
    if isinstance(global_scale, Tensor):
        return rows.GIVEN
    if global_scale is not None:
        return rows.STATIC
    return rows.PER_TOKEN if rules.token_scale == "per_token" else rows.POW2_PER_TOKEN


def addressable(x: Tensor) -> Tensor:
    """`x` itself where its last dimension is dense and blocks start at 32-byte boundaries, otherwise a copy.

    float16 is widened to float32.
    """
    if x.dtype == torch.float16:
        x = x.to(torch.float32)
    aligned = x.data_ptr() % 32 == 0 and all(stride % BLOCK == 0 for stride in x.stride()[:-1])
    return x if x.stride(-1) == 1 and aligned else x.contiguous()


def _row_scales(x: Tensor, global_scale: Tensor | float | None) -> Tensor:
    if global_scale is None:
        return torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if not isinstance(global_scale, Tensor):
        return torch.full((x.shape[0],), global_scale, dtype=torch.float32, device=x.device)
    good = global_scale.dtype == torch.float32 and global_scale.shape == x.shape[:1]
    if not good or global_scale.device != x.device:
        raise ShapeError(
            f"global_scale: got {global_scale.dtype} {tuple(global_scale.shape)} on {global_scale.device}, expected "
            f"float32 [{x.shape[0]}] on {x.device}",
            field="global_scale",
        )
    if x.device.type == "cpu" and not bool(((global_scale > 0) & global_scale.isfinite()).all()):
        raise ShapeError("global_scale: got a value that is not positive and finite", field="global_scale")
    return global_scale.contiguous()


def check_counters(device: torch.device, counters: Tensor | None) -> None:
    """Refuses counters that are not int64 [3] on `device`.

    Raises:
        ShapeError: otherwise.
    """
    if counters is None:
        return
    if counters.dtype != torch.int64 or counters.shape != (3,) or counters.device != device:
        raise ShapeError(
            f"counters: got {counters.dtype} {tuple(counters.shape)} on {counters.device}, expected int64 [3] on "
            f"{device}",
            field="counters",
        )
