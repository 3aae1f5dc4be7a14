"""`triton.jit` with a type that strict checking accepts, and the arithmetic level a kernel is compiled for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton

PORTABLE = 0
"""Integer and fp32 arithmetic only: exact on every device and in the interpreter."""
HOPPER = 90
"""Adds the hardware's E4M3 conversion (sm_89 and later)."""
BLACKWELL = 100
"""Adds the hardware's E2M1 conversion (sm_100 and later)."""

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels of this process run in the interpreter (TRITON_INTERPRET, read when they are defined)."""


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` for a device function; mypy sees the result as Any."""
    return triton.jit(function)


def constexpr_function(function: Callable[..., Any]) -> Any:
    """`triton.constexpr_function`: evaluated when a kernel is compiled."""
    return triton.constexpr_function(function)


def kernel(*sizes: str) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit` for a kernel; its arguments named in `sizes` change from call to call and start no recompilation."""
    return lambda function: triton.jit(function, do_not_specialize=list(sizes))


def level_of(capability: tuple[int, int]) -> int:
    """The arithmetic level for a compute capability (major, minor)."""
    if capability >= (10, 0):
        return BLACKWELL
    return HOPPER if capability >= (8, 9) else PORTABLE


def device_level(device: torch.device) -> int:
    """The arithmetic level of the device that holds a tensor."""
    if INTERPRETED or device.type != "cuda":
        return PORTABLE
    return level_of(torch.cuda.get_device_capability(device))


def launch(function: Any, grid: tuple[int, ...], *args: Any, num_warps: int, **constants: Any) -> None:
    """Runs a kernel on the device of its first argument, without contraction into fused multiply-adds."""
    device = args[0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        function[grid](*args, **constants, num_warps=num_warps, enable_fp_fusion=False)
