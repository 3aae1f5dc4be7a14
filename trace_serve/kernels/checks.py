"""Argument checks shared by the backends."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from trace_serve.errors import ShapeError
from trace_serve.nvfp4.quantize import check_blocks
from trace_serve.recipe import BLOCK, ROTATIONS


def check_rows(x: Tensor, rotation: int, global_scale: float | None, encode_scale: float | None = None) -> None:
    """Refuses rows that `quantize_rows` cannot take.

    Raises:
        ShapeError: naming the argument at fault.
    """
    if x.dim() != 2:
        raise ShapeError(f"x: got shape {tuple(x.shape)}, expected [rows, K]", field="x")
    check_blocks(x)
    if rotation not in ROTATIONS or (rotation and x.shape[1] % rotation):
        raise ShapeError(
            f"rotation: got width {rotation}, expected one of {ROTATIONS} that divides the last dimension {x.shape[1]}",
            field="rotation",
        )
    if global_scale is not None and not (global_scale > 0 and math.isfinite(global_scale)):
        raise ShapeError(
            f"global_scale: got {global_scale}, expected a positive finite number or None", field="global_scale"
        )
    if encode_scale is not None and (global_scale is None or not (encode_scale > 0 and math.isfinite(encode_scale))):
        raise ShapeError(
            f"encode_scale: got {encode_scale} with global_scale {global_scale}, expected two positive finite numbers",
            field="encode_scale",
        )


def static_arithmetic(global_scale: float, encode_scale: float | None) -> tuple[float, float, float]:
    """The kept g, and the S and g that the arithmetic uses, each fp32: 1/g and g, or S and 1/S where S is given."""
    one = np.float32(1.0)
    if encode_scale is None:
        g = np.float32(global_scale)
        return float(g), float(one / g), float(g)
    return float(np.float32(global_scale)), float(np.float32(encode_scale)), float(one / np.float32(encode_scale))


def check_codes(codes: Tensor) -> None:
    """Refuses what are not packed codes of whole blocks.

    Raises:
        ShapeError: naming the argument.
    """
    if codes.dtype != torch.uint8 or codes.dim() == 0 or codes.shape[-1] % (BLOCK // 2):
        raise ShapeError(
            f"codes: got {codes.dtype} {tuple(codes.shape)}, expected uint8 [..., K/2] with K a multiple of {BLOCK}",
            field="codes",
        )


def check_pool(codes: Tensor, scales: Tensor, index: Tensor) -> None:
    """Refuses a KV pool whose codes and scales do not fit each other, or an index of another kind.

    Raises:
        ShapeError: naming the argument at fault.
    """
    if codes.dtype != torch.uint8 or codes.dim() != 3 or codes.shape[2] % (BLOCK // 2):
        raise ShapeError(
            f"codes: got {codes.dtype} {tuple(codes.shape)}, expected uint8 [slots, heads, D/2] with D a multiple "
            f"of {BLOCK}",
            field="codes",
        )
    expected = (codes.shape[0], codes.shape[1], codes.shape[2] * 2 // BLOCK)
    if scales.dtype != torch.uint8 or tuple(scales.shape) != expected:
        raise ShapeError(f"scales: got {scales.dtype} {tuple(scales.shape)}, expected uint8 {expected}", field="scales")
    if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        raise ShapeError(f"index: got {index.dtype} {tuple(index.shape)}, expected int64 or int32 [n]", field="index")
