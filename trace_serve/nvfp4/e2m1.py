"""E2M1, the four-bit value format of NVFP4: sign bit, two exponent bits, one mantissa bit.

Magnitude codes 0..7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats 1.0, table 5.3.3); bit 3 is the
sign. Neighbouring magnitudes always differ in the lowest bit, which is what a rounding hint transmits.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGN_BIT = 8


@cache
def _values(device: torch.device) -> Tensor:
    return torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32, device=device)


@cache
def _midpoints(device: torch.device) -> Tensor:
    return torch.tensor([(a + b) / 2 for a, b in pairwise(MAGNITUDES)], dtype=torch.float32, device=device)


def encode(u: Tensor, ties: str = "even") -> Tensor:
    """Rounds to the nearest E2M1 value, saturating at 6; the sign is kept even where the magnitude rounds to zero.

    Args:
        u: fp32, any shape, no NaN (the caller masks non-finite blocks).
        ties: `even`: to the even code, the same as `cvt.rn.satfinite.e2m1x2.f32`; `up`: to the larger magnitude.

    Returns:
        uint8 codes 0..15, the shape of `u`.
    """
    a = u.abs()
    if ties == "up":
        index = torch.bucketize(a, _midpoints(u.device), right=True)
    else:
        # Rounding happens before the offset is added: the sum itself would round away the bits that break a tie.
        index = torch.minimum(torch.round(a * 2), torch.round(a) + 2)
        index = torch.minimum(index, torch.round(a * 0.5) + 4).clamp_(max=7)
    return index.to(torch.uint8) | (torch.signbit(u).to(torch.uint8) << 3)


def decode(codes: Tensor) -> Tensor:
    """The fp32 values of uint8 codes 0..15; code 8 is -0."""
    return _values(codes.device)[codes.to(torch.int32)]
