"""One packed matrix as the values it stands for."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from trace_serve import nvfp4
from trace_serve.errors import PolicyError
from trace_serve.nvfp4 import Quantized, e4m3
from trace_serve.policy.layouts import Layout

_SIGN = 0x80


def check_scales(module: str, layout: Layout, scales: Tensor) -> None:
    """Refuses block scales that no quantizer writes.

    Args:
        module: for messages.
        layout: for the tensor's name.
        scales: float8_e4m3fn [N, K/16].

    Raises:
        PolicyError: a scale is NaN or negative.
    """
    data = scales.contiguous().view(torch.uint8)
    nan = (data & 0x7F) == e4m3.NAN_BYTE
    negative = (data & _SIGN) != 0
    for what, bad in (("NaN", nan), ("negative", negative & ~nan)):
        if bool(bad.any()):
            row, block = (int(i) for i in bad.nonzero()[0])
            name = f"{module}.{layout.scales}"
            raise PolicyError(
                f"tensor {name!r}: {int(bad.sum())} block scales are {what}, the first at [{row}, {block}]; the "
                "checkpoint is damaged, or was made from weights that are not finite",
                field=name,
            )


def decode_scale(name: str, layout: Layout, stored: Tensor) -> float:
    """The factor g that a stored global scale stands for, in the precision of Python.

    Raises:
        PolicyError: it is not positive and finite.
    """
    value = float(stored.reshape(()))
    if not (math.isfinite(value) and value > 0):
        raise PolicyError(f"tensor {name!r}: the global scale is {value}, expected a positive finite one", field=name)
    return 1.0 / value if layout.reciprocal else value


def is_power_of_two(g: float) -> bool:
    return math.frexp(g)[0] == 0.5


def image(module: str, layout: Layout, parts: Mapping[str, Tensor]) -> Tensor:
    """The matrix as BF16 [N, K], exactly.

    Args:
        module: for messages.
        layout: the names of the parts.
        parts: codes, block scales and global scale by part.

    Raises:
        PolicyError: a scale is damaged, or BF16 cannot hold a value.
    """
    codes, scales = parts[layout.codes], parts[layout.scales]
    check_scales(module, layout, scales)
    name = f"{module}.{layout.global_scale}"
    g = decode_scale(name, layout, parts[layout.global_scale])
    packed = Quantized(codes, scales.contiguous().view(torch.uint8), torch.ones((), dtype=torch.float32))
    if is_power_of_two(g):
        # code x block scale has at most 6 significant bits, and a power of two only moves the exponent.
        scaled = torch.tensor(g, dtype=torch.float32)
        return nvfp4.dequantize(Quantized(packed.codes, packed.scales, scaled), torch.bfloat16)
    exact = nvfp4.dequantize(packed, torch.float64) * g
    rounded = exact.to(torch.bfloat16)
    if not torch.equal(rounded.to(torch.float64), exact):
        raise PolicyError(
            f"tensor {name!r}: the global scale {g:.8g} is not a power of two, so BF16 cannot hold the weights "
            "exactly, and this engine multiplies their BF16 images; build the policy from the BF16 model under a "
            "recipe with weight_global_scale 'pow2_per_expert'",
            field=name,
        )
    return rounded
