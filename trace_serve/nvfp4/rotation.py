"""Blockwise Hadamard rotation over the last dimension.

The matrix is Sylvester's, with entries +-1/sqrt(width): symmetric and orthonormal, so it is its own inverse and leaves
every dot product unchanged when both sides are rotated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trace_serve.errors import ShapeError


def rotate(x: Tensor, width: int) -> Tensor:
    """Rotates consecutive groups of `width` values; returns fp32 in the shape of `x`.

    The sums run in fp32 as radix-2 butterflies of ascending stride, so that every backend adds in the same order, and
    the factor fp32(1/sqrt(width)) is applied last (exact for widths 16 and 64).

    Args:
        x: floating point [..., K].
        width: 0 (off) or a power of two that divides K.

    Raises:
        ShapeError: the width is not a power of two or does not divide K.
    """
    out = x.to(torch.float32)
    if width == 0:
        return out
    if width < 0 or width & (width - 1) or x.shape[-1] % width:
        raise ShapeError(
            f"rotation: width {width} must be a power of two that divides the last dimension {x.shape[-1]}",
            field="rotation",
        )
    stride = 1
    while stride < width:
        pairs = out.reshape(*x.shape[:-1], -1, 2, stride) if x.numel() else out.reshape(0, 2, stride)
        low, high = pairs.select(-2, 0), pairs.select(-2, 1)
        out = torch.stack((low + high, low - high), dim=-2)
        stride *= 2
    return out.reshape(x.shape) * torch.full((), 1.0 / math.sqrt(width), device=x.device)


def hadamard(width: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """The rotation as a matrix [width, width]."""
    return rotate(torch.eye(width, device=device), width).to(dtype)
