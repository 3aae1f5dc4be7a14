"""silu(gate) * up with one definition for every backend.

Library exponentials differ in the last bit from one device to the next, and a last bit decides codes. Here every step
is an fp32 operation rounded to nearest on its own, so that torch, the interpreter and every GPU agree:

    x = -gate; n = round(x * log2(e)); r = (x - n * C1) - n * C2, with C1 + C2 = ln(2) and n * C1 exact
    e = 2^n * (Taylor polynomial of degree 6 of exp at r), infinity where x > 88
    product = (gate / (1 + e)) * up, rounded to BF16

The relative error before the last rounding is below 1e-6; the BF16 rounding is 4e-3 wide.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from trace_serve.errors import ShapeError
from trace_serve.kernels.triton._jit import jit

# 1.5 * 2^23: adding it rounds to a whole number, which is left in the low bits.
_WHOLE = tl.constexpr(12582912.0)
_LOG2_E = tl.constexpr(1.44269504)
_C1 = tl.constexpr(0.693359375)
_C2 = tl.constexpr(-0.000212194442)
_LOW = tl.constexpr(-87.0)
_HIGH = tl.constexpr(88.0)
_P6 = tl.constexpr(1 / 720)
_P5 = tl.constexpr(1 / 120)
_P4 = tl.constexpr(1 / 24)
_P3 = tl.constexpr(1 / 6)


@jit
def silu_times(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """fp32 silu(gate) * up, before it is rounded to BF16."""
    x = -gate
    clamped = tl.minimum(tl.maximum(x, _LOW), _HIGH)
    shifted = clamped * _LOG2_E + _WHOLE
    n = shifted - _WHOLE
    r = (clamped - n * _C1) - n * _C2
    p = r * _P6 + _P5
    p = p * r + _P4
    p = p * r + _P3
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    power = ((shifted.to(tl.uint32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    e = tl.where(x > _HIGH, float("inf"), p * power)
    return tl.div_rn(gate, e + 1.0) * up


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """The same in torch: bfloat16 [..., 2 * K], gate then up, to bfloat16 [..., K].

    Raises:
        ShapeError: another dtype, or an odd last dimension.
    """
    if gate_up.dtype != torch.bfloat16 or gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ShapeError(
            f"gate_up: got {gate_up.dtype} {tuple(gate_up.shape)}, expected bfloat16 [..., 2 * K]", field="gate_up"
        )
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    x = -gate
    clamped = x.clamp(_LOW.value, _HIGH.value)
    shifted = clamped * _LOG2_E.value + _WHOLE.value
    n = shifted - _WHOLE.value
    r = (clamped - n * _C1.value) - n * _C2.value
    p = r * _P6.value + _P5.value
    for coefficient in (_P4.value, _P3.value, 0.5, 1.0, 1.0):
        p = p * r + coefficient
    power = ((shifted.contiguous().view(torch.int32) << 23) + 0x3F800000).view(torch.float32)
    e = torch.where(x > _HIGH.value, torch.inf, p * power)
    return ((gate / (e + 1.0)) * up).to(torch.bfloat16)
