"""NVFP4 under every choice of a recipe, one block at a time in numpy scalars, written from its definitions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from nvfp4_oracle import E4M3, GRID, nearest_even

F32_MAX = np.finfo(np.float32).max


def encode_e4m3(value: np.float32) -> int:
    return int(nearest_even(np.array([value], dtype=np.float64), E4M3)[0])


def encode_e2m1(u: np.float32, ties: str) -> int:
    magnitude = min(abs(float(u)), 6.0)
    distances = np.abs(GRID - magnitude)
    nearest = [i for i in range(8) if distances[i] == distances.min()]
    index = nearest[-1] if ties == "up" else next((i for i in nearest if i % 2 == 0), nearest[0])
    return index + 8 * bool(np.signbit(u))


def block_scale(formula: str, amax: np.float32, s: np.float32, g: np.float32) -> np.float32:
    six, sixth = np.float32(6), np.float32(1 / 6)
    return {
        "amax_times_sixth": lambda: amax * (s * sixth),
        "amax_over_six": lambda: (amax / six) * s,
        "s_times_amax_sixth": lambda: s * (amax * sixth),
        "amax_over_six_g": lambda: amax / (six * g),
    }[formula]()


def candidate(
    x: NDArray[np.float32], scale: np.float32, g: np.float32, ties: str, zero_block: str, reciprocal: str
) -> tuple[list[int], int]:
    byte = encode_e4m3(scale)
    if byte == 0:
        byte = {"one": 0x38 if scale == 0 else 1, "min_subnormal": 1}.get(zero_block, 0)
    if byte == 0 and zero_block == "zero":
        return [0] * 16, 0
    divisor = np.float32(E4M3[byte]) * g
    if reciprocal == "divide":
        u = x / divisor
    else:
        inverse = np.float32(1) / divisor
        u = x * min(inverse, F32_MAX)
    return [encode_e2m1(v, ties) for v in u], byte


def squared_error(codes: list[int], byte: int, x: NDArray[np.float32], s: np.float32) -> np.float32:
    total = np.float32(0)
    for code, value in zip(codes, x, strict=True):
        kept = np.float32(GRID[code & 7]) * np.float32(E4M3[byte]) * np.float32(-1 if code & 8 else 1)
        difference = kept - value * s
        total = total + difference * difference
    return total


def quantize_block(
    x: NDArray[np.float32],
    *,
    s: np.float32,
    g: np.float32,
    formula: str = "amax_times_sixth",
    ties: str = "even",
    zero_block: str = "zero",
    reciprocal: str = "exact",
    four_over_six: bool = False,
    amax: np.float32 | None = None,
) -> tuple[list[int], int]:
    """Codes [16] and the scale byte of one finite fp32 block; s and g are the scales that the arithmetic uses."""
    with np.errstate(all="ignore"):
        scale = block_scale(formula, np.abs(x).max() if amax is None else amax, s, g)
        six = candidate(x, scale, g, ties, zero_block, reciprocal)
        if not four_over_six:
            return six
        four = candidate(x, scale * np.float32(1.5), g, ties, zero_block, reciprocal)
        return four if squared_error(*four, x, s) < squared_error(*six, x, s) else six
