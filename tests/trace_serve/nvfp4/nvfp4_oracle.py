"""An independent NVFP4 quantizer for one block at a time: brute-force nearest search in float64, no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e4m3_grid() -> NDArray[np.float64]:
    values = [m * 2.0**-9 for m in range(8)]
    values += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return np.array(values[:127])


E4M3 = e4m3_grid()


def nearest_even(values: NDArray[np.float64], grid: NDArray[np.float64]) -> NDArray[np.int64]:
    """Index of the nearest grid value, ties to the even index, saturating at both ends."""
    values = np.minimum(values, grid[-1])
    distance = np.abs(values[:, None] - grid[None, :])
    best = distance.min(axis=1, keepdims=True)
    candidates = distance == best
    even = candidates & (np.arange(len(grid)) % 2 == 0)
    choice = np.where(even.any(axis=1, keepdims=True), even, candidates)
    return choice.argmax(axis=1)


def quantize_blocks(x: NDArray[np.float32], g: float) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Unpacked codes [N, 16] and scale bytes [N] of finite fp32 blocks [N, 16]."""
    one = np.float32(1)
    factor = np.float32((one / np.float32(g)) * np.float32(1 / 6))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scales = nearest_even((np.abs(x).max(axis=1) * factor).astype(np.float64), E4M3)
        inverse = one / (E4M3[scales].astype(np.float32) * np.float32(g))
        u = x * inverse[:, None]
    u[scales == 0] = 0
    magnitude = nearest_even(np.abs(u).astype(np.float64).ravel(), GRID).reshape(x.shape)
    codes = magnitude + 8 * (np.signbit(x) & (scales != 0)[:, None])
    return codes.astype(np.uint8), scales.astype(np.uint8)
