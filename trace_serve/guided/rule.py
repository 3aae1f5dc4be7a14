"""Rounding toward the rollout's outcome, value by value.

Compact guidance knows the lowest bit of the rollout's code. Neighbouring magnitudes differ in that bit, so of the two
around a value exactly one has it. Let u be the trainer's value and v the rollout's under the same scale, n the code
nearest to u, o the code on the other side of u, and d_far the distance from u to the boundary of n's cell away from o.
If |u - v| < d_far, following the bit is never worse than rounding to nearest; if also |u - v| < tau * (step from n to
o), the result is the rollout's. Outside of that a bit can mislead, since n-1 and n+1 have the same one: the guard `tau`
bounds how far from the boundary between n and o a bit is believed. Saturated values are guided without condition.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from trace_serve.errors import ShapeError
from trace_serve.nvfp4 import e2m1, e4m3

TAU_ALIGNED = 0.5
"""No guard: right where the layers before this one round as the rollout did."""

TAU_UNALIGNED = 0.25
"""Where they do not."""

_TOP_SCALE_BYTE = 0x7E


@cache
def _code_grid(device: torch.device) -> Tensor:
    return torch.tensor(e2m1.MAGNITUDES, dtype=torch.float32, device=device)


@cache
def _scale_grid(device: torch.device) -> Tensor:
    finite = torch.arange(_TOP_SCALE_BYTE + 1, dtype=torch.int32, device=device).to(torch.uint8)
    return e4m3.decode(finite)


def follow_parity(u: Tensor, bits: Tensor, *, tau: float) -> Tensor:
    """Codes of `u` that follow the rollout's lowest bits.

    Args:
        u: fp32 value / (rollout's block scale * global scale), any shape; 0 where the block scale is 0; no NaN.
        bits: 0 or 1 a value (uint8 or bool), the shape of `u`.
        tau: guard in (0, 0.5]; see `TAU_ALIGNED` and `TAU_UNALIGNED`.

    Returns:
        uint8 codes 0..15, the shape of `u`; the sign is that of `u`, and -0 has the parity of 0.

    Raises:
        ShapeError: shapes, dtypes or a `tau` that do not fit.
    """
    _check(u, bits, "bits", tau)
    nearest = e2m1.encode(u)
    index = _follow(u.abs(), (nearest & 7).to(torch.int64), bits, _code_grid(u.device), tau)
    return index.to(torch.uint8) | (nearest & e2m1.SIGN_BIT)


def follow_scale_parity(scale: Tensor, bits: Tensor, *, tau: float = TAU_ALIGNED) -> Tensor:
    """E4M3 bytes of the trainer's own unrounded block scales that follow the rollout's lowest bits.

    Args:
        scale: fp32, not negative, any shape; no NaN.
        bits: 0 or 1 a scale (uint8 or bool), the shape of `scale`.
        tau: guard in (0, 0.5].

    Returns:
        uint8 bytes 0..0x7E, the shape of `scale`; a scale of exactly 0 stays 0, whatever its bit says.

    Raises:
        ShapeError: shapes, dtypes or a `tau` that do not fit.
    """
    _check(scale, bits, "bits", tau)
    nearest = e4m3.encode(scale).to(torch.int64)
    return _follow(scale, nearest, bits, _scale_grid(scale.device), tau).to(torch.uint8)


def follow_codes(u: Tensor, codes: Tensor) -> Tensor:
    """Full guidance: of the two grid points around `u`, the one nearer to the rollout's code.

    |result - rollout| never exceeds |nearest - rollout|; where both are equally near, the nearest to `u` is kept.

    Args:
        u: fp32, any shape, no NaN, as in `follow_parity`.
        codes: the rollout's codes, uint8 0..15, the shape of `u`.

    Returns:
        uint8 codes 0..15 with the sign of `u`.

    Raises:
        ShapeError: shapes or dtypes that do not fit.
    """
    _check(u, codes, "codes", TAU_ALIGNED)
    grid = _code_grid(u.device)
    nearest = e2m1.encode(u)
    n = (nearest & 7).to(torch.int64)
    other = _other_side(u.abs(), n, grid)
    # Distances are taken along the sign of u, so that a rollout beyond zero pulls toward zero.
    target = e2m1.decode(codes) * torch.where(torch.signbit(u), -1.0, 1.0)
    take_other = (grid[other] - target).abs() < (grid[n] - target).abs()
    return torch.where(take_other, other, n).to(torch.uint8) | (nearest & e2m1.SIGN_BIT)


def _other_side(a: Tensor, n: Tensor, grid: Tensor) -> Tensor:
    """Index on the other side of `a` from its nearest index; `n` itself where there is none."""
    top = grid.numel() - 1
    other = n + (a > grid[n]).to(torch.int64) - (a < grid[n]).to(torch.int64)
    # A saturated value lies beyond the grid; the point below the largest is its only neighbour.
    return torch.where((n == top) & (a >= grid[top]), top - 1, other)


def _follow(a: Tensor, n: Tensor, bits: Tensor, grid: Tensor, tau: float) -> Tensor:
    top = grid.numel() - 1
    other = _other_side(a, n, grid)
    middle = (grid[n] + grid[other]) * 0.5
    near = (a - middle).abs() <= tau * (grid[other] - grid[n]).abs()
    saturated = (n == top) & (a >= grid[top])
    follow = ((n & 1) != bits.to(torch.int64)) & (other != n) & (near | saturated)
    return torch.where(follow, other, n)


def _check(u: Tensor, outcome: Tensor, name: str, tau: float) -> None:
    if u.dtype != torch.float32:
        raise ShapeError(f"u: dtype is {u.dtype}, expected float32", field="u")
    if outcome.shape != u.shape or outcome.dtype not in (torch.uint8, torch.bool):
        raise ShapeError(
            f"{name}: got {outcome.dtype} {tuple(outcome.shape)}, expected uint8 {tuple(u.shape)}", field=name
        )
    check_tau(tau)


def check_tau(tau: float) -> None:
    """Raises:
    ShapeError: a guard that is not in (0, 0.5].
    """
    if not 0 < tau <= 0.5:
        raise ShapeError(f"tau: got {tau}, expected a number above 0 and at most 0.5", field="tau")
