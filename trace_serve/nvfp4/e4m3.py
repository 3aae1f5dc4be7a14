"""E4M3 (the `fn` variant: no infinity, NaN is 0x7F), the format of NVFP4's block scales."""

from __future__ import annotations

import torch
from torch import Tensor

from trace_serve.recipe import E4M3_MAX

NAN_BYTE = 0x7F
ONE_BYTE = 0x38
MIN_SUBNORMAL_BYTE = 0x01
CLIP_THRESHOLD = 464.0
"""Scales above this would round beyond 448, so saturation changed them; 464 itself is a tie that goes to 448."""


def encode(scale: Tensor) -> Tensor:
    """Rounds non-negative fp32 scales to the nearest E4M3 byte, ties to even, saturating at 448; NaN gives 0x7F."""
    return scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode(scale_bytes: Tensor) -> Tensor:
    """The fp32 values of uint8 E4M3 bytes."""
    return scale_bytes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
