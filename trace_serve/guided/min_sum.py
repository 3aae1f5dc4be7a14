"""The decoder of syndromes: normalized min-sum in layers (Hocevar, 2004), compiled by numba.

It looks for the pattern of differences between the trainer's own bits and the rollout's. Multiplying all reliabilities
by one number changes no decision, so nobody has to know how noisy a layer is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, int64, types, uint64

from trace_serve.kernels.cpu_stages import compiled

ITERATIONS = 25
_LANES = 64
_MOST_COLUMNS = 24
_NORMALIZATION = np.float32(0.8)
_FAR = np.float32(1e30)


@compiled(boolean(int64[::1], int64[::1], int64[::1], uint64[::1], uint64[::1]))
def _satisfied(starts: Any, columns: Any, shifts: Any, syndrome: Any, found: Any) -> bool:
    for row in range(starts.size - 1):
        parity = uint64(0)
        for edge in range(starts[row], starts[row + 1]):
            word, shift = found[columns[edge]], uint64(shifts[edge])
            # Shifting by the full width is undefined.
            parity ^= (word >> shift) | (word << ((uint64(64) - shift) & uint64(63)))
        if parity != syndrome[row]:
            return False
    return True


@compiled(int64(int64[::1], int64[::1], int64[::1], uint64[::1], float32[:, ::1], uint64[::1]))
def _decode(starts: Any, columns: Any, shifts: Any, syndrome: Any, reliability: Any, found: Any) -> int:
    rows = starts.size - 1
    kept = np.zeros((columns.size, _LANES), np.float32)
    seen = np.empty((_MOST_COLUMNS, _LANES), np.float32)
    least, second, sign = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    for iteration in range(1, ITERATIONS + 1):
        for row in range(rows):
            first, count = starts[row], starts[row + 1] - starts[row]
            for z in range(_LANES):
                least[z] = second[z] = _FAR
                sign[z] = np.float32(1) - np.float32(2) * np.float32((syndrome[row] >> uint64(z)) & uint64(1))
            for edge in range(count):
                values, messages, q = reliability[columns[first + edge]], kept[first + edge], seen[edge]
                shift = shifts[first + edge]
                for z in range(_LANES - shift):
                    q[z] = values[z + shift] - messages[z]
                for z in range(_LANES - shift, _LANES):
                    q[z] = values[z + shift - _LANES] - messages[z]
                for z in range(_LANES):
                    size = abs(q[z])
                    second[z] = min(second[z], max(least[z], size))
                    least[z] = min(least[z], size)
                    sign[z] = -sign[z] if q[z] < 0 else sign[z]
            for edge in range(count):
                values, messages, q = reliability[columns[first + edge]], kept[first + edge], seen[edge]
                shift = shifts[first + edge]
                for z in range(_LANES):
                    size = second[z] if abs(q[z]) == least[z] else least[z]
                    size *= sign[z] * _NORMALIZATION
                    messages[z] = -size if q[z] < 0 else size
                    q[z] += messages[z]
                for z in range(_LANES - shift):
                    values[z + shift] = q[z]
                for z in range(_LANES - shift, _LANES):
                    values[z + shift - _LANES] = q[z]
        for column in range(found.size):
            word = uint64(0)
            for z in range(_LANES):
                word |= uint64(reliability[column, z] < 0) << uint64(z)
            found[column] = word
        if _satisfied(starts, columns, shifts, syndrome, found):
            return iteration
    return 0


@compiled(
    types.void(
        int64[::1], int64[::1], int64[::1], uint64[:, ::1], float32[:, :, ::1], uint64[:, ::1], int64[::1], int64, int64
    )
)
def find_differences(
    starts: Any,
    columns: Any,
    shifts: Any,
    syndromes: Any,
    reliability: Any,
    found: Any,
    iterations: Any,
    begin: int,
    end: int,
) -> None:
    """Writes the likeliest differences with the given syndromes, for blocks `begin` to `end - 1`; without the GIL.

    Args:
        starts: int64 [k + 1]; edges `starts[i]` to `starts[i + 1] - 1` are those of check row i, at most 24.
        columns, shifts: int64 [E]; check z of a row covers bit (z + shift) mod 64 of the column.
        syndromes: uint64 [N, k], parities of the differences; bit z is check z of the row.
        reliability: fp32 [N, 32, 64], not negative; 0 where nothing is known. Overwritten.
        found: uint64 [N, 32], the differences.
        iterations: int64 [N], how many it took; 0 where no pattern with the syndrome was found.
    """
    for block in range(begin, end):
        iterations[block] = _decode(starts, columns, shifts, syndromes[block], reliability[block], found[block])
